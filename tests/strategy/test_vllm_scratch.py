"""Which tensors are brought back after a deep sleep, and which are left alone; vLLM itself is not needed."""

import torch
from torch import Tensor, nn

from lightrft.strategy.vllm_utils.scratch import Scratch


class Layer(nn.Module):
    """With a parameter, a view of it, a buffer, a KV cache that it shares with the runner, and tensors of its own."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))
        self.kv_cache = [cache[1:]]
        self.rows = self.weight.data[:1]
        self.sums = [torch.zeros(3), torch.zeros(3)]
        self.scale = torch.tensor([0.5, 2.0])


class RopeState:
    def __init__(self) -> None:
        self.positions = torch.tensor([[0, 1, 2]])
        self.itself = self


class ModelState:
    def __init__(self) -> None:
        self.rope_state = RopeState()
        self.name = "state"


RopeState.__module__ = ModelState.__module__ = "vllm.v1.worker.gpu.model_states"


def test_what_a_model_and_its_runner_hold_beside_weights_and_cache_is_as_at_the_start() -> None:
    """WGT-03."""
    cache = torch.zeros(4)
    model, state = nn.Sequential(Layer(cache)), ModelState()
    layer = model[0]
    assert isinstance(layer, Layer)
    scratch = Scratch(model, [state], [cache])
    for tensor in (*layer.sums, layer.scale, state.rope_state.positions, cache, layer.table, layer.weight.data):
        tensor.fill_(7)
    scratch.restore()
    assert torch.cat(layer.sums).tolist() == [0.0] * 6
    assert layer.scale.tolist() == [0.5, 2.0]
    assert state.rope_state.positions.tolist() == [[0, 1, 2]]
    assert {*cache.tolist(), *layer.get_buffer("table").tolist(), *layer.weight.tolist()} == {7.0}


def test_objects_of_other_packages_are_not_looked_into() -> None:
    class Holder:
        def __init__(self) -> None:
            self.tensor = torch.ones(2)

    assert Scratch(nn.Module(), [Holder()], []).tensors == []
