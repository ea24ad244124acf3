"""GraderPool: grades by functions that may hang, crash or eat up memory, in processes that are replaced then."""

import pickle
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from lightrft.rewards.functions import traceback_text
from lightrft.rewards.grader_processes import GraderProcesses
from lightrft.rewards.grader_server import GradeItem, GraderSpec
from lightrft.rewards.records import Fault, FaultKind, Grade

START_SECONDS = 120.0
"""How long the first process may take to load the functions; a batch's time begins when it has."""
FAIR_SHARE = 0.5
"""Part of the limit that a row must have had by the batch's end, to be said to go beyond it."""


class GraderPool:
    """Processes that grade rows, each for at most `timeout_seconds`, and a batch of rows for at most twice that.

    One thread at a time uses it. Its processes end with `close`, or with this process.

    Args:
        specs: The functions of one response that there are.
        num_workers: Processes at most.
        timeout_seconds: For one row.
    """

    def __init__(self, specs: Sequence[GraderSpec], num_workers: int, timeout_seconds: float) -> None:
        self.names = [spec.spec for spec in specs]
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self._processes = GraderProcesses(specs)
        self._workers: list[Worker] = []
        # It imports the rules while the run loads its models.
        self._processes.ensure_server()

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        """One grade for each item, in order; what has none when the batch's time is over has a fault.

        Raises:
            ConnectionError, TimeoutError: The process that starts the others has ended, or does not answer.
        """
        batch = Batch(items, self.names)
        if not items:
            return []
        try:
            self._grade(batch)
        except BaseException:
            # A process that is left at work on this batch would answer the next one.
            self.close()
            raise
        return batch.result()

    def close(self) -> None:
        """Ends all processes."""
        self._forget_workers()
        self._processes.close()

    def _grade(self, batch: "Batch") -> None:
        if self._processes.ensure_server():
            # Processes end with the server that has started them.
            self._forget_workers()
        self._await_first_worker(batch)
        deadline = time.monotonic() + 2 * self.timeout_seconds
        while not batch.is_done and time.monotonic() < deadline:
            self._start_missing(batch)
            self._hand_out(batch)
            if not batch.is_done:
                self._receive(batch, min([deadline, *(self._limit(worker) for worker in self._busy)]))
            self._end_overdue(batch)
        self._end_batch(batch)

    def _forget_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        self._workers = []

    @property
    def _busy(self) -> list["Worker"]:
        return [worker for worker in self._workers if worker.item is not None]

    def _limit(self, worker: "Worker") -> float:
        """When its row has had its time."""
        return worker.started + self.timeout_seconds

    def _await_first_worker(self, batch: "Batch") -> None:
        deadline = time.monotonic() + START_SECONDS
        self._start_missing(batch)
        while not batch.is_done and not any(worker.is_ready for worker in self._workers):
            if time.monotonic() >= deadline:
                return batch.give_up(f"no grader process had loaded its functions after {START_SECONDS:g} s")
            self._receive(batch, deadline)
            self._start_missing(batch)

    def _start_missing(self, batch: "Batch") -> None:
        while len(self._workers) < min(self.num_workers, batch.num_left):
            self._workers.append(Worker(*self._processes.start()))

    def _hand_out(self, batch: "Batch") -> None:
        idle = [worker for worker in self._workers if worker.is_ready and worker.item is None]
        for worker in idle:
            handed = batch.next_payload()
            if handed is None:
                return
            item, payload = handed
            try:
                worker.connection.send_bytes(payload)
            except ConnectionError:
                # It has died idle, for the machine's lack of memory say, and has not seen the row.
                self._remove(worker)
                batch.put_back(item)
                continue
            worker.item, worker.started = item, time.monotonic()

    def _receive(self, batch: "Batch", deadline: float) -> None:
        """Takes what processes say, once one of them says something or ends, or the deadline has passed."""
        workers = {worker.connection: worker for worker in self._workers}
        if not workers:
            # Waiting for nobody would last until the deadline.
            return
        for connection in wait(list(workers), max(0.0, deadline - time.monotonic())):
            worker = workers[connection]  # type: ignore[index]
            try:
                said = worker.connection.recv()
            except (EOFError, ConnectionError):
                self._bury(worker, batch)
                continue
            if not worker.is_ready:
                self._take_start(worker, batch, said)
                continue
            assert worker.item is not None, "an idle process says nothing"
            batch.take(worker.item, said.grade)
            worker.item = None
            if not said.goes_on:
                self._remove(worker)

    def _take_start(self, worker: "Worker", batch: "Batch", fault: Fault | None) -> None:
        worker.is_ready = fault is None
        if fault is not None:
            self._remove(worker)
            # The next one would not come further.
            batch.give_up(fault.message)

    def _bury(self, worker: "Worker", batch: "Batch") -> None:
        """What follows from a process that has ended by itself."""
        code = self._remove(worker)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if worker.item is not None:
            batch.fault(worker.item, "error", f"the grader process ended on it, by {how}")
        elif not worker.is_ready:
            batch.give_up(f"a grader process ended by {how} while it loaded its functions")

    def _end_overdue(self, batch: "Batch") -> None:
        for worker in self._busy:
            if time.monotonic() >= self._limit(worker):
                self._end_running(worker, batch)

    def _end_running(self, worker: "Worker", batch: "Batch") -> None:
        assert worker.item is not None
        self._remove(worker)
        message = f"it took longer than --reward_timeout_seconds {self.timeout_seconds:g}, and its process was ended"
        batch.fault(worker.item, "ungradable", message)

    def _end_batch(self, batch: "Batch") -> None:
        """Ends what is still running, and gives up what is waiting."""
        now = time.monotonic()
        late = (
            f"no time was left for it: the batch has had {2 * self.timeout_seconds:g} s, twice "
            "--reward_timeout_seconds. Raise it, or --reward_workers"
        )
        for worker in self._busy:
            assert worker.item is not None
            if now - worker.started >= FAIR_SHARE * self.timeout_seconds:
                self._end_running(worker, batch)
            else:
                self._remove(worker)
                batch.fault(worker.item, "error", late)
        batch.give_up(late)

    def _remove(self, worker: "Worker") -> int:
        """Ends a process, if it is still there; its exit code, or its signal's negative."""
        self._workers.remove(worker)
        worker.connection.close()
        return self._processes.end(worker.pid)


