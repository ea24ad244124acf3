"""Media: images, videos and sounds of prompts, decoded by processes beside the rank."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch
from transformers import ProcessorMixin

from lightrft.config.arguments import DataConfig
from lightrft.datasets.media_files import MediaError, Reference, check_packages
from lightrft.datasets.media_inputs import MediaInputs, MediaProcessor, MediaRequest
from lightrft.datasets.media_shares import Ranks, by_shares
from lightrft.datasets.media_sizes import MediaLimits
from lightrft.datasets.media_workers import MediaWorkers
from lightrft.types import PromptExample

PromptWithMedia: TypeAlias = tuple[str, Mapping[str, Sequence[Reference]]]
"""Its text, and its items by kind."""

EVERY_ROW = 1_000
"""Prompts that are under way at once when a data set is checked."""


class MediaLoader:
    """Makes the model's inputs of prompts with media. One thread at a time uses it.

    Processes start with the first prompt that has media.

    Args:
        pretrain: Folder (or hub id) of the model, whose processor the workers load.
        processor: The same, loaded here.
        data: Flags of media.
        num_workers: Processes that decode; with 0, the rank does it itself.

    Raises:
        ValueError: The processor does not admit the flags' limits.
    """

    def __init__(self, pretrain: str, processor: ProcessorMixin, data: DataConfig, num_workers: int) -> None:
        limits = MediaLimits.of(data)
        self.processor = processor
        self.kinds = MediaProcessor(processor, limits).kinds
        self.columns = {kind: key for kind, key in media_columns(data).items() if kind in self.kinds}
        """The column of each kind that the model takes."""
        self._workers = MediaWorkers(pretrain, limits, num_workers)
        self._ranks: Ranks | None = None
        self._pending: dict[str, dict[int, tuple[PromptExample, Future[MediaInputs]]]] = {}
        """By purpose and by the identity of the example, which is held so that no other one gets it."""

    @contextmanager
    def shared_by(self, ranks: Ranks) -> Iterator[None]:
        """Context in which `expanded_ids` decodes this rank's share alone, and every rank must call it alike."""
        self._ranks = ranks
        try:
            yield
        finally:
            self._ranks = None

    def expanded_ids(self, prompts: Sequence[PromptWithMedia]) -> list[list[int] | MediaError]:
        """Ids of each prompt with its placeholders expanded, or why one of its items cannot be read.

        Raises:
            ValueError: A package that decodes such media is not installed, or ranks that share the work have not as
                many prompts.
            PhaseError: It failed on another of them.
        """
        check_packages({kind for _, media in prompts for kind in media})
        if self._ranks is None:
            return self._ids_or_errors(prompts)
        return by_shares(self._ranks, prompts, self._ids_or_errors, "checking media")

    def _ids_or_errors(self, prompts: Sequence[PromptWithMedia]) -> list[list[int] | MediaError]:
        results: list[list[int] | MediaError] = []
        try:
            for start in range(0, len(prompts), EVERY_ROW):
                part = prompts[start : start + EVERY_ROW]
                futures = [self._workers.submit(MediaRequest(text, media, only_ids=True)) for text, media in part]
                results += [_ids_or_error(future) for future in futures]
        except BaseException:
            # Ctrl-C, for one. At its end this process would wait for all that is under way.
            self.close()
            raise
        return results

    def with_inputs(self, examples: Sequence[PromptExample]) -> list[PromptExample]:
        """The examples, those with media with what the Actor and the engine take besides their ids.

        Raises:
            MediaError: An item cannot be read any more; the message has its row.
        """
        futures = {i: self._future(example) for i, example in enumerate(examples) if example.media}
        # All of them, so that nothing goes on behind an error.
        wait(futures.values())
        return [_with_inputs(example, futures[i]) if i in futures else example for i, example in enumerate(examples)]

    def prefetch(self, examples: Sequence[PromptExample], purpose: str) -> None:
        """Starts to make what a later `with_inputs` is to be asked for.

        What earlier calls of the same purpose were for is forgotten.
        """
        former, pending = self._pending.pop(purpose, {}), {}
        for example in examples:
            if example.media:
                pending[id(example)] = former.pop(id(example), None) or (example, self._submit(example))
        self._pending[purpose] = pending
        for _, future in former.values():
            future.cancel()

    def close(self) -> None:
        """Ends the processes."""
        self._pending = {}
        self._workers.close()

    def _future(self, example: PromptExample) -> "Future[MediaInputs]":
        found = [pending.pop(id(example)) for pending in self._pending.values() if id(example) in pending]
        return found[0][1] if found else self._submit(example)

    def _submit(self, example: PromptExample) -> "Future[MediaInputs]":
        return self._workers.submit(MediaRequest(example.prompt, example.media))


def media_columns(data: DataConfig) -> dict[str, str]:
    return {"image": data.image_key, "video": data.video_key, "audio": data.audio_key}


def _ids_or_error(future: "Future[MediaInputs]") -> list[int] | MediaError:
    try:
        return future.result().prompt_ids
    except MediaError as error:
        return error


def _with_inputs(example: PromptExample, future: "Future[MediaInputs]") -> PromptExample:
    try:
        inputs = future.result()
    except MediaError as error:
        raise MediaError(f"row {example.row}: {error}") from error
    if inputs.prompt_ids != example.prompt_ids:
        raise MediaError(
            f"row {example.row}: its media must be the same on all nodes and stay as they were when the run began: the "
            f"prompt had {len(example.prompt_ids)} tokens, and has {len(inputs.prompt_ids)} now. Compare the nodes' "
            "files, or start again."
        )
    return replace(
        example,
        token_inputs={name: torch.tensor(array) for name, array in inputs.token_inputs.items()},
        item_inputs={name: torch.tensor(array) for name, array in inputs.item_inputs.items()},
    )
