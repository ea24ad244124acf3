"""Casting the weights that a rank holds whole."""

import torch

from lightrft.strategy.utils.gathering import cast_tensors

CPU = torch.device("cpu")


def test_tensors_of_the_right_dtype_are_views_and_take_no_memory():
    weights = [torch.rand(3, 4, requires_grad=True), torch.tensor(7)]
    cast = cast_tensors(weights, [torch.float32, torch.int64], CPU)
    assert [c.data_ptr() for c in cast] == [w.data_ptr() for w in weights]
    assert not cast[0].requires_grad


def test_the_others_are_cast_into_one_block_and_stay_as_they_were():
    weights = [torch.full((2, 3), 1.2345678), torch.empty(0, 3), torch.tensor(0.1), torch.arange(4)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int64]
    cast = cast_tensors(weights, dtypes, CPU)
    assert [(c.dtype, c.shape) for c in cast] == [(d, w.shape) for d, w in zip(dtypes, weights, strict=True)]
    assert cast[0].untyped_storage().data_ptr() == cast[2].untyped_storage().data_ptr()
    # 1.2345678 is 1.234375 in bf16.
    assert cast[0].unique().tolist() == [1.234375]
    assert weights[0].unique().item() == torch.tensor(1.2345678).item()
    assert torch.equal(cast[2], torch.tensor(0.1).to(torch.bfloat16))
