"""The desync report: what ranks publish of themselves, and the words for who is missing where."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.strategy.utils.distributed_util import format_ranks


@dataclass(frozen=True)
class RankState:
    """Where a rank is. Ages, not times: clocks of hosts differ."""

    site: str = ""
    """The site it is in, or the last one it left; empty before the first."""
    sequence: int = 0
    """How many sites it has entered."""
    inside: bool = False
    age_seconds: float = 0.0
    """How long it has been there."""
    ended: bool = False
    beat: int = 0
    """Grows with every publication, so that silence shows."""
    lost: str = ""
    """Why nothing more is heard of it; set by the reader."""

    @property
    def waited_seconds(self) -> float:
        """How long the rank has waited in its site, as it said last."""
        return self.age_seconds if self.inside and not self.ended else 0.0


def describe_desync(states: Sequence[RankState], timeout_seconds: float) -> str:
    """Which rank waits where, which ranks are missing there, and a line for each group of ranks in one place."""
    alive = [state for state in states if not state.lost]
    longest = max(alive, key=lambda state: state.waited_seconds)
    header = _describe_longest(longest, states, timeout_seconds) if longest.inside else "no rank waits in a collective"
    ranks_of_place: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        ranks_of_place.setdefault(_place(state), []).append(rank)
    lines = [f"  {format_ranks(ranks)} {place}" for place, ranks in ranks_of_place.items()]
    return "\n".join([header, *lines])


def _describe_longest(longest: RankState, states: Sequence[RankState], timeout_seconds: float) -> str:
    here = (longest.sequence, longest.site)
    missing = [
        rank for rank, state in enumerate(states) if (state.sequence, state.site) != here or state.ended or state.lost
    ]
    waiting = [rank for rank, state in enumerate(states) if rank not in missing and state.inside]
    who = f"{format_ranks(missing)} missing" if missing else "all ranks are there, but it does not end"
    return (
        f"{format_ranks(waiting)} waiting for {longest.age_seconds:.1f} s (the timeout is {timeout_seconds:g} s) "
        f"in {longest.site} (#{longest.sequence}): {who}"
    )


def _place(state: RankState) -> str:
    if state.ended:
        return f"ended; {_last_site(state)}"
    if state.lost:
        return f"{state.lost}; was {_whereabouts(state)}"
    return _whereabouts(state)


def _whereabouts(state: RankState) -> str:
    if state.inside:
        return f"in {state.site} (#{state.sequence}) for {state.age_seconds:.0f} s"
    return f"in no collective since {state.age_seconds:.0f} s; {_last_site(state)}"


def _last_site(state: RankState) -> str:
    return f"last: {state.site} (#{state.sequence})" if state.sequence else "it has entered none yet"
