"""Sampler of prompts: the order of the data set, resumable and the same for every number of ranks."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

import torch

from lightrft.config.arguments import TailBatch
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)


class PromptSampler:
    """Global batches of row positions, in a new order each episode.

    Iterating goes on from the state, which already stands behind the batch that was given last. An episode's last
    batch is left out (`drop`) or filled up from the next episode's order (`pad`), which stays as it is. No row is in a
    batch twice: its samples would be drawn with the same keys, and be copies.

    Raises:
        ValueError: there are fewer rows than a batch holds.
    """

    ROWS, BATCH, FLAG, EPISODES = "prompts", "rollout batch", "rollout_batch_size", "num_episodes"
    """What messages call them."""

    def __init__(self, num_rows: int, batch_size: int, num_episodes: int, seed: int, tail: TailBatch) -> None:
        if num_rows < batch_size:
            raise ValueError(
                f"A data set must fill a {self.BATCH}: {num_rows} {self.ROWS} < {self.FLAG}={batch_size}. "
                f"Set a smaller --{self.FLAG}, or give more {self.ROWS}."
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

    @property
    def steps_left(self) -> int:
        done = self._episode * self.steps_per_episode + self._offset // self.batch_size
        return max(0, self.total_steps - done)

    def __iter__(self) -> Iterator[list[int]]:
        while self._episode < self.num_episodes:
            batch = self._batch(self._episode, self._offset)
            self._advance()
            yield batch

    def peek(self) -> list[int]:
        """The batch that comes next, which still does; no rows at the end."""
        return self._batch(self._episode, self._offset) if self._episode < self.num_episodes else []

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts: its episode, and its offset in the episode's order."""
        return {"episode": self._episode, "offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        episode, offset = state["episode"], state["offset"]
        if offset % self.batch_size or not 0 <= offset < self.steps_per_episode * self.batch_size:
            raise ValueError(
                f"A saved place in the data must be the start of a batch: offset {offset}, {self.num_rows} {self.ROWS} "
                f"in batches of {self.batch_size}. Resume with the data and the --{self.FLAG} of the saved run."
            )
        self._episode, self._offset = episode, offset

    def _batch(self, episode: int, offset: int) -> list[int]:
        batch = self._order(episode)[offset : offset + self.batch_size]
        if len(batch) == self.batch_size:
            return batch
        taken = set(batch)
        fresh = (row for row in self._order(episode + 1) if row not in taken)
        return batch + list(islice(fresh, self.batch_size - len(batch)))

    def _order(self, episode: int) -> list[int]:
        return torch.randperm(self.num_rows, generator=self._generator(episode)).tolist()

    def _generator(self, episode: int) -> torch.Generator:
        # Seeds of neighbouring runs must not share orders: seed 1's first episode is not seed 0's second.
        return torch.Generator().manual_seed((self.seed * 1_000_003 + episode) % 2**63)

    def _advance(self) -> None:
        self._offset += self.batch_size
        if self._offset >= self.steps_per_episode * self.batch_size:
            self._episode, self._offset = self._episode + 1, 0

    def _log_tail(self) -> None:
        num_left = self.num_rows % self.batch_size
        if num_left == 0:
            rule = "no row of an episode is left over"
        elif self.tail == "drop":
            rule = f"the last {num_left} of an episode's order are left out"
        else:
            rule = f"an episode's last batch takes {-self.num_rows % self.batch_size} from the next episode's order"
        logger.info(
            "%d %s in batches of %d: %d steps per episode, %d in all; tail_batch=%s: %s",
            self.num_rows,
            self.ROWS,
            self.batch_size,
            self.steps_per_episode,
            self.total_steps,
            self.tail,
            rule,
        )


class PairSampler(PromptSampler):
    """Global batches of preference pairs; those that do not fill a batch are left out."""

    ROWS, BATCH, FLAG, EPISODES = "pairs", "batch", "train_batch_size", "num_epochs"

    def __init__(self, num_rows: int, batch_size: int, num_epochs: int, seed: int) -> None:
        super().__init__(num_rows, batch_size, num_epochs, seed, "drop")


class MixedSampler(PromptSampler):
    """Global batches of rows from several sources, of each its share.

    An episode ends where the first source runs out of rows at these shares (`first_exhausted`): no row comes twice in
    it, and of the other sources it takes rows at random, others in the next episode. Sources are spread evenly over
    the episode's order, so that every batch has its shares to within a row or two.

    Args:
        sizes: Rows of each source; positions count through the sources in their order.
        shares: Share of each source; they sum to 1.
        batch_size: Rows of a batch.
        num_episodes: Episodes of the run.
        seed: Seed of the orders.
        tail: What becomes of an episode's last rows.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shares: Sequence[float],
        batch_size: int,
        num_episodes: int,
        seed: int,
        tail: TailBatch,
    ) -> None:
        self.sizes = tuple(sizes)
        self.counts = rows_per_episode(sizes, shares)
        parts = [f"{count} of {size}" for count, size in zip(self.counts, self.sizes, strict=True)]
        logger.info("an episode takes of each source: %s prompts", ", ".join(parts))
        super().__init__(sum(self.counts), batch_size, num_episodes, seed, tail)

    def _order(self, episode: int) -> list[int]:
        generator = self._generator(episode)
        starts = accumulate(self.sizes, initial=0)
        sources = zip(starts, self.sizes, self.counts, strict=False)
        rows = torch.cat([start + torch.randperm(size, generator=generator)[:count] for start, size, count in sources])
        # The k-th of a source's n rows stands at (k + 1/2) / n of the episode.
        places = torch.cat([(torch.arange(count, dtype=torch.float64) + 0.5) / count for count in self.counts])
        return rows[places.argsort(stable=True)].tolist()


def rows_per_episode(sizes: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """Rows of each source in the longest episode that keeps the shares and repeats no row."""
    length = min(size / share for size, share in zip(sizes, shares, strict=True))
    return tuple(min(size, max(1, round(share * length))) for size, share in zip(sizes, shares, strict=True))
