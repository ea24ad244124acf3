"""The desync watch: names the rank that is missing when others wait, and ends a job that cannot go on."""

import atexit
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist

from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.desync import RankState, describe_desync
from lightrft.strategy.utils.trace import CollectiveTrace

logger = logging.getLogger(__name__)

DESYNC_EXIT_CODE = 70
GROUP_TIMEOUT_GRACE_SECONDS = 30.0
"""Process groups wait this much longer than the watch, which can say who is missing."""
_STORE_PATIENCE_SECONDS = 10.0
"""How long an exchange may take on a machine that is busy."""
_STDERR = 2


def start_watch(collectives: Collectives, timeout_seconds: float, host: str) -> "DesyncWatch":
    """The running watch of this rank; every rank calls it.

    Args:
        timeout_seconds: how long a rank may wait in a site before the job ends. Process groups need a longer one, else
            they end it without a name.
        host: where other nodes reach rank 0: `MASTER_ADDR`.
    """
    server = _open_server(collectives.world_size) if collectives.rank == 0 else None
    port = collectives.broadcast_object(server.port if server is not None else None)
    store = server if server is not None else dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_seconds))
    watch = DesyncWatch(collectives.trace, collectives.rank, collectives.world_size, store, timeout_seconds)
    watch.start()
    return watch


class DesyncWatch:
    """Two threads: one exchanges states through a store, one judges them.

    The store must be this watch's own connection, since a blocked client cannot be shared. Judging has its own thread,
    since an exchange with a frozen rank 0 never returns.
    """

    def __init__(
        self, trace: CollectiveTrace, rank: int, world_size: int, store: dist.TCPStore, timeout_seconds: float
    ) -> None:
        self._trace = trace
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._interval = min(1.0, timeout_seconds / 20)
        self._linger_seconds = max(1.0, 3 * self._interval)
        """How long it takes at most until other ranks have read this one's last state."""
        self._board = _Board(store, rank, world_size, silence_seconds=5 * self._interval)
        self._stopping = threading.Event()
        self._warned_sequence = 0
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._exchange, self._judge)]

    def start(self) -> None:
        # A rank that fails must say that it has ended as well, else others can only call it silent.
        atexit.register(self.stop)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Tell the others that this rank has ended. Rank 0 serves on until they know, for `_linger_seconds` at most."""
        atexit.unregister(self.stop)
        self._stopping.set()
        # A thread that comes back from the store while Python shuts down aborts the process: only one whose server is
        # frozen, and so does not come back, may be left behind.
        deadline = time.monotonic() + self._linger_seconds + _STORE_PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _own_state(self) -> RankState:
        state = self._trace.state
        return RankState(
            site=str(state.site) if state.site is not None else "",
            sequence=state.sequence,
            inside=state.inside,
            age_seconds=time.monotonic() - state.since,
            ended=self._stopping.is_set(),
        )

    def _exchange(self) -> None:
        try:
            while not self._stopping.is_set() and not self._board.server_ended:
                self._board.exchange(self._own_state())
                self._stopping.wait(self._interval)
            self._say_goodbye()
        except dist.DistError:
            self._board.lose_server()
            logger.warning("rank 0 is gone: rank %d has lost its connection to it", self._rank)

    def _say_goodbye(self) -> None:
        if self._board.server_ended:
            return
        self._board.exchange(self._own_state())
        deadline = time.monotonic() + self._linger_seconds
        while self._rank == 0 and not self._board.all_ended and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
            self._board.exchange(self._own_state())

    def _judge(self) -> None:
        while not self._stopping.wait(self._interval):
            states = self._board.view(self._own_state())
            waited_seconds = max(state.waited_seconds for state in states)
            if max(waited_seconds, self._board.server_lost_seconds) >= self._timeout_seconds:
                self._end_process(states)
            if waited_seconds >= self._timeout_seconds / 2:
                self._warn(states)

    def _warn(self, states: Sequence[RankState]) -> None:
        """Say it once for each wait, on the lowest rank that can speak."""
        sequence = max(state.sequence for state in states if state.inside)
        able = (rank for rank, state in enumerate(states) if not state.ended and not state.lost)
        if sequence > self._warned_sequence and self._rank == next(able, self._rank):
            self._warned_sequence = sequence
            logger.warning("%s", describe_desync(states, self._timeout_seconds))

    def _end_process(self, states: Sequence[RankState]) -> None:
        """End this process without its main thread, which may hang in C and hold any lock."""
        report = describe_desync(states, self._timeout_seconds)
        os.write(_STDERR, f"ERROR on rank {self._rank}, which ends here: {report}\n".encode())
        faulthandler.dump_traceback(file=_STDERR)
        threading.Thread(target=_flush, daemon=True).start()  # Blocks where the main thread hangs in a write.
        time.sleep(self._linger_seconds)  # Ranks that wait for nothing learn from this one's state that time is up.
        os._exit(DESYNC_EXIT_CODE)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class _Board:
    """All ranks' states, in rank 0's store, and what this rank has read of them."""

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, silence_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._silence_seconds = silence_seconds
        self._beat = 0
        self._lock = threading.Lock()
        self._states = [RankState() for _ in range(world_size)]
        self._changed = [time.monotonic()] * world_size
        self._read = time.monotonic()
        self._server_lost: float | None = None

    def exchange(self, own: RankState) -> None:
        """Publish `own` and read the others; called by one thread only."""
        self._beat += 1
        self._store.set(_key(self._rank), _encode(replace(own, beat=self._beat)))
        states = [RankState(**json.loads(text)) for text in self._store.multi_get(self._keys())]
        with self._lock:
            self._read = time.monotonic()
            for rank, state in enumerate(states):
                if state.beat != self._states[rank].beat:
                    self._changed[rank] = self._read
            self._states = states

    def _keys(self) -> list[str]:
        return [_key(rank) for rank in range(len(self._states))]

    def lose_server(self) -> None:
        self._server_lost = time.monotonic()

    @property
    def server_lost_seconds(self) -> float:
        return 0.0 if self._server_lost is None else time.monotonic() - self._server_lost

    @property
    def server_ended(self) -> bool:
        """Rank 0 has said goodbye: its server may go at any time."""
        return self._rank != 0 and self._states[0].ended

    @property
    def all_ended(self) -> bool:
        return all(state.ended for state in self._states)

    def view(self, own: RankState) -> list[RankState]:
        """Every rank's state, with the reason where nothing more is heard of a rank."""
        with self._lock:
            states = [replace(state, lost=self._lost(rank)) for rank, state in enumerate(self._states)]
        states[self._rank] = own
        return states

    def _lost(self, rank: int) -> str:
        if rank == 0 and self._server_lost is not None:
            return f"gone since {self.server_lost_seconds:.0f} s (its connection broke)"
        # Without reads, all ranks look silent: only rank 0, which should have answered, is then to blame.
        until = time.monotonic() if rank == 0 else self._read
        silent_seconds = until - self._changed[rank]
        return f"without a sign of life since {silent_seconds:.0f} s" if silent_seconds > self._silence_seconds else ""


def _open_server(world_size: int) -> dist.TCPStore:
    """Rank 0's store, on a free port, with an empty state for each rank."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in range(world_size):
        store.set(_key(rank), _encode(RankState()))
    return store


def _key(rank: int) -> str:
    return f"state/{rank}"


def _encode(state: RankState) -> str:
    return json.dumps(asdict(state))
