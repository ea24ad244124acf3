"""Collation: from ragged samples to the inputs of one forward, at the last moment."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrft.types import Experience, MicroBatch, PromptExample

Layout: TypeAlias = Literal["packed", "padded"]


def collate(
    samples: Sequence[Experience], layout: Layout, device: torch.device | str = "cpu", keep: bool = True
) -> MicroBatch:
    """One micro-batch of `samples`.

    Args:
        keep: False sets the whole action mask to False: the forward runs for its collectives alone.
    """
    lengths = [sample.num_tokens for sample in samples]
    starts, model_inputs = _LAYOUTS[layout](samples, lengths)
    for name in sorted({name for sample in samples for name in sample.token_inputs}):
        model_inputs[name] = _rows(_token_input(name, samples), layout)
    for name in sorted({name for sample in samples for name in sample.item_inputs}):
        model_inputs[name] = torch.cat([s.item_inputs[name] for s in samples if name in s.item_inputs])
    action_mask = torch.cat([sample.action_mask for sample in samples])
    # The token at position t is predicted by the hidden state at t - 1.
    predictors = [
        torch.arange(start + sample.response_start - 1, start + length - 1)
        for start, length, sample in zip(starts, lengths, samples, strict=True)
    ]
    last_index = torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)])

    def field(name: str) -> Tensor | None:
        values = _concatenated([getattr(sample, name) for sample in samples])
        return None if values is None else values.to(device)

    return MicroBatch(
        model_inputs={name: v.to(device) if isinstance(v, Tensor) else v for name, v in model_inputs.items()},
        lengths=tuple(sample.num_response_tokens for sample in samples),
        response_index=torch.cat(predictors).to(device),
        last_index=last_index.to(device),
        target_ids=torch.cat([sample.input_ids[sample.response_start :] for sample in samples]).to(device),
        action_mask=(action_mask if keep else torch.zeros_like(action_mask)).to(device),
        **{name: field(name) for name in SCORES},
    )


def micro_batches(
    samples: Sequence[Experience],
    plan: Sequence[Sequence[int]],
    layout: Layout,
    device: torch.device,
    fillers: Sequence[Experience] = (),
) -> Iterator[tuple[MicroBatch, Sequence[int], bool]]:
    """Each micro-batch of a plan with the indices of its samples, and whether it is the last.

    An empty micro-batch runs the shortest sample again, or a fixed one, with an action mask that is all False.

    Args:
        fillers: Masked samples, one for each kind of media in the run: behind its samples a micro-batch gets those
            whose kind it lacks. What reads a kind then runs on every rank (DIST-02).
    """
    for k, indices in enumerate(plan):
        chosen = [samples[i] for i in indices] or ([min(samples, key=lambda s: s.num_tokens)] if samples else [])
        chosen += [_as_scored(filler, chosen) for filler in fillers if not _has_kind(chosen, filler)]
        yield collate(chosen or [_FILLER], layout, device, keep=bool(indices)), indices, k == len(plan) - 1


def _has_kind(samples: Sequence[Experience], filler: Experience) -> bool:
    return any(filler.item_inputs.keys() <= sample.item_inputs.keys() for sample in samples)


def _as_scored(filler: Experience, samples: Sequence[Experience]) -> Experience:
    """The filler without those fields that the samples do not have yet."""
    absent = [name for name in SCORES if samples and getattr(samples[0], name) is None]
    return replace(filler, **dict.fromkeys(absent))


SCORES = (
    "action_log_probs",
    "rollout_log_probs",
    "base_action_log_probs",
    "values",
    "advantages",
    "returns",
)
"""Fields of a sample that have one number for each response token."""
_FILLER = Experience(
    group=-1,
    index=0,
    example=PromptExample(row=-1, prompt="", prompt_ids=[0]),
    response="",
    input_ids=torch.zeros(2, dtype=torch.long),
    position_ids=torch.arange(2),
    response_start=1,
    action_mask=torch.zeros(1, dtype=torch.bool),
    finish_reason="stop",
    rollout_log_probs=torch.zeros(1),
    action_log_probs=torch.zeros(1),
    base_action_log_probs=torch.zeros(1),
    values=torch.zeros(1),
    advantages=torch.zeros(1),
    returns=torch.zeros(1),
)


def _packed(samples: Sequence[Experience], lengths: list[int]) -> tuple[list[int], dict]:
    borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    inputs = {
        "input_ids": torch.cat([sample.input_ids for sample in samples])[None],
        "position_ids": torch.cat([sample.position_ids for sample in samples], -1).unsqueeze(-2),
        "use_cache": False,  # With a cache, transformers does not look for the borders of packed samples.
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return borders[:-1].tolist(), inputs


def _padded(samples: Sequence[Experience], lengths: list[int]) -> tuple[list[int], dict]:
    width = max(lengths)
    columns = torch.arange(width)
    positions = [F.pad(sample.position_ids, (0, width - n)) for sample, n in zip(samples, lengths, strict=True)]
    inputs = {
        "input_ids": pad_sequence([sample.input_ids for sample in samples], batch_first=True),
        "position_ids": torch.stack(positions, -2),
        "attention_mask": (columns < torch.tensor(lengths)[:, None]).long(),
        "use_cache": False,
    }
    return [row * width for row in range(len(samples))], inputs


_LAYOUTS = {"packed": _packed, "padded": _padded}


def _token_input(name: str, samples: Sequence[Experience]) -> list[Tensor]:
    """Of each sample; it is 0 at the tokens of those without it, which have no media."""
    given = next(sample.token_inputs[name] for sample in samples if name in sample.token_inputs)
    return [sample.token_inputs.get(name, given.new_zeros(sample.num_tokens, *given.shape[1:])) for sample in samples]


def _rows(tensors: list[Tensor], layout: Layout) -> Tensor:
    return torch.cat(tensors)[None] if layout == "packed" else pad_sequence(tensors, batch_first=True)


def _concatenated(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) in (0, len(tensors)), "a field is set on every sample of a micro-batch or on none"
    return torch.cat(present) if present else None
