"""The memory ledger: what one rank holds on its device in each phase of a step, by owner."""

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import psutil
import torch
from rich.table import Table

Bytes: TypeAlias = Mapping[str, int]
"""Bytes by owner, such as `actor weights`."""

OTHER = "other"
"""On a GPU, what is in use and nobody's in the list: activations, logits, gathered weights, CUDA's and NCCL's own."""
GIB = 2**30


@dataclass(frozen=True)
class PhaseMemory:
    """One phase of one rank; a phase that ran several times has its first entry, last exit and highest peak."""

    phase: str
    seconds: float
    entry: Bytes
    peak: Bytes
    """By owner at the moment, of those that were looked at, when the owners held most; `other` makes up the rest."""
    exit: Bytes
    host_bytes: int
    """Resident memory of this process at the exit."""


class MemoryLedger:
    """Keeps the books. It looks where phases meet and where it is told to, never inside a loop.

    Args:
        device: Of this rank. On the CPU the sum over owners stands for the device, and there is no `other`.
    """

    def __init__(self, device: torch.device) -> None:
        self._meter = _GPUMeter(device) if device.type == "cuda" else _CPUMeter()
        self._sources: list[Callable[[], Bytes]] = []
        self._open: _OpenPhase | None = None
        self._closed: dict[str, PhaseMemory] = {}

    def watch(self, source: Callable[[], Bytes]) -> None:
        """Adds owners; each has one source."""
        self._sources.append(source)

    def begin(self, phase: str, seconds: float) -> None:
        """Opens a phase at this time; the one that runs has ended."""
        assert self._open is None
        self._meter.reset_peak()
        self._open = _OpenPhase(phase, seconds, self._look())

    def observe(self, event: str) -> None:
        """Looks at what the running phase holds, the first time that it meets this event."""
        if self._open is not None and event not in self._open.seen:
            self._open.seen.add(event)
            self._open.take(self._look())

    def end(self, seconds: float) -> None:
        """Closes the running phase at this time, where one runs."""
        if self._open is None:
            return
        phase, last = self._open, self._look()
        phase.take(last)
        known = {name: size for name, size in phase.fullest.items() if name != OTHER}
        peak = {**known, **self._meter.rest(max(phase.highest, self._meter.peak_bytes()), known)}
        host = psutil.Process().memory_info().rss
        record = PhaseMemory(phase.name, seconds - phase.started, phase.entry, peak, last, host)
        self._closed[phase.name] = merged(self._closed.get(phase.name), record)
        self._open = None

    def collect(self) -> list[PhaseMemory]:
        """Phases that have ended since the last call, in the order in which each first ran."""
        records = list(self._closed.values())
        self._closed = {}
        return records

    def _look(self) -> Bytes:
        known = {name: size for source in self._sources for name, size in source().items()}
        return {**known, **self._meter.rest(self._meter.used_bytes(known), known)}


class _OpenPhase:
    def __init__(self, name: str, started: float, entry: Bytes) -> None:
        self.name = name
        self.started = started
        self.entry = entry
        self.seen: set[str] = set()
        self.fullest = entry
        self.highest = 0
        self.take(entry)

    def take(self, held: Bytes) -> None:
        if _known(held) > _known(self.fullest):
            self.fullest = held
        self.highest = max(self.highest, total(held))


class _CPUMeter:
    """Owners are all that can be told apart from the host's other memory."""

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 0

    def used_bytes(self, known: Bytes) -> int:
        return total(known)

    def rest(self, used: int, known: Bytes) -> Bytes:
        return {}


class _GPUMeter:
    """Reads the driver's and the allocator's counters; none of them waits for the GPU.

    The driver sees what engines take outside torch's allocator; the allocator alone knows its peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outside = 0

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """The allocator's peak, and what was in use beside it when somebody last looked."""
        return torch.cuda.max_memory_allocated(self.device) + self._outside

    def used_bytes(self, known: Bytes) -> int:
        """In use on the whole GPU, without what the allocator keeps for later."""
        free, size = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        used = size - free - (torch.cuda.memory_reserved(self.device) - allocated)
        self._outside = used - allocated
        return used

    def rest(self, used: int, known: Bytes) -> Bytes:
        return {OTHER: max(0, used - total(known))}


def total(held: Bytes) -> int:
    return sum(held.values())


def _known(held: Bytes) -> int:
    return total(held) - held.get(OTHER, 0)


def merged(earlier: PhaseMemory | None, later: PhaseMemory) -> PhaseMemory:
    """One record of a phase that ran twice."""
    if earlier is None:
        return later
    peak = max(earlier.peak, later.peak, key=total)
    return replace(later, seconds=earlier.seconds + later.seconds, entry=earlier.entry, peak=peak)


def ledger_metrics(records: Sequence[PhaseMemory], by_owner: bool) -> dict[str, float]:
    """`memory/<phase>_entry_gib`, `_peak_gib` and `_exit_gib`, and this process' memory on the host.

    Args:
        by_owner: Adds each owner's part of each peak, `memory/<phase>_peak/<owner>_gib`.
    """
    metrics = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if records:
        metrics["memory/device_peak_gib"] = max(total(record.peak) for record in records) / GIB
    for record in records:
        metrics["memory/host_gib"] = record.host_bytes / GIB
        moments = {"entry": record.entry, "peak": record.peak, "exit": record.exit}
        metrics |= {f"memory/{record.phase}_{name}_gib": total(held) / GIB for name, held in moments.items()}
        if by_owner:
            metrics |= {
                f"memory/{record.phase}_peak/{name.replace(' ', '_')}_gib": size / GIB
                for name, size in record.peak.items()
                if size
            }
    return metrics


def ledger_table(records: Sequence[PhaseMemory], title: str) -> Table:
    """A line for each phase: the whole device, the host, and the owners' parts of the peak, largest first."""
    is_small = all(total(record.peak) < GIB / 10 for record in records)
    name_of_unit, unit = ("MiB", 2**20) if is_small else ("GiB", GIB)
    table = Table(title=f"{title} ({name_of_unit})", title_justify="left", box=None, pad_edge=False)
    for name in ("phase", "seconds", "entry", "peak", "exit", "host"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    table.add_column("at the peak", ratio=1)
    for record in records:
        sizes = [total(record.entry), total(record.peak), total(record.exit), record.host_bytes]
        owners = sorted(record.peak.items(), key=lambda item: -item[1])
        parts = [f"{name} {size / unit:.2f}" for name, size in owners if size >= unit / 200]
        columns = [f"{size / unit:.2f}" for size in sizes]
        table.add_row(record.phase, f"{record.seconds:.2f}", *columns, ", ".join(parts))
    return table
