"""Decoding: from a batch of prompts to sampled responses, one token of each at a time."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightrft.models.multimodal import position_ids
from lightrft.strategy.torch_utils.kv_cache import roomy_cache
from lightrft.strategy.torch_utils.sampling import keyed_uniforms, sample_tokens, token_log_probs
from lightrft.types import FinishReason, PromptExample, SamplingParams, Seeds

# Bounds the float64 copies of logits that sampling makes, to 128 MiB each.
_LOGITS_PER_DRAW = 2**24


@dataclass
class Draft:
    """A response that grows."""

    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason == "stop"


class StopCondition:
    """Says whether the last token of a response ends it."""

    def __init__(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> None:
        self._token_ids = frozenset(params.stop_token_ids)
        self._strings = params.stop
        self._tokenizer = tokenizer
        # A token is at least one byte of text, so no stop string spans more tokens than it has bytes. The margin is for
        # the window's first characters, which decode wrongly where it starts inside a character or a word.
        self._window = 4 + max((len(string.encode()) for string in params.stop), default=0)

    def __call__(self, response_ids: Sequence[int]) -> bool:
        return response_ids[-1] in self._token_ids or (bool(self._strings) and self._completes_string(response_ids))

    def _completes_string(self, response_ids: Sequence[int]) -> bool:
        tail = self._tokenizer.decode(
            list(response_ids[-self._window :]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(tail, str)
        return any(string in tail for string in self._strings)


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[PromptExample],
    params: SamplingParams,
    seeds: Seeds,
    is_stopped: StopCondition,
) -> list[list[Draft]]:
    """`len(seeds[i])` responses to each prompt i; the tokens of one do not depend on the others."""
    drafts = [[Draft() for _ in keys] for keys in seeds]
    rows, logits = _Rows.prefill(model, prompts, params, seeds, drafts)
    suppressed = torch.tensor(params.suppressed_ids, dtype=torch.long, device=logits.device)
    for step in range(params.max_new_tokens):
        hot = params.first_token_temperature if step == 0 else None
        logits = logits.index_fill(-1, suppressed, -torch.inf) if params.suppressed_ids else logits
        ids, log_probs = _draw(logits, rows.uniforms[:, step], params, params.temperature if hot is None else hot)
        rows.append(ids, log_probs, is_stopped)
        num_finished = sum(draft.is_finished for draft in rows.drafts)
        if num_finished == len(rows.drafts) or step + 1 == params.max_new_tokens:
            break
        if 2 * num_finished >= len(rows.drafts):
            ids = ids[rows.drop_finished()]
        logits = rows.forward(ids)
    return drafts


@dataclass
class _Rows:
    """Responses in progress, and what their next forward needs; dim 0 of tensors is the response."""

    model: PreTrainedModel
    drafts: list[Draft]
    cache: DynamicCache
    mask: Tensor
    """`(B, prompt + max_new_tokens)`: 0 on the padding left of a prompt."""
    positions: Tensor
    """`(B, 1)` or `(axes, B, 1)`: position of the next token."""
    uniforms: Tensor
    """`(B, max_new_tokens)`."""

    @classmethod
    def prefill(
        cls,
        model: PreTrainedModel,
        prompts: Sequence[PromptExample],
        params: SamplingParams,
        seeds: Seeds,
        drafts: list[list[Draft]],
    ) -> tuple["_Rows", Tensor]:
        """Runs each prompt once, however many responses it gets; returns their next-token logits `(B, V)` as well."""
        device = model.device
        ids, mask = _left_padded([prompt.prompt_ids for prompt in prompts])
        ids, mask = ids.to(device), mask.to(device)
        positions, next_positions = (p.to(device) for p in _positions(model.config, prompts))
        cache = roomy_cache(model.config, capacity=ids.shape[1] + params.max_new_tokens)
        logits = next_token_logits(model, ids, mask, positions, cache, _item_inputs(prompts, device))

        counts = torch.tensor([len(keys) for keys in seeds], device=device)
        prompt_of_row = torch.arange(len(prompts), device=device).repeat_interleave(counts)
        cache.batch_select_indices(prompt_of_row)
        mask = torch.cat([mask, mask.new_ones(len(prompts), params.max_new_tokens)], -1)
        uniforms = keyed_uniforms([key for keys in seeds for key in keys], params.max_new_tokens).to(device)
        rows = cls(
            model=model,
            drafts=[draft for group in drafts for draft in group],
            cache=cache,
            mask=mask[prompt_of_row],
            positions=next_positions[..., prompt_of_row, :],
            uniforms=uniforms,
        )
        return rows, logits[prompt_of_row]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `(B, V)` after one more token of each response, `ids (B,)`."""
        num_columns = self.cache.get_seq_length() + 1
        logits = next_token_logits(self.model, ids[:, None], self.mask[:, :num_columns], self.positions, self.cache)
        self.positions = self.positions + 1
        return logits

    def append(self, ids: Tensor, log_probs: Tensor, is_stopped: StopCondition) -> None:
        # One transfer for both: float64 holds every token id exactly.
        tokens, values = torch.stack([ids.double(), log_probs.double()]).tolist()
        for draft, token, value in zip(self.drafts, tokens, values, strict=True):
            if draft.is_finished:
                continue
            draft.response_ids.append(int(token))
            draft.log_probs.append(value)
            if is_stopped(draft.response_ids):
                draft.finish_reason = "stop"

    def drop_finished(self) -> Tensor:
        """Keeps the unfinished rows only, and returns their indices."""
        kept = [i for i, draft in enumerate(self.drafts) if not draft.is_finished]
        index = torch.tensor(kept, device=self.mask.device)
        self.drafts = [self.drafts[i] for i in kept]
        self.cache.batch_select_indices(index)
        self.mask, self.uniforms = self.mask[index], self.uniforms[index]
        self.positions = self.positions[..., index, :]
        return index


