"""How SGLang's schedulers draw: by keys, from probabilities that are there already."""

import math
from types import SimpleNamespace

import pytest
import torch

from lightrft.strategy.sglang_utils import draws
from lightrft.strategy.sglang_utils.draws import inverse_cdf
from lightrft.strategy.sglang_utils.scheduler import keep_params
from lightrft.strategy.torch_utils.sampling import keyed_uniforms, sample_tokens, uniforms_at

LAST_BELOW_1 = 1 - 2.0**-53


def keyed_draws(
    probs: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *filters: torch.Tensor
) -> torch.Tensor:
    """As the sampler asks for them, with what the scheduler makes of a batch of requests with these keys."""
    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=k, custom_params=None)) for k in keys.tolist()
    ]
    info = SimpleNamespace()
    keep_params(None, info, SimpleNamespace(reqs=requests, device=torch.device("cpu")), vocab_size=probs.shape[-1])
    return draws.keyed_draws(probs, info.sampling_seed, positions.long(), *filters)


def test_a_token_owns_its_probability_s_part_of_the_unit_interval() -> None:
    """0.5, 0, 0.3, 0.2 own [0, 0.5), nothing, [0.5, 0.8), [0.8, 1)."""
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, LAST_BELOW_1], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).expand(6, -1)
    assert inverse_cdf(weights, uniforms).tolist() == [0, 0, 2, 2, 3, 3]
    assert inverse_cdf(torch.tensor([[0.0, 1.0, 0.0]]), uniforms[:1]).tolist() == [1]
    assert inverse_cdf(torch.tensor([[0.0, 1.0, 0.0]]), uniforms[-1:]).tolist() == [1]


def test_a_token_of_probability_0_is_never_drawn() -> None:
    """Unlike SGLang's own draws by seed, whose noise is infinite once in 2**32 numbers."""
    probs = torch.zeros(2000, 3000)
    probs[:, 1234] = 1e-30
    assert keyed_draws(probs, torch.arange(2000), torch.arange(2000)).unique().tolist() == [1234]


def test_frequencies_are_the_probabilities_of_a_vocabulary_of_many_blocks() -> None:
    """20,000 draws from 4096 tokens of 1 / 8192 and one of 1/2: half of them is that, within 4 x 0.0035."""
    probs = torch.full((1, 4097), 1 / 8192)
    probs[0, 2000] = 0.5
    ids = torch.cat(
        [keyed_draws(probs.expand(2000, -1), torch.arange(2000) + 2000 * i, torch.full((2000,), i)) for i in range(10)]
    )
    assert (ids == 2000).float().mean().item() == pytest.approx(0.5, abs=4 * 0.0035)
    others = ids[ids != 2000]
    assert others.float().mean().item() == pytest.approx(2048, abs=4 * 4097 / math.sqrt(12 * len(others)))


def test_draws_are_those_of_the_key_s_own_uniform_numbers() -> None:
    """Of negative keys and large ones too."""
    probs = torch.rand(6, 1000, generator=torch.Generator().manual_seed(1))
    keys, positions = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1]), torch.arange(6) * 1000
    expected = inverse_cdf(probs, uniforms_at(keys, positions))
    assert keyed_draws(probs, keys, positions).tolist() == expected.tolist()


def test_a_draw_depends_on_its_key_and_position_alone() -> None:
    """NUM-03."""
    probs = torch.rand(8, 600, generator=torch.Generator().manual_seed(0)).softmax(-1)
    keys, positions = torch.arange(8) + 2**62, torch.arange(8) + 3
    together = keyed_draws(probs, keys, positions)
    alone = [keyed_draws(probs[i : i + 1], keys[i : i + 1], positions[i : i + 1]).item() for i in range(8)]
    assert together.tolist() == alone and together.dtype == torch.int32
    flat = torch.full((64, 600), 1 / 600)
    assert len(keyed_draws(flat, torch.arange(64), torch.zeros(64)).unique()) > 50
    assert len(keyed_draws(flat, torch.zeros(64).long(), torch.arange(64)).unique()) > 50


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.7, "top_k": 5}])
def test_filters_draw_as_the_torch_engine_does(filters: dict) -> None:
    """Top-k first, then top-p of what is left; its draws go over the vocabulary, these from the likeliest down."""
    probs = torch.rand(1, 8, generator=torch.Generator().manual_seed(4)).softmax(-1)
    keys = torch.arange(4000)
    top_ks = torch.full((4000,), filters.get("top_k", 1 << 30))
    top_ps = torch.full((4000,), filters.get("top_p", 1.0))
    ids = keyed_draws(probs.expand(4000, -1), keys, torch.zeros(4000), top_ks, top_ps)
    expected = sample_tokens(probs.log().expand(4000, -1), keyed_uniforms(keys.tolist(), 1)[:, 0], **filters)
    counts = [torch.bincount(drawn, minlength=8) / 4000 for drawn in (ids, expected)]
    assert counts[0].tolist() == pytest.approx(counts[1].tolist(), abs=5 * math.sqrt(0.5 / 4000))
    assert torch.equal(counts[0] > 0, counts[1] > 0)


def test_logits_that_are_nan_still_give_a_token_of_the_vocabulary() -> None:
    """Its log-prob, NaN, is what the rank finds."""
    ids = keyed_draws(torch.full((2, 700), torch.nan), torch.arange(2), torch.arange(2))
    assert ids.min() >= 0 and ids.max() < 700
