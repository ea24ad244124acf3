from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from lightrft.trainer.media_feed import MediaFeed
from lightrft.types import PromptExample


class Loader:
    """Keeps a list of what it is asked for, by the examples' rows."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []

    def with_inputs(self, examples: Sequence[PromptExample]) -> list[PromptExample]:
        self.events.append(("with_inputs", [example.row for example in examples]))
        return [replace(example, token_inputs={"row": torch.tensor([example.row])}) for example in examples]

    def prefetch(self, examples: Sequence[PromptExample], purpose: str) -> None:
        self.events.append((f"prefetch for {purpose}", [example.row for example in examples]))


class Collectives:
    @contextmanager
    def collect(self, phase: str) -> Iterator[None]:
        yield


def prompts(*rows: int) -> list[tuple[int, PromptExample]]:
    return [(10 + row, PromptExample(row, "p", [1], media={"image": ["a.png"]})) for row in rows]


def test_a_batch_is_decoded_while_the_one_before_is_used():
    loader = Loader()
    feed = MediaFeed(cast(Any, loader), cast(Any, Collectives()))
    for batch in feed.batches([prompts(0, 1), prompts(2), prompts(3)]):
        loader.events.append(("used", [int(example.token_inputs["row"]) for _, example in batch]))
        assert [number for number, _ in batch] == [10 + example.row for _, example in batch]
    assert loader.events == [
        *(("with_inputs", [0, 1]), ("prefetch for batches", [2]), ("used", [0, 1])),
        *(("with_inputs", [2]), ("prefetch for batches", [3]), ("used", [2])),
        *(("with_inputs", [3]), ("prefetch for batches", []), ("used", [3])),
    ]


def test_steps_and_batches_are_decoded_ahead_apart():
    loader = Loader()
    feed = MediaFeed(cast(Any, loader), cast(Any, Collectives()))
    feed.prefetch(prompts(7))
    list(feed.batches([prompts(0)]))
    assert loader.events == [
        ("prefetch for step", [7]),
        *(("with_inputs", [0]), ("prefetch for batches", [])),
    ]


def test_a_text_model_gets_its_prompts_as_they_are():
    batch = prompts(0)
    feed = MediaFeed(None, cast(Any, None))
    feed.prefetch(batch)
    assert feed.decoded(batch) is batch
    assert list(feed.batches([batch])) == [batch]
    feed.close()
