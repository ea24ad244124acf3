import io
from dataclasses import dataclass, field

import pytest
import torch
from rich.console import Console

from lightrft.utils.memory_ledger import GIB, MemoryLedger, ledger_metrics, ledger_table, total


@dataclass
class Owners:
    """What is on the device at the moment."""

    held: dict[str, int] = field(default_factory=dict)

    def __call__(self) -> dict[str, int]:
        return dict(self.held)


@pytest.fixture
def owners() -> Owners:
    return Owners({"actor weights": 4 * GIB, "actor gradients": 0})


@pytest.fixture
def ledger(owners) -> MemoryLedger:
    ledger = MemoryLedger(torch.device("cpu"))
    ledger.watch(owners)
    ledger.watch(lambda: {"replay buffer": GIB})
    return ledger


def test_a_phase_has_its_entry_its_fullest_moment_and_its_exit(ledger, owners):
    """4 + 1 GiB at entry; 4 + 4 + 1 when it is looked at; 2 + 1 at exit."""
    ledger.begin("train", 10.0)
    owners.held["actor gradients"] = 4 * GIB
    ledger.observe("gradients")
    owners.held |= {"actor gradients": 0, "actor weights": 2 * GIB}
    ledger.end(12.5)
    [record] = ledger.collect()
    assert (record.phase, record.seconds) == ("train", 2.5)
    assert [total(held) / GIB for held in (record.entry, record.peak, record.exit)] == [5, 9, 3]
    assert record.peak == {"actor weights": 4 * GIB, "actor gradients": 4 * GIB, "replay buffer": GIB}
    assert record.host_bytes > 0
    assert ledger.collect() == []


def test_an_event_is_looked_at_once_a_phase(ledger, owners):
    for phase, expected in (("a", 5), ("b", 25)):
        ledger.begin(phase, 0.0)
        ledger.observe("gradients")
        owners.held["actor weights"] = 24 * GIB
        ledger.observe("gradients")
        owners.held["actor weights"] = 4 * GIB if phase == "a" else 24 * GIB
        ledger.end(1.0)
        owners.held["actor weights"] = 24 * GIB
        assert total(ledger.collect()[0].peak) == expected * GIB


def test_a_phase_that_runs_twice_is_one_line(ledger, owners):
    for seconds, size in ((1.0, 8), (2.0, 6)):
        ledger.begin("sync", 0.0)
        owners.held["actor weights"] = size * GIB
        ledger.end(seconds)
    [record] = ledger.collect()
    assert record.seconds == 3.0
    assert [total(held) / GIB for held in (record.entry, record.peak, record.exit)] == [5, 9, 7]


def test_looking_outside_of_a_phase_does_nothing(ledger):
    ledger.observe("gradients")
    ledger.end(1.0)
    assert ledger.collect() == []


def test_metrics_have_the_totals_and_on_request_the_owners_of_the_peak(ledger):
    ledger.begin("train", 0.0)
    ledger.end(1.0)
    records = ledger.collect()
    metrics = ledger_metrics(records, by_owner=False)
    assert {name: metrics[f"memory/train_{name}_gib"] for name in ("entry", "peak", "exit")} == {
        "entry": 5.0,
        "peak": 5.0,
        "exit": 5.0,
    }
    assert metrics["memory/device_peak_gib"] == 5.0
    assert metrics["memory/host_gib"] <= 1.1 * metrics["memory/host_peak_gib"]
    assert not [name for name in metrics if "peak/" in name]
    detailed = ledger_metrics(records, by_owner=True)
    assert {name: value for name, value in detailed.items() if "peak/" in name} == {
        "memory/train_peak/actor_weights_gib": 4.0,
        "memory/train_peak/replay_buffer_gib": 1.0,
    }


def test_the_table_fits_into_80_columns_and_names_the_largest_owner_first(ledger):
    ledger.begin("train", 0.0)
    ledger.end(1.5)
    text = io.StringIO()
    Console(file=text, width=80).print(ledger_table(ledger.collect(), "Memory"))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("Memory (GiB)") and max(map(len, lines)) <= 80
    words = lines[2].split()
    assert words[:5] == ["train", "1.50", "5.00", "5.00", "5.00"]
    assert "actor weights 4.00, replay buffer" in lines[2]


def test_the_table_of_a_tiny_model_is_in_mib():
    ledger = MemoryLedger(torch.device("cpu"))
    ledger.watch(Owners({"actor weights": 3 * 2**20}))
    ledger.begin("train", 0.0)
    ledger.end(1.5)
    text = io.StringIO()
    Console(file=text, width=80).print(ledger_table(ledger.collect(), "Memory"))
    title, _, line = text.getvalue().splitlines()
    assert title.startswith("Memory (MiB)")
    assert line.split()[:5] == ["train", "1.50", "3.00", "3.00", "3.00"] and "actor weights 3.00" in line
