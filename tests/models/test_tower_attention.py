"""Attention of towers within segments: what plain attention gives for each, in a call for each length."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightrft.models import tower_attention
from lightrft.models.tower_attention import attention_by_length

HEADS, DIM = 2, 8
LENGTHS = [[4, 4, 4], [5], [4, 6, 4, 2, 6, 4], [1, 2, 3]]


def borders_of(lengths: list[int]) -> torch.Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def inputs(lengths: list[int]) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    shape = (1, HEADS, sum(lengths), DIM)
    return [torch.randn(shape, generator=numbers, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_segment_attends_to_itself_alone(lengths):
    """Outputs and gradients are those of the segments one by one."""
    ragged, plain = inputs(lengths), inputs(lengths)
    out, _ = attention_by_length(nn.Module(), *ragged, None, borders_of(lengths), scaling=0.3)
    parts = zip(*(x.split(lengths, 2) for x in plain), strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(*part, scale=0.3) for part in parts], 2).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for got, wanted in zip(ragged, plain, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_there_is_a_call_for_each_length(monkeypatch, lengths):
    calls = []

    def attend(query, *args, **kwargs):
        calls.append(query.shape[0])
        return F.scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(tower_attention, "F", type("F", (), {"scaled_dot_product_attention": staticmethod(attend)}))
    attention_by_length(nn.Module(), *inputs(lengths), None, borders_of(lengths))
    assert len(calls) == len(set(lengths)) and sum(calls) == len(lengths)


def test_a_mask_is_refused():
    with pytest.raises(ValueError, match="takes no mask"):
        attention_by_length(nn.Module(), *inputs([4]), torch.ones(1, 4), borders_of([4]))
