"""Attention of towers that cut what they read into segments, and attend within each: windows, images, a clip's frames.

transformers asks for each segment's attention alone, hundreds of times a layer for a batch of images. An attention with
"flash" in its name is asked once and gets the borders instead; this one runs segments of equal length as one batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

BY_LENGTH = "by_length_as_flash"
"""Its name, for a tower that is built already: at a tower's making transformers would look for a package behind it."""


def attention_by_length(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention without a mask within each segment: a call for each length that segments have.

    Args:
        query: `(1, heads, T, head_dim)`, as `key` and `value`.
        cu_seq_lens_q: `(segments + 1,)`, first 0, last T.

    Returns:
        `(1, T, heads, head_dim)` and no attention weights.

    Raises:
        ValueError: With a mask, which would be ignored.
    """
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__}: attention by length takes no mask")
    lengths = torch.diff(cu_seq_lens_q)
    distinct = sorted(set(lengths.tolist()))
    if len(distinct) == 1:
        return _attend(query, key, value, distinct[0], scaling, dropout)[None], None
    places = [_places(cu_seq_lens_q, lengths, length) for length in distinct]
    parts = []
    for length, index in zip(distinct, places, strict=True):
        q, k, v = (x.index_select(2, index) for x in (query, key, value))
        parts.append(_attend(q, k, v, length, scaling, dropout))
    return torch.cat(parts).index_select(0, torch.cat(places).argsort())[None], None


def _places(borders: Tensor, lengths: Tensor, length: int) -> Tensor:
    """Of all that is in segments of this length, segment after segment."""
    starts = borders[:-1][lengths == length]
    return (starts[:, None] + torch.arange(length, device=borders.device)).flatten()


def _attend(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float | None, dropout: float) -> Tensor:
    """`(T, heads, head_dim)`, of segments that all have this length."""
    q, k, v = (x[0].unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout).transpose(1, 2).flatten(0, 1)


def use_attention_by_length(model: PreTrainedModel, tower_config: type) -> None:
    """Has the tower of a model attend so; the tower is what has a configuration of this type."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and isinstance(part.config, tower_config):
            part.config._attn_implementation = BY_LENGTH
            part.register_forward_pre_hook(_without_borders_of_samples, with_kwargs=True)


def _without_borders_of_samples(tower: nn.Module, args: tuple, kwargs: dict[str, object]) -> tuple:
    """The decoder's, of a packed row, which transformers up to 5.12 at least hands down beside the tower's own."""
    return args, {name: value for name, value in kwargs.items() if not name.startswith(("cu_seq_lens", "max_length"))}


AttentionInterface.register(BY_LENGTH, attention_by_length)
