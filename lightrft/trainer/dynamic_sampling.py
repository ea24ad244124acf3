"""Dynamic sampling: which groups a step trains on, and where further prompts come from."""

from collections.abc import Collection, Sequence

import torch

from lightrft.types import Experience


def has_variance(group: Sequence[Experience]) -> bool:
    """Whether two samples of the group have different rewards: the comparison with each other teaches something."""
    return len({sample.reward for sample in group if sample.reward is not None}) > 1


def chosen_groups(kept: Collection[int], others: Collection[int], num_wanted: int) -> set[int]:
    """The first of the kept groups, and of the others as many as are still missing."""
    return set([*sorted(kept), *sorted(others)][:num_wanted])


def further_rows(num_rows: int, count: int, taken: Collection[int], seed: tuple[int, ...]) -> list[int]:
    """At most `count` rows in random order, none of them taken; fewer where there are no more.

    Args:
        num_rows: Rows of the data set.
        count: Rows of a batch.
        taken: Rows that the step has drawn already: with the same keys they would give the same samples.
        seed: What the order depends on.
    """
    generator = torch.Generator().manual_seed(hash(seed) % 2**63)  # The hash of a tuple of ints is the same everywhere.
    behind = set(taken)
    return [row for row in torch.randperm(num_rows, generator=generator).tolist() if row not in behind][:count]
