"""MediaFeed: the media of a run's prompts, decoded while the models work on those before."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from lightrft.datasets.media import MediaLoader
from lightrft.strategy.utils.collectives import Collectives
from lightrft.types import PromptExample

NumberedPrompt: TypeAlias = tuple[int, PromptExample]
"""Index in the global rollout batch, and the prompt there."""

STEP, BATCHES = "step", "batches"
"""What media are decoded ahead for: an evaluation between two steps leaves what the second one will need."""


class MediaFeed:
    """Decodes the media of prompts; errors of any rank end all.

    Args:
        loader: None where the model takes no media: prompts are passed on as they are.
        collectives: Of the run.
    """

    def __init__(self, loader: MediaLoader | None, collectives: Collectives) -> None:
        self.loader = loader
        self.collectives = collectives

    def decoded(self, prompts: Sequence[NumberedPrompt]) -> Sequence[NumberedPrompt]:
        """The prompts with their model inputs. Every rank must call it."""
        if self.loader is None:
            return prompts
        examples: list[PromptExample] = []
        with self.collectives.collect("decoding media"):
            examples = self.loader.with_inputs([example for _, example in prompts])
        return [(number, example) for (number, _), example in zip(prompts, examples, strict=True)]

    def prefetch(self, prompts: Sequence[NumberedPrompt], purpose: str = STEP) -> None:
        """Starts to decode what `decoded` will be asked for, and forgets what it had started for the same purpose."""
        if self.loader is not None:
            self.loader.prefetch([example for _, example in prompts], purpose)

    def batches(self, batches: Sequence[Sequence[NumberedPrompt]]) -> Iterator[Sequence[NumberedPrompt]]:
        """Each batch, decoded while the one before is used. Every rank must have as many, and take all."""
        for i, batch in enumerate(batches):
            decoded = self.decoded(batch)
            self.prefetch(batches[i + 1] if i + 1 < len(batches) else (), BATCHES)
            yield decoded

    def close(self) -> None:
        """Ends the processes."""
        if self.loader is not None:
            self.loader.close()
