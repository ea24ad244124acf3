"""SGLangEngine: SGLang beside the training processes, one engine for each rollout group."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lightrft.models.loading import load_config
from lightrft.strategy.sglang_utils import library
from lightrft.strategy.sglang_utils.channel import ShardChannel, staging_size
from lightrft.strategy.sglang_utils.host import EngineHost
from lightrft.strategy.sglang_utils.mapped_file import MediaFile
from lightrft.strategy.sglang_utils.media import EngineInputs
from lightrft.strategy.sglang_utils.preconditions import engine_arguments, write_engine_folder
from lightrft.strategy.sglang_utils.requests import output, request_params, scores
from lightrft.strategy.sglang_utils.shard import CheckOneToOne, Measure
from lightrft.strategy.sglang_utils.team import Team
from lightrft.strategy.utils.collectives import GENERATION, Collectives
from lightrft.strategy.utils.devices import free_port
from lightrft.strategy.utils.expected_weights import weight_specs
from lightrft.strategy.utils.requests import check_requests
from lightrft.strategy.utils.weight_round import WeightRound
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, Seeds, WeightBucket, WeightSpec

OPEN_SECONDS = 120.0
"""Within which schedulers must open their weights, once they are told to."""
POLL_SECONDS = 0.5


class SGLangEngine:
    """The first rank of a rollout group owns the engine; each sends weights to the scheduler on its own GPU.

    Log-probs are None where `requests.scores` says that SGLang gives other ones.
    """

    def __init__(
        self,
        pretrain: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        mem_util: float,
        max_model_len: int,
        sleep_level: int | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        enforce_eager: bool = False,
        bucket_bytes: int = 512 * 2**20,
        timeout_seconds: float = 1800.0,
        collectives: Collectives | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Starts SGLang with weights of no meaning; weight updates bring them. Every rank must call it.

        SGLang measures what memory is free, so build it before other models are on the device.

        Args:
            mem_util: Share of the memory that is free now which weights and KV cache may take.
            max_model_len: Tokens of prompt and response at most.
            sleep_level: 1 keeps the weights on the device, 2 drops them; None never sleeps.
            tokenizer: Needed where `SamplingParams.stop` will be used, which takes detokenising every token.
            bucket_bytes: Of weights on their way; a quarter of it, or the largest weight, is taken beside them.
            timeout_seconds: Of the process groups that SGLang makes.
            collectives: None in a process without others. With it every rank of the run calls `generate` alike, and
                all raise where one fails.
            tp_group: The ranks that hold the shards of one model, on one node.

        Raises:
            NotImplementedError: SGLang's model has other weights than the Hugging Face model.
            RuntimeError: SGLang does not start, or may not map this process's memory.
            ValueError: The KV cache has no room for one response.
        """
        self.max_model_len = max_model_len
        self.sleep_level = sleep_level
        self.collectives = collectives
        self._tokenizer = tokenizer
        self.team = Team(collectives, tp_group)
        loaded = load_config(pretrain, packing="padded")
        self._engine_inputs = EngineInputs(loaded.hf_config, dtype)
        self._takes_media = loaded.tower is not None
        specs = weight_specs(loaded, dtype)
        self._folder = tempfile.TemporaryDirectory(prefix="lightrft-sglang-")
        folder = Path(self._folder.name)
        self._round = WeightRound({spec.name: spec.shape for spec in specs})
        largest = max(spec.num_bytes for spec in specs)
        self._channel = ShardChannel(folder / "shard", device, staging_size(largest, bucket_bytes))
        self._addresses = self.team.gather(self._channel.address)
        port = agreed_port(collectives)
        self._host: EngineHost | None = None
        if self.team.is_leader:
            write_engine_folder(loaded, tokenizer, folder)
            self._host = EngineHost(
                engine_arguments(
                    folder,
                    dtype=dtype,
                    mem_util=mem_util,
                    max_model_len=max_model_len,
                    sleeps=sleep_level is not None,
                    tp_size=self.team.size,
                    device=device.type,
                    first_gpu=device.index or 0,
                    gpu_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
                    port=port,
                    enforce_eager=enforce_eager,
                    takes_stop_strings=tokenizer is not None,
                    timeout_seconds=timeout_seconds,
                )
            )
        description = self.team.led(lambda: self.host.wait_for_start())
        self.pids: list[int] = description["pids"]
        """Of SGLang's own processes."""
        self._check_capacity(description["num_tokens"], mem_util)
        self._bytes = {
            "weights": self._checked_shard(specs),
            **{n: description[n] for n in ("kv_cache", "cuda_graphs")},
        }
        self._held = {"weights", "kv_cache"}
        self._has_values = False
        self._version = -1

    def _checked_shard(self, specs: Sequence[WeightSpec]) -> int:
        """Bytes of this rank's shard, which takes these weights and no others."""
        self._open_channel()
        with nullcontext() if self.collectives is None else self.collectives.collect("engine check"):
            self._channel.check_sharing()
            if self._takes_media:
                self._channel.check_files(Path(self._folder.name))
            self._channel.ask(CheckOneToOne(specs))
            num_bytes = self._channel.ask(Measure())
        self._close_channel()
        return num_bytes

    def close(self) -> None:
        """Ends SGLang. The end of the process does so too."""
        self._channel.hang_up()
        if self._host is not None:
            self._host.close()

    @property
    def host(self) -> EngineHost:
        """Of the rank that owns it."""
        assert self._host is not None
        return self._host

    def _check_capacity(self, num_tokens: int, mem_util: float) -> None:
        if num_tokens < self.max_model_len + 64:
            raise ValueError(
                f"the KV cache must hold a prompt and its response: {self.max_model_len} tokens, and "
                f"engine_mem_util={mem_util} leaves room for {num_tokens}. Raise --engine_mem_util."
            )

    # Weights

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        self._has_values = False
        self._channel.drop_waiting()
        self._round.open(specs)
        self._open_channel()

    def update_weights(self, bucket: WeightBucket) -> None:
        """Raises ValueError for a name or shape that is not the engine's."""
        if "weights" not in self._held:
            raise RuntimeError("weights cannot be updated while they sleep: call wake_up(['weights']) first.")
        self._has_values = False
        self._round.check(bucket)
        self._open_channel()
        self._channel.load(bucket)
        self._round.note(bucket)

    @property
    def staging_bytes(self) -> int:
        return self._channel.staging_bytes

    def verify_weights(self, bucket: WeightBucket) -> list[str]:
        """Weights of this rank's shard: each rank of the group finds its own."""
        self._open_channel()
        return self._channel.verify(bucket)

    def finish_weight_update(self, version: int) -> None:
        try:
            self._channel.finish_loads()
        finally:
            # Where this shard has failed, too: the leader waits until all schedulers go on.
            self._close_channel()
        self._round.close()
        self.team.led(lambda: self.host.call(library.flush))
        self._has_values = True
        self._version = version

    def _open_channel(self) -> None:
        """From here on SGLang serves its weights, and does nothing else."""
        if self._channel.is_open:
            return
        self.team.led(lambda: self.host.begin(library.open_weights, self._addresses))
        deadline = time.monotonic() + OPEN_SECONDS
        # A scheduler that ends calls nobody, and its end is known to the leader's host alone.
        while not all(self.team.gather(self._channel.accept(POLL_SECONDS))):
            self.team.led(lambda: self._check_opening(deadline))

    def _check_opening(self, deadline: float) -> None:
        self.host.check_working()
        if time.monotonic() > deadline:
            raise RuntimeError(f"SGLang's schedulers must open their weights within {OPEN_SECONDS:g} s; one has not.")

    def _close_channel(self) -> None:
        if self._channel.is_open:
            self._round.miss(self._channel.drop_waiting())
            self._channel.hang_up()
            self.team.led(lambda: self.host.receive())
            self._channel.free()

    # Memory

    def sleep(self) -> None:
        """Frees the KV cache, and at level 2 drops the weights."""
        assert self.sleep_level is not None
        self._close_channel()
        tags = [
            tag for tag in (["kv_cache"] if self.sleep_level == 1 else ["kv_cache", "weights"]) if tag in self._held
        ]
        if tags:
            self.team.led(lambda: self.host.call(library.release, tags))
        self._held -= set(tags)
        self._has_values &= "weights" in self._held

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._close_channel()
        for tag in ("weights", "kv_cache") if tags is None else tags:
            if tag not in self._held:
                self.team.led(lambda tag=tag: self.host.call(library.resume, [tag]))
                self._held.add(tag)

    def device_bytes(self) -> dict[str, int]:
        """As SGLang measured them at its start, to 10 MiB for the cache and the graphs, which stay."""
        return {tag: size if tag in self._held | {"cuda_graphs"} else 0 for tag, size in self._bytes.items()}

    # Generation

    def generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """`len(seeds[i])` samples of prompt i.

        Raises:
            RuntimeError: The weights have no values: dropped, or never finished an update. Or SGLang has ended.
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
            takes_stop_strings=self._tokenizer is not None,
        )
        self._close_channel()
        # A prompt's first sample fills the cache for the others, which come in later batches.
        places = sorted((j, i) for i, keys in enumerate(seeds) for j in range(len(keys)))
        if not places:
            return [[] for _ in prompts]
        requests = [(i, request_params(params, seeds[i][j])) for j, i in places]
        responses = self.team.led(lambda: self._responses(prompts, requests, scores(params)))
        outputs = {
            (j, i): output(response, prompts[i], params, self._tokenizer, self._version)
            for (j, i), response in zip(places, responses, strict=True)
        }
        return [[outputs[j, i] for j in range(len(keys))] for i, keys in enumerate(seeds)]

    def _responses(
        self, prompts: Sequence[PromptExample], requests: Sequence[library.Request], is_scored: bool
    ) -> list[library.Response]:
        with MediaFile.opened(Path(self._folder.name)) as file:
            inputs = [self._engine_inputs(prompt, file) for prompt in prompts]
            return self.host.call(library.generate, inputs, requests, is_scored)


def agreed_port(collectives: Collectives | None) -> int:
    """A free port of this rank's own. Every rank must call it: engines of one node must not ask for the same."""
    while True:
        port = free_port()
        if collectives is None:
            return port
        ports = collectives.all_gather_objects(port)
        if len(set(ports)) == len(ports):
            return port
