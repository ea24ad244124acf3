"""The kernels that draw for SGLang: on the GPU, the ids of a CPU."""

from importlib.util import find_spec

import pytest
import torch

from lightrft.strategy.sglang_utils import draws
from tests.sglang.draw_cases import make_cases, not_a_number, sole_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]


def test_they_are_those_of_a_cpu() -> None:
    """With filters too."""
    for weights, keys, positions in make_cases(rows=300, sizes=[3, 2048, 2049, 151_936]):
        probs = weights / weights.sum(-1, keepdim=True)
        filters = torch.full((300,), 50), torch.full((300,), 0.9)
        for case in ((probs, keys, positions), (probs, keys, positions, *filters)):
            ids = draws.keyed_draws(*(part.cuda() for part in case))
            # The GPU's cumulative sums in fp32, of the filter by top-p, are others by their last bits.
            assert (ids.cpu() != draws.keyed_draws(*case)).sum() <= (0 if len(case) == 3 else 1)


def test_a_token_of_weight_0_is_never_drawn_and_nan_gives_one_of_the_vocabulary() -> None:
    sole, nan = (draws.drawn(*(part.cuda() for part in case)) for case in (sole_weight(5000, 4321), not_a_number(5000)))
    assert sole.unique().tolist() == [4321]
    assert nan.min() >= 0 and nan.max() < 5000


def test_a_row_is_drawn_alike_in_any_batch_and_at_any_address() -> None:
    """Rows of an odd width lie at addresses that memory is read from in other ways."""
    [whole] = make_cases(rows=8, sizes=[151_935])
    on_gpu = [part.cuda() for part in whole]
    ids = draws.drawn(*on_gpu).tolist()
    assert [draws.drawn(*(part[i : i + 1] for part in on_gpu)).item() for i in range(8)] == ids
    assert draws.drawn(*(part[1:] for part in on_gpu)).tolist() == ids[1:]
