"""Records that cross modules.

Letters used in shapes, here and in every docstring: `P` prompts on this rank, `G` samples per prompt, `T` tokens of one
sample (prompt and response), `L` tokens of its response, `N` the sum of `L` over the samples at hand, `B` samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FinishReason: TypeAlias = Literal["stop", "length"]
WeightBucket: TypeAlias = list[tuple[str, Tensor]]
"""(name, full tensor) pairs; the tensors are valid until the iterator that gave them advances."""


@dataclass(frozen=True)
class PromptExample:
    """One row of a prompt data set, tokenised."""

    row: int
    """Index of the row in its file: errors and sampling keys name it."""
    prompt: str
    """The prompt as text, as rewards and `samples.jsonl` see it."""
    prompt_ids: list[int]
    """Ids that the Actor and the engine see, with as many placeholders for an item as it has pieces."""
    label: Any = None
    reference: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, untouched."""
    media: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By kind, `image`, `video` or `audio`: where each item is to be found, in the prompt's order. Empty for text."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """What the chat template was given, for reward models with one of their own; None for a plain text."""
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Model inputs with one entry per token of `prompt_ids`, `(T_prompt,)`; with the next two, only from decoding until
    the samples are made."""
    item_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Model inputs with one entry per image, clip, patch or tile, on dim 0."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw a response. Nothing here is ever filled in from a checkpoint's generation config."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay in it."""
    first_token_temperature: float | None = None
    """At which a response's first token is drawn in the place of `temperature`; log-probs are at that all the same."""
    suppressed_ids: tuple[int, ...] = ()
    """Never drawn: their probability is 0 in the log-probs as well."""


@dataclass(frozen=True)
class GenerationOutput:
    """One sampled response."""

    response_ids: list[int]
    """Ends with the stop token, or with the token that completed a stop string, iff `finish_reason` is `stop`."""
    finish_reason: FinishReason
    log_probs: list[float] | None
    """Natural log-probabilities of `response_ids` over the full vocabulary at the sampling temperature."""
    weight_version: int
    """Version of the weights that drew it: the number given to the last `finish_weight_update`."""


@dataclass(frozen=True)
class Experience:
    """One sample, from its generation to the loss; every tensor is one-dimensional and lives on the CPU.

    A role that is not in the run, or has not run yet, leaves None.
    """

    group: int
    """Index of its prompt in the global rollout batch of this step."""
    index: int
    """Which of the prompt's `G` samples it is. `(group, index)` orders samples alike for every number of ranks."""
    example: PromptExample
    response: str
    """Decoded response without special tokens."""
    input_ids: Int[Tensor, "tokens"]
    position_ids: Int[Tensor, "tokens"] | Int[Tensor, "axes tokens"]
    response_start: int
    """The response is `input_ids[response_start:]`."""
    action_mask: Bool[Tensor, "response"]
    """True = the token takes part in losses and metrics. The only mask there is."""
    finish_reason: FinishReason
    rollout_log_probs: Float[Tensor, "response"] | None = None
    action_log_probs: Float[Tensor, "response"] | None = None
    base_action_log_probs: Float[Tensor, "response"] | None = None
    values: Float[Tensor, "response"] | None = None
    bootstrap_value: float | None = None
    """Value after the last token: what a truncated response was worth if it had gone on."""
    advantages: Float[Tensor, "response"] | None = None
    returns: Float[Tensor, "response"] | None = None
    reward: float | None = None
    """None = excluded: outside the group statistics and the loss."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    reward_faults: Mapping[str, Any] = field(default_factory=dict)
    """Why a component of the reward has no grade: its `Fault` (lightrft.rewards.records)."""
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Model inputs with one entry per token, `(T, ...)`."""
    item_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Model inputs with one entry per image, clip or tile, on dim 0."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_response_tokens(self) -> int:
        return self.action_mask.shape[0]

    @property
    def order(self) -> tuple[int, int]:
        return (self.group, self.index)


@dataclass(frozen=True)
class MicroBatch:
    """Samples collated for one forward, packed into one row or right-padded."""

    model_inputs: Mapping[str, Any]
    """Keyword arguments of the trunk's forward: `input_ids`, `position_ids`, a mask or the segment borders, ..."""
    lengths: tuple[int, ...]
    """`L` of each sample."""
    response_index: Int[Tensor, "response_tokens"]
    """Where, in the flattened `(rows * columns)` hidden states, the predictor of each response token stands."""
    last_index: Int[Tensor, "samples"]
    """Where each sample's last token stands, in the same flattening."""
    target_ids: Int[Tensor, "response_tokens"]
    action_mask: Bool[Tensor, "response_tokens"]
    action_log_probs: Float[Tensor, "response_tokens"] | None = None
    rollout_log_probs: Float[Tensor, "response_tokens"] | None = None
    base_action_log_probs: Float[Tensor, "response_tokens"] | None = None
    values: Float[Tensor, "response_tokens"] | None = None
    advantages: Float[Tensor, "response_tokens"] | None = None
    returns: Float[Tensor, "response_tokens"] | None = None


@dataclass(frozen=True)
class WeightSpec:
    """Name, full shape and dtype under which a weight will be sent to the engine."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Seeds: TypeAlias = Sequence[Sequence[int]]
"""One 64-bit sampling key per prompt and sample."""