class Worker:
    """A grader process, as the pool sees it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self.is_ready = False
        self.item: int | None = None
        """Which of the batch's items it grades."""
        self.started = 0.0
        """When it was given that."""


class Batch:
    """Items, those among them that wait for a process, and the grades so far."""

    def __init__(self, items: Sequence[GradeItem], names: Sequence[str]) -> None:
        self._items = items
        self._names = names
        self._waiting = deque(range(len(items)))
        self._grades: dict[int, Grade] = {}

    @property
    def num_left(self) -> int:
        return len(self._items) - len(self._grades)

    @property
    def is_done(self) -> bool:
        return self.num_left == 0

    def next_payload(self) -> tuple[int, bytes] | None:
        """The next item that can be sent, and what to send; None where none is left."""
        while self._waiting:
            item = self._waiting.popleft()
            try:
                return item, pickle.dumps(self._items[item])
            except Exception as error:
                self.fault(
                    item, "error", f"its columns could not be sent to a grader process:\n{traceback_text(error)}"
                )
        return None

    def put_back(self, item: int) -> None:
        self._waiting.appendleft(item)

    def take(self, item: int, grade: Grade) -> None:
        self._grades[item] = grade

    def fault(self, item: int, kind: FaultKind, what: str) -> None:
        graded = self._items[item]
        message = f"{self._names[graded.grader]}, row {graded.sample.row}: {what}"
        self.take(item, Grade(None, fault=Fault(kind, message)))

    def give_up(self, what: str) -> None:
        """Every item that is waiting fails for the same reason."""
        while self._waiting:
            self.fault(self._waiting.popleft(), "error", what)

    def result(self) -> list[Grade]:
        return [self._grades[item] for item in range(len(self._items))]
