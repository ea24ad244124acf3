import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.ops.log_probs import token_log_probs

N, H, V = 7, 5, 11


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, H), (V, H), (V,)))
    target_ids = torch.randint(V, (N,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target_ids


def dense_reference(hidden, weight, bias, target_ids, temperature):
    """Everything at once, in fp64; the inputs are copied, so that their gradients are apart."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    log_probs = torch.log_softmax((leaves[0] @ leaves[1].T + leaves[2]) / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return leaves, log_probs[torch.arange(len(target_ids)), target_ids], entropy


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


# log_softmax([2, 1, 0])[0] = -log(1 + e^-1 + e^-2) = -0.4076; at T = 0.5: -log(1 + e^-2 + e^-4) = -0.1429
@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.1429), (1.0, -0.4076)])
def test_temperature_divides_the_logits(temperature, expected):
    """NUM-01."""
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    log_probs, _ = token_log_probs(torch.ones(1, 1), weight, torch.tensor([0]), temperature, chunk_size=4)
    assert log_probs.item() == pytest.approx(expected, abs=1e-4)


def test_entropy_is_in_nats():
    _, entropy = token_log_probs(torch.ones(1, 1), torch.zeros(4, 1), torch.tensor([0]), 1.0, chunk_size=4)
    assert entropy.item() == pytest.approx(1.386294)  # ln 4


@pytest.mark.parametrize("chunk_size", [1, 3, N, N + 10])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_values_and_gradients_equal_the_dense_reference(chunk_size, temperature):
    hidden, weight, bias, target_ids = make_inputs()
    leaves, expected_log_probs, expected_entropy = dense_reference(hidden, weight, bias, target_ids, temperature)
    log_probs, entropy = token_log_probs(hidden, weight, target_ids, temperature, chunk_size, bias, True)
    assert_close(log_probs, expected_log_probs)
    assert_close(entropy, expected_entropy)

    token_weights = torch.linspace(-1.0, 1.0, N)
    (token_weights * log_probs + 0.3 * entropy).sum().backward()
    (token_weights.double() * expected_log_probs + 0.3 * expected_entropy).sum().backward()
    for tensor, leaf in zip((hidden, weight, bias), leaves, strict=True):
        assert_close(tensor.grad, leaf.grad)


def test_entropy_has_a_gradient_only_on_request():
    hidden, weight, _, target_ids = make_inputs()
    plain, with_grad = (token_log_probs(hidden, weight, target_ids, 1.0, 3, None, asked) for asked in (False, True))
    assert not plain[1].requires_grad and with_grad[1].requires_grad
    assert torch.equal(plain[0], with_grad[0]) and torch.equal(plain[1], with_grad[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy_grad", [False, True])
def test_values_are_the_same_to_the_bit_without_gradients(dtype, with_entropy_grad):
    """NUM-01."""
    hidden, weight, bias, target_ids = make_inputs(dtype)
    arguments = (hidden, weight, target_ids, 0.7, 3, bias, with_entropy_grad)
    trained = token_log_probs(*arguments)
    with torch.no_grad():
        scored = token_log_probs(*arguments)
    for one, other in zip(trained, scored, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_bf16_logits_are_rounded_once_and_normalised_in_fp32():
    hidden, weight, _, target_ids = make_inputs(torch.bfloat16)
    log_probs, _ = token_log_probs(hidden, weight, target_ids, 1.0, 3)
    logits = (hidden @ weight.T).double()
    assert_close(log_probs, torch.log_softmax(logits, dim=-1)[torch.arange(N), target_ids])


def test_no_tokens_reach_hidden_and_weight_with_zero_gradients():
    """NUM-07."""
    _, weight, bias, _ = make_inputs()
    hidden = torch.zeros(0, H, requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, 3, bias)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, H)
    assert weight.grad is not None and weight.grad.count_nonzero() == 0
    assert bias.grad is not None and bias.grad.count_nonzero() == 0


class LiveMemory(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, and of all that are alive, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in inputs:
                self._record(leaf)
        return result

    def _record(self, tensor: torch.Tensor) -> None:
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += tensor.numel()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, tensor.numel())

    def _release(self, key: int, numel: int) -> None:
        self._seen.discard(key)
        self.live -= numel


# Backward holds the log-probs, their gradient and that of the logits; of the entropy also the probabilities and theirs.
@pytest.mark.parametrize(("with_entropy_grad", "num_copies"), [(False, 3), (True, 5)])
def test_live_logits_are_bounded_by_the_chunk_in_both_passes(with_entropy_grad, num_copies):
    """MEM-05: sixteen chunks need as much as one; hidden states and weights are small here beside a chunk's logits."""
    chunk_size, vocabulary = 4, 10_000
    weight = torch.randn(vocabulary, 1, requires_grad=True)

    def measure(num_tokens: int) -> LiveMemory:
        hidden = torch.randn(num_tokens, 1, requires_grad=True)
        target_ids = torch.zeros(num_tokens, dtype=torch.int64)
        with LiveMemory() as memory:
            log_probs, entropy = token_log_probs(hidden, weight, target_ids, 1.0, chunk_size, None, with_entropy_grad)
            (log_probs + entropy).sum().backward()
        return memory

    one, many = measure(chunk_size), measure(16 * chunk_size)
    assert one.largest == many.largest == chunk_size * vocabulary
    # Beside the chunk: a few numbers a token, and the weight's gradient while another chunk's is added.
    assert many.peak <= num_copies * chunk_size * vocabulary + 2 * vocabulary


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_suppressed_ids_have_probability_0_and_leave_a_distribution_over_the_others(chunk_size):
    """As if the vocabulary were without them: log-probs, entropies and gradients of both."""
    torch.manual_seed(0)
    kept, suppressed = torch.tensor([0, 2, 3, 5]), torch.tensor([1, 4])
    hidden = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    places = torch.randint(4, (7,))
    results = []
    for rows, ids, targets in ((weight, suppressed, kept[places]), (weight[kept], None, places)):
        output = token_log_probs(hidden, rows, targets, 0.7, chunk_size, with_entropy_grad=True, suppressed_ids=ids)
        (output[0].sum() + 2 * output[1].sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((*output, hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    log_probs, _ = token_log_probs(hidden, weight, suppressed[:1].repeat(7), 0.7, chunk_size, suppressed_ids=suppressed)
    assert torch.isneginf(log_probs).all()
