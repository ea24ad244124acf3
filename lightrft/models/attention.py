"""Ragged causal attention, registered with transformers under the name `varlen`.

A packed row holds several samples; their borders arrive as `cu_seq_lens_q`. On a GPU in half precision torch's flash
kernel runs over the whole row, elsewhere scaled dot-product attention runs once per sample.
"""

import functools
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

VARLEN = "varlen"

# torch 2.11 takes fewer key than query heads as they come; later versions want to be told.
_varlen_attn = varlen_attn
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _varlen_attn = functools.partial(varlen_attn, enable_gqa=True)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of one packed row.

    Args:
        query: `(1, heads, T, head_dim)`; `key` and `value` may have fewer heads.
        cu_seq_lens_q: `(samples + 1,)` int32, first 0, last T.

    Returns:
        `(1, T, heads, head_dim)` and no attention weights.

    Raises:
        ValueError: Without sample borders, with several rows, a mask or a sliding window: they would be ignored.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(f"{type(module).__name__}: varlen attention needs cu_seq_lens_q and max_length_q")
    if query.shape[0] != 1 or attention_mask is not None or sliding_window is not None or not module.is_causal:
        raise ValueError(
            f"{type(module).__name__}: varlen attention is causal and takes one row without mask or sliding window"
        )
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    lengths = torch.diff(cu_seq_lens_q).tolist()
    gqa = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=gqa)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _flash(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float | None) -> Tensor:
    """The GPU body; shapes are those of `varlen_attention`."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = _varlen_attn(q, k, v, borders, borders, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[None]


def reject_mask(*args: object, attention_mask: Tensor | None = None, **kwargs: object) -> None:
    """The mask builder of `varlen`: there is none to build, and a padding mask would be dropped in silence."""
    if attention_mask is not None:
        raise ValueError("varlen attention takes packed rows, not a padding mask")


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, reject_mask)


def supports_varlen(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether every layer is plain causal attention that goes through transformers' attention interface."""
    values = config.get_text_config().to_dict()
    layer_types = values.get("layer_types")
    full = set(layer_types) == {"full_attention"} if layer_types else values.get("sliding_window") is None
    return model_class._supports_attention_backend and full
