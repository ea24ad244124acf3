"""VLLMEngine: vLLM inside the training process, started by torchrun's ranks themselves."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lightrft.models.loading import load_config
from lightrft.strategy.utils.collectives import GENERATION, Collectives
from lightrft.strategy.utils.devices import storage_bytes
from lightrft.strategy.utils.expected_weights import weight_specs
from lightrft.strategy.utils.requests import check_requests
from lightrft.strategy.utils.weight_loading import changed_weights, check_one_to_one, load
from lightrft.strategy.utils.weight_round import WeightRound
from lightrft.strategy.vllm_utils.library import compilation_config, import_vllm
from lightrft.strategy.vllm_utils.media import EngineInputs, media_arguments
from lightrft.strategy.vllm_utils.scratch import Scratch
from lightrft.strategy.vllm_utils.suppression import Suppression
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, Seeds, WeightBucket, WeightSpec

_LARGEST_SEED = 2**63 - 1


class VLLMEngine:
    """The ranks of a rollout group hold the shards of one model, and all run the same requests.

    Log-probs are None where top_p or top_k filter: vLLM would give those of the filtered distribution.
    """

    staging_bytes = 0

    def __init__(
        self,
        pretrain: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        mem_util: float,
        max_model_len: int,
        sleep_level: int | None,
        tp_size: int = 1,
        enforce_eager: bool = False,
        takes_stop_strings: bool = False,
        timeout_seconds: float = 1800.0,
        collectives: Collectives | None = None,
    ) -> None:
        """Starts vLLM with weights of no meaning; weight updates bring them. Every rank must call it.

        torchrun's variables must be set. vLLM seeds the process, and takes its memory for good: build it before other
        models are on the device.

        Args:
            mem_util: Share of the device's memory that weights, KV cache and activations of the engine may take.
            max_model_len: Tokens of prompt and response at most.
            takes_stop_strings: Whether `SamplingParams.stop` will be used, which takes detokenising every token.
            timeout_seconds: Of the process groups that vLLM makes.
            collectives: None in a process without others. With it every rank of the run calls `generate` alike, and
                all raise where one fails.

        Raises:
            NotImplementedError: vLLM's model has other weights than the Hugging Face model.
        """
        self._device = device
        self.max_model_len = max_model_len
        self.sleep_level = sleep_level
        self.takes_stop_strings = takes_stop_strings
        self.collectives = collectives
        self._vllm = import_vllm()
        loaded = load_config(pretrain, packing="padded")
        takes_media = loaded.tower is not None
        self.llm = self._vllm.LLM(
            model=pretrain,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            # Its processors of media take the tokenizer, though it is never asked for a prompt.
            skip_tokenizer_init=not (takes_stop_strings or takes_media),
            generation_config="vllm",
            max_model_len=max_model_len,
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=tp_size,
            distributed_timeout_seconds=math.ceil(timeout_seconds),
            cpu_distributed_timeout_seconds=math.ceil(timeout_seconds),
            gpu_memory_utilization=mem_util,
            enable_sleep_mode=sleep_level is not None,
            enforce_eager=enforce_eager,
            compilation_config=compilation_config(),
            **(media_arguments(max_model_len) if takes_media else {}),
        )
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model = runner.get_model()
        self._kv_caches: list[torch.Tensor] = runner.kv_caches
        # The older runner has no such part: its buffers are not made with the model.
        parts = [value for name, value in vars(runner).items() if name == "model_state"]
        self._scratch = Scratch(self.model, parts, self._kv_caches)
        self._suppression = Suppression(self.model, device)
        processor = self.llm.llm_engine.renderer.get_mm_processor() if takes_media else None
        self._inputs = EngineInputs(loaded.hf_config, dtype, processor)
        specs = weight_specs(loaded, dtype)
        check_one_to_one(self.model, specs, device, "vLLM")
        self._round = WeightRound({spec.name: spec.shape for spec in specs})
        self._held = {"weights", "kv_cache"}
        self._has_values = False
        self._has_cached = False
        self._version = -1

    # Weights

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        self._has_values = False
        self._round.open(specs)

    def update_weights(self, bucket: WeightBucket) -> None:
        """Raises ValueError for a name or shape that is not the engine's."""
        if "weights" not in self._held:
            raise RuntimeError("weights cannot be updated while they sleep: call wake_up(['weights']) first.")
        self._has_values = False
        self._round.check(bucket)
        load(self.model, bucket)
        self._round.note(bucket)

    def verify_weights(self, bucket: WeightBucket) -> list[str]:
        return changed_weights(self.model, bucket)

    def finish_weight_update(self, version: int) -> None:
        self._round.close()
        if self._has_cached:
            # vLLM goes through all its blocks one by one.
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM has not dropped the prefix cache of the old weights: requests still run.")
            self.llm.llm_engine.reset_encoder_cache()
            self._has_cached = False
        self._has_values = True
        self._version = version

    # Memory

    def sleep(self) -> None:
        """Frees the KV cache, and drops the weights (level 2) or moves them to the host (level 1)."""
        assert self.sleep_level is not None
        if "kv_cache" not in self._held:
            # vLLM falls asleep as a whole: half asleep it would do nothing.
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.sleep(level=self.sleep_level)
        # It drops its caches as it falls asleep.
        self._has_cached = False
        self._held = set()
        self._has_values &= self.sleep_level == 1

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """vLLM puts buffers that a level 2 dropped back itself, with the weights."""
        for tag in ("weights", "kv_cache") if tags is None else tags:
            if tag not in self._held:
                self.llm.wake_up(tags=[tag])
                self._held.add(tag)
                if tag == "weights" and self.sleep_level == 2:
                    self._scratch.restore()

    def device_bytes(self) -> dict[str, int]:
        """Bytes on this rank's device by use; CUDA graphs and activations are not counted."""
        sizes = {
            "weights": storage_bytes([*self.model.parameters(), *self.model.buffers()], self._device),
            "kv_cache": storage_bytes(self._kv_caches, self._device),
        }
        return {tag: size if tag in self._held else 0 for tag, size in sizes.items()}

    # Generation

    def generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """`len(seeds[i])` samples of prompt i.

        Raises:
            RuntimeError: The weights have no values: dropped, or never finished an update.
            ValueError: A prompt and its response do not fit into `max_model_len`.
        """
        if not self._has_values or self._held != {"weights", "kv_cache"}:
            raise RuntimeError("the engine has no weights to generate from: finish a weight update first.")
        if self.collectives is None:
            return self._generate_here(prompts, params, seeds)
        outputs: list[list[GenerationOutput]] = []
        with self.collectives.collect(GENERATION):
            outputs = self._generate_here(prompts, params, seeds)
        return outputs

    def _generate_here(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        check_requests(
            prompts,
            params,
            max_model_len=self.max_model_len,
            takes_stop_strings=self.takes_stop_strings,
        )
        self._suppression.set(params.suppressed_ids)
        inputs = [self._inputs(prompt) for prompt in prompts]
        self._has_cached = True
        at_end = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        results = self._run(
            (engine_input, self._vllm.SamplingParams(**request_params(params, seed), output_kind=at_end))
            for engine_input, keys in zip(inputs, seeds, strict=True)
            for seed in keys
        )
        return [
            [self._output(next(results), prompt) for _ in keys] for prompt, keys in zip(prompts, seeds, strict=True)
        ]

    def _run(self, requests: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
        """The `vllm.RequestOutput` of each pair of input and parameters, in their order."""
        engine = self.llm.llm_engine
        names: list[str] = []
        try:
            for number, (engine_input, params) in enumerate(requests):
                names.append(engine.add_request(str(number), engine_input, params))
        except Exception:
            # One that vLLM refuses must not leave the others to the next call.
            engine.abort_request(names, internal=True)
            raise
        finished: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        return iter([finished[str(number)] for number in range(len(names))])

    def _output(self, result: Any, prompt: PromptExample) -> GenerationOutput:
        """Of a `vllm.RequestOutput` with one completion."""
        [completion] = result.outputs
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a response for the reason {completion.finish_reason}, at row {prompt.row}.")
        log_probs = None if completion.logprobs is None else completion.logprobs.logprobs
        if log_probs is not None and any(math.isnan(value) for value in log_probs):
            raise RuntimeError(f"weights of version {self._version} give logits that are NaN, at row {prompt.row}.")
        return GenerationOutput(list(completion.token_ids), completion.finish_reason, log_probs, self._version)


def request_params(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for one response; nothing is left to vLLM's or the model's defaults."""
    is_filtered = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        # -1 would stand for no seed, and the kernels take signed numbers.
        "seed": seed & _LARGEST_SEED,
        "max_tokens": params.max_new_tokens,
        # The ids that end a response are those given here alone.
        "ignore_eos": True,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": None if is_filtered else 0,
        "flat_logprobs": True,
        "skip_clone": True,
    }
