"""What a person sees while prepare.py trains."""

from types import TracebackType
from typing import Self

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightrft.utils.logging import get_logger

logger = get_logger("examples.addition.display")


class StageDisplay:
    """One stage's progress: a bar on a terminal, a line at each check elsewhere."""

    def __init__(self, title: str, total: int) -> None:
        logger.info(title)
        self._step = 0
        self._progress = Progress(
            TextColumn("  step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("about"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=get_console(),
            disable=not get_console().is_terminal,
        )
        self._task = self._progress.add_task("", total=total, accuracy="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self) -> None:
        self._step += 1
        self._progress.advance(self._task)

    def report(self, accuracy: str) -> None:
        self._progress.update(self._task, accuracy=accuracy)
        if self._progress.disable:
            logger.info("  step %d: %s on held-out pairs", self._step, accuracy)
