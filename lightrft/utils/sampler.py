"""Sampler of prompts: the order of the data set, resumable and the same for every number of ranks."""

from collections.abc import Iterator
from itertools import count, islice

import torch

from lightrft.config.arguments import TailBatch
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)


class PromptSampler:
    """Global batches of row positions, in a new order each episode.

    Iterating goes on from the state, which already stands behind the batch that was given last. An episode's last
    batch is left out (`drop`) or filled up from the next episode's order (`pad`), which stays as it is; a row is
    taken twice for the same batch only if there are fewer rows than it holds.

    Raises:
        ValueError: there are no rows, or fewer than one batch where the tail is dropped.
    """

    def __init__(self, num_rows: int, batch_size: int, num_episodes: int, seed: int, tail: TailBatch) -> None:
        if num_rows < (batch_size if tail == "drop" else 1):
            raise ValueError(
                f"A data set must fill a rollout batch: {num_rows} prompts < rollout_batch_size={batch_size}. "
                "Set a smaller --rollout_batch_size, or --tail_batch pad."
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.num_episodes = num_episodes
        self.seed = seed
        self.tail = tail
        self._episode = 0
        self._offset = 0
        self._log_tail()

    @property
    def steps_per_episode(self) -> int:
        num_full, num_left = divmod(self.num_rows, self.batch_size)
        return num_full + (self.tail == "pad" and num_left > 0)

    @property
    def total_steps(self) -> int:
        return self.steps_per_episode * self.num_episodes

    def __iter__(self) -> Iterator[list[int]]:
        while self._episode < self.num_episodes:
            batch = self._batch(self._episode, self._offset)
            self._advance()
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts: its episode, and its offset in the episode's order."""
        return {"episode": self._episode, "offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        episode, offset = state["episode"], state["offset"]
        if offset % self.batch_size or not 0 <= offset < self.steps_per_episode * self.batch_size:
            raise ValueError(
                f"A saved place in the data must be the start of a batch: offset {offset}, {self.num_rows} prompts in "
                f"batches of {self.batch_size}. Resume with the data and the --rollout_batch_size of the saved run."
            )
        self._episode, self._offset = episode, offset

    def _batch(self, episode: int, offset: int) -> list[int]:
        batch = self._order(episode)[offset : offset + self.batch_size]
        for following in count(episode + 1):
            if len(batch) == self.batch_size:
                break
            taken = set(batch) if self.batch_size <= self.num_rows else set()
            fresh = (row for row in self._order(following) if row not in taken)
            batch += islice(fresh, self.batch_size - len(batch))
        return batch

    def _order(self, episode: int) -> list[int]:
        # Seeds of neighbouring runs must not share orders: seed 1's first episode is not seed 0's second.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + episode) % 2**63)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def _advance(self) -> None:
        self._offset += self.batch_size
        if self._offset >= self.steps_per_episode * self.batch_size:
            self._episode, self._offset = self._episode + 1, 0

    def _log_tail(self) -> None:
        num_left = self.num_rows % self.batch_size
        if self.tail == "drop":
            rule = f"the last {num_left} of an episode's order are left out"
        else:
            rule = f"an episode's last batch takes {-self.num_rows % self.batch_size} from the next episode's order"
        logger.info(
            "%d prompts in batches of %d: %d steps per episode, %d in all; tail_batch=%s: %s",
            self.num_rows,
            self.batch_size,
            self.steps_per_episode,
            self.total_steps,
            self.tail,
            rule,
        )
