"""The scheduler: what the processes of SGLang that hold a model's shards do otherwise than they would."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrft.strategy.sglang_utils.media import num_sound_frames, num_sound_tokens
from lightrft.utils.sampling_key import mix64

SUPPRESSED = "suppressed_ids"
"""Key among a request's custom parameters."""


def keep_params(result: None, batch_info: Any, batch: Any, vocab_size: int) -> None:
    """Puts the requests' keys, mixed, and custom parameters where the sampler finds them.

    Keys are in the order of the batch; all requests have one, or none has. Those that are under way together suppress
    the same ids, so that the first request's stand for all, whatever joins the batch and leaves it.
    """
    params = [request.sampling_params for request in batch.reqs]
    keys = [each.sampling_seed for each in params]
    if None in keys:
        return
    mixed = np.array([mix64(key) for key in keys], dtype=np.uint64).view(np.int64)
    batch_info.sampling_seed = torch.from_numpy(mixed).to(batch.device, non_blocking=True)
    first = params[0].custom_params or {}
    batch_info.custom_params = [{SUPPRESSED: first[SUPPRESSED]}] if SUPPRESSED in first else None


def without_suppressed(logits: Tensor, custom_params: Sequence[Any] | None) -> Tensor:
    """The logits, in which those ids have probability 0, for log-probs too."""
    if not custom_params:
        return logits
    return logits.index_fill_(-1, _on_device(tuple(custom_params[0][SUPPRESSED]), logits.device), -torch.inf)


@lru_cache(maxsize=2)
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=device)


def audio_features(model: Any, items: Sequence[Any]) -> Tensor:
    """What Qwen2-Audio's tower makes of sounds, `(tokens, hidden)`, by their masks.

    In SGLang's own, sounds attend to the silence that fills them up to 30 s, and a request has one of them at most.
    """
    tower = model.audio_tower
    weight = next(tower.parameters())
    features = torch.cat([item.feature for item in items]).to(weight)
    masks = torch.cat([item.feature_attention_mask for item in items]).to(weight.device)
    frames = torch.arange(tower.config.max_source_positions, device=weight.device)
    is_silence = frames >= num_sound_frames(masks)[:, None]
    attention = torch.zeros_like(is_silence, dtype=weight.dtype).masked_fill_(is_silence, -torch.inf)
    hidden = tower(features, attention_mask=attention[:, None, None]).last_hidden_state
    embeddings = model.multi_modal_projector(hidden)
    return torch.cat([rows[:count] for rows, count in zip(embeddings, num_sound_tokens(masks).tolist(), strict=True)])
