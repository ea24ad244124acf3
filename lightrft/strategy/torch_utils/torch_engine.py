"""TorchEngine: the built-in rollout engine, a Hugging Face model with its own weights."""

import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lightrft.models.loading import empty_model, load_config, materialize
from lightrft.models.multimodal import published_name
from lightrft.models.weights import persistent_tensors
from lightrft.strategy.torch_utils.decoding import Draft, StopCondition, decode, next_token_logits
from lightrft.strategy.torch_utils.host_memory import host_free_bytes
from lightrft.strategy.torch_utils.kv_cache import cache_bytes
from lightrft.strategy.utils.collectives import GENERATION, Collectives
from lightrft.strategy.utils.devices import storage_bytes
from lightrft.strategy.utils.distributed_util import local_share
from lightrft.strategy.utils.weight_round import WeightRound
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, Seeds, WeightBucket, WeightSpec


class TorchEngine:
    """Runs on CPU or GPU. It keeps nothing from one call of `generate` to the next, so it has no cache to reset."""

    staging_bytes = 0

    def __init__(
        self,
        pretrain: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        dtype: torch.dtype,
        mem_util: float,
        collectives: Collectives | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Allocates the weights without values; weight updates bring them.

        Args:
            mem_util: Share of the memory free at the start of `generate` that keys, values and logits may take.
            collectives: None in a process without others. With it every rank of the run calls `generate` alike, and
                all raise where one fails.
            tp_group: Ranks that share their prompts; None = all.
        """
        self.tokenizer = tokenizer
        self.device = device
        self.mem_util = mem_util
        self.collectives = collectives
        self.tp_group = tp_group
        self.model = empty_model(load_config(pretrain, packing="padded"), "causal_lm", dtype)
        materialize(self.model, parameter_device=device, buffer_device=device)
        # Allocating separates tied embeddings.
        self.model.tie_weights()
        self.model.eval().requires_grad_(False)
        self._weights = {published_name(self.model.config, name): t for name, t in persistent_tensors(self.model)}
        self._round = WeightRound({name: tuple(weight.shape) for name, weight in self._weights.items()})
        self._has_values = False
        self._is_asleep = False
        self._version = -1
        self._cache_bytes_per_token: int | None = None
        self._cache_bytes = 0

    # Weights

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        self._has_values = False
        self._round.open(specs)

    @torch.no_grad()
    def update_weights(self, bucket: WeightBucket) -> None:
        """Raises ValueError for a name or shape that is not the engine's."""
        if self._is_asleep:
            raise RuntimeError("weights cannot be updated while they sleep: call wake_up(['weights']) first.")
        self._has_values = False
        self._round.check(bucket)
        for name, tensor in bucket:
            self._weights[name].copy_(tensor)
        self._round.note(bucket)

    def verify_weights(self, bucket: WeightBucket) -> list[str]:
        return [name for name, tensor in bucket if self._would_change(name, tensor)]

    def _would_change(self, name: str, tensor: Tensor) -> bool:
        """Whether loading the weight, which is a copy, would change a bit, or reach nothing."""
        held = self._weights.get(name)
        return held is None or not torch.equal(_bits(held.detach()), _bits(tensor.to(held.device, held.dtype)))

    def finish_weight_update(self, version: int) -> None:
        self._round.close()
        self._has_values = True
        self._version = version

    def sleep(self) -> None:
        """Frees the weights; buffers that no sync brings back stay."""
        for parameter in self.model.parameters():
            # The parameter objects stay, and with them ties and names; only their memory goes.
            parameter.untyped_storage().resize_(0)
        self._is_asleep = True
        self._has_values = False
        self._cache_bytes = 0

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if not self._is_asleep or (tags is not None and "weights" not in tags):
            return
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        self._is_asleep = False

    def device_bytes(self) -> dict[str, int]:
        """The cache is that of the last `generate`, at its largest, until the engine sleeps."""
        return {"weights": storage_bytes(self._weights.values(), self.device), "kv_cache": self._cache_bytes}

    # Generation

    def generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """`len(seeds[i])` samples of prompt i. The ranks of `tp_group` share the prompts, and each returns them all.

        Raises:
            RuntimeError: The weights have no values: dropped, or never finished an update.
        """
        if not self._has_values:
            raise RuntimeError("the engine has no weights to generate from: finish a weight update first.")
        if self.collectives is None:
            return self._generate_here(prompts, params, seeds)
        share = local_share(len(prompts), dist.get_rank(self.tp_group), dist.get_world_size(self.tp_group))
        here = slice(share.start, share.stop)
        outputs: list[list[GenerationOutput]] = []
        with self.collectives.collect(GENERATION):
            outputs = self._generate_here(prompts[here], params, seeds[here])
        return [out for member in self.collectives.all_gather_objects(outputs, self.tp_group) for out in member]

    def _generate_here(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        is_stopped = StopCondition(params, self.tokenizer)
        outputs: list[list[GenerationOutput]] = [[] for _ in prompts]
        self._cache_bytes = 0
        for chunk in self._chunks(prompts, params, seeds):
            longest = max(len(prompts[i].prompt_ids) for i in chunk)
            num_tokens = sum(len(seeds[i]) for i in chunk) * (longest + params.max_new_tokens)
            self._cache_bytes = max(self._cache_bytes, num_tokens * self._row_bytes()[0])
            drafts = decode(self.model, [prompts[i] for i in chunk], params, [seeds[i] for i in chunk], is_stopped)
            for i, group in zip(chunk, drafts, strict=True):
                outputs[i] = [self._output(draft, prompts[i]) for draft in group]
        return outputs

    def _output(self, draft: Draft, prompt: PromptExample) -> GenerationOutput:
        if any(math.isnan(value) for value in draft.log_probs):
            raise RuntimeError(f"weights of version {self._version} give logits that are NaN, at row {prompt.row}.")
        return GenerationOutput(draft.response_ids, draft.finish_reason, draft.log_probs, self._version)

    def _chunks(self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds) -> list[list[int]]:
        """Indices of the prompts that are generated together, so that keys, values and logits fit."""
        token_bytes, logits_bytes = self._row_bytes()
        return plan_chunks(
            [len(prompt.prompt_ids) for prompt in prompts],
            [len(keys) for keys in seeds],
            lambda length: (length + params.max_new_tokens) * token_bytes + logits_bytes,
            self.mem_util * free_bytes(self.device),
        )

    def _row_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values per token, measured on a token, and of logits per response."""
        if self._cache_bytes_per_token is None:
            self._cache_bytes_per_token = cache_bytes_per_token(self.model)
        # The model's own logits, and an fp32 copy.
        return self._cache_bytes_per_token, self.model.config.get_text_config().vocab_size * 2 * 4


def plan_chunks(
    lengths: Sequence[int], num_samples: Sequence[int], row_bytes: Callable[[int], int], budget_bytes: float
) -> list[list[int]]:
    """Indices of prompts, those of like length together, whose responses fit into the budget; at least one a chunk.

    Prompts without samples are left out.

    Args:
        row_bytes: What one response needs, given the padded length of its prompt.
    """
    chunks: list[list[int]] = []
    num_rows = 0
    # Ascending, so the latest prompt is the longest of its chunk, which pads the others.
    for i in sorted((i for i, n in enumerate(num_samples) if n > 0), key=lambda i: lengths[i]):
        num_rows += num_samples[i]
        if not chunks or num_rows * row_bytes(lengths[i]) > budget_bytes:
            chunks.append([])
            num_rows = num_samples[i]
        chunks[-1].append(i)
    return chunks


@torch.inference_mode()
def cache_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token of one response takes, over all layers."""
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    next_token_logits(model, ids, torch.ones_like(ids), ids, cache)
    return cache_bytes(cache)


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still take on the device; ranks of one host share a CPU's evenly."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return host_free_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Those of so many bytes."""


def _bits(tensor: Tensor) -> Tensor:
    """Its elements as integers: as numbers NaN would differ from itself, and 0 equal -0."""
    return tensor.view(_INTEGERS[tensor.itemsize])