def next_token_logits(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: DynamicCache,
    item_inputs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Logits `(B, V)` at the last of the new tokens, whose keys and values go into `cache`.

    Args:
        ids: New tokens, `(B, T)`.
        mask: `(B, cached + T)`, 0 on padding.
        positions: Of the new tokens, `(B, T)` or `(axes, B, T)`.
        item_inputs: Of the media among the new tokens, in the order of the rows.
    """
    trunk, head = model.base_model, model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    output = trunk(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        **{_cache_argument(type(trunk)): cache},
        **(item_inputs or {}),
    )
    return head(output.last_hidden_state[:, -1])


@functools.cache
def _cache_argument(model_class: type[nn.Module]) -> str:
    # transformers 5.24 renames past_key_values to cache, and warns at each call under the old name.
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask `(P, longest)`, 0 on the padding."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    num_padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    mask = (torch.arange(longest) >= num_padding[:, None]).long()
    return ids, mask


def _positions(config: PretrainedConfig, prompts: Sequence[PromptExample]) -> tuple[Tensor, Tensor]:
    """Of the prompts, padded on the left, `(P, longest)` or `(axes, P, longest)`; of what comes next, `(..., P, 1)`."""
    # A text token behind the prompt stands where the response begins.
    each = [position_ids(config, torch.tensor([*prompt.prompt_ids, 0]), prompt.item_inputs) for prompt in prompts]
    longest = max(positions.shape[-1] for positions in each)
    padded = torch.stack([F.pad(positions, (longest - positions.shape[-1], 0)) for positions in each], -2)
    return padded[..., :-1], padded[..., -1:]


def _item_inputs(prompts: Sequence[PromptExample], device: torch.device) -> dict[str, Tensor]:
    names = sorted({name for prompt in prompts for name in prompt.item_inputs})
    return {
        name: torch.cat([prompt.item_inputs[name] for prompt in prompts if name in prompt.item_inputs]).to(device)
        for name in names
    }


def _draw(logits: Tensor, uniforms: Tensor, params: SamplingParams, temperature: float) -> tuple[Tensor, Tensor]:
    """Next ids `(B,)`, drawn at a temperature, and their log-probs `(B,)` at that of `params`."""
    rows = max(1, _LOGITS_PER_DRAW // logits.shape[-1])
    ids, log_probs = [], []
    for part, numbers in zip(logits.split(rows), uniforms.split(rows), strict=True):
        ids.append(sample_tokens(part, numbers, temperature, params.top_p, params.top_k))
        log_probs.append(token_log_probs(part, ids[-1], params.temperature))
    return torch.cat(ids), torch.cat(log_probs)
