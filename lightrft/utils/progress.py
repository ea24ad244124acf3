"""What a person sees while a run trains: a live panel on a terminal, a line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich import get_console
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

BARS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 20
"""Steps whose mean duration the remaining time is reckoned from."""
REFRESHES_PER_SECOND = 4
LONG_PHASE_SECONDS = 2.0
"""A phase that lasts longer shows its seconds; shorter ones would only flicker."""
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
REWARD = ("reward/mean", "reward")
"""The metric whose course is shown, and what it is called."""
FIGURES = (
    {"rollout/response_length": "response {:.1f} tokens"},
    {"kl/reference": "KL to reference {:.4f}", "train/ppo_kl": "KL to old policy {:.4f}"},
    {"train/entropy": "entropy {:.3f}", "train/loss": "loss {:.4f}"},
    {"tokens_per_second": "{:,.0f} tokens/s"},
    {"time/step": "{:.2f} s/step"},
)
"""Metrics and their forms; the first that the run has is shown. KL and entropy are in nats per token."""


class ProgressDisplay:
    """Shows the running phase, the steps done and the reward's course. Only an enabled one (rank 0's) shows anything.

    Args:
        console: Where the panel is drawn; by default rich's own, which `setup_logging` writes to as well, so that
            log lines appear above the panel.
        seconds_between_lines: Without a terminal, at least this long between two lines.
        course: The metric whose course is shown, and what it is called.
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool,
        console: Console | None = None,
        seconds_between_lines: float = 5.0,
        course: tuple[str, str] = REWARD,
    ) -> None:
        self._metric, self._name = course
        self._total_steps = total_steps
        self._enabled = enabled
        self._console = console or get_console()
        self._seconds_between_lines = seconds_between_lines
        self._phase = ("start", time.monotonic())
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step_ended = time.monotonic()
        self._line_written: float | None = None
        self._line_step = 0
        self._live = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled and self._console.is_interactive:
            self._live.enter_context(
                Live(
                    console=self._console,
                    get_renderable=self._panel,
                    refresh_per_second=REFRESHES_PER_SECOND,
                )
            )
            # torchrun may end this process by a signal, and a hidden cursor would stay hidden.
            self._console.show_cursor(True)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = ("stopped" if error else "done", time.monotonic())
        self._live.close()
        if self._line_step < self._step:
            self._write_line()

    def phase(self, name: str) -> None:
        self._phase = (name, time.monotonic())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a finished step; steps count from 1."""
        now = time.monotonic()
        self._recent_seconds.append(metrics.get("time/step", now - self._step_ended))
        self._step_ended = now
        self._step = step
        self._metrics = metrics
        if self._metric in metrics:
            self._rewards.append(metrics[self._metric])
        if self._line_is_due(now):
            self._write_line()

    # Lines

    def _line_is_due(self, now: float) -> bool:
        if not self._enabled or self._console.is_interactive:
            return False
        first_or_last = self._line_written is None or self._step == self._total_steps
        return first_or_last or now - (self._line_written or now) >= self._seconds_between_lines

    def _write_line(self) -> None:
        if not self._enabled or self._console.is_interactive:
            return
        reward = [f"{self._name} {self._rewards[-1]:.3f}"] if self._rewards else []
        line = ", ".join([*reward, *self._figures(), f"{self._time_left()} left"])
        logger.info("step %d/%d: %s", self._step, self._total_steps, line)
        self._line_written = time.monotonic()
        self._line_step = self._step

    # The panel

    def _panel(self) -> Panel:
        name, since = self._phase
        seconds = time.monotonic() - since
        phase = name if name in ("done", "stopped") or seconds < LONG_PHASE_SECONDS else f"{name}, {seconds:.0f} s"
        return Panel(
            Group(self._bar(), self._reward(), self._figure_row()),
            title="LightRFT",
            title_align="left",
            subtitle=phase,
            subtitle_align="right",
        )

    def _bar(self) -> Table:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        done = f"step {self._step}/{self._total_steps}"
        row.add_row(
            done, ProgressBar(total=max(1, self._total_steps), completed=self._step), f"{self._time_left()} left"
        )
        return row

    def _reward(self) -> Text:
        if not self._rewards:
            return Text(f"{self._name}: the first step is under way", style="dim")
        first, last = self._rewards[0], self._rewards[-1]
        text = Text.assemble(f"{self._name} ", (f"{last:.3f}", "bold green"), f" (first step {first:.3f}) ")
        if self._console.options.ascii_only:
            return text
        return text.append(sparkline(self._rewards, max(0, self._console.width - len(text) - 4)), style="green")

    def _figure_row(self) -> Text:
        return Text("   ".join(figure.replace(" ", NO_BREAK_SPACE) for figure in self._figures()))

    def _figures(self) -> list[str]:
        figures = []
        for forms in FIGURES:
            present = [name for name in forms if name in self._metrics]
            figures += [forms[name].format(self._metrics[name]) for name in present[:1]]
        return figures

    def _time_left(self) -> str:
        if not self._recent_seconds:
            return "?"
        mean_seconds = sum(self._recent_seconds) / len(self._recent_seconds)
        return duration((self._total_steps - self._step) * mean_seconds)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, from the least to the greatest; a character is a mean."""
    count = min(width, len(values))
    borders = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(borders)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
