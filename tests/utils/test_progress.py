"""The progress display."""

import io
import logging

import pytest
from rich.console import Console

from lightrft.utils.progress import ProgressDisplay, duration, sparkline

METRICS = {
    "reward/mean": 0.25,
    "rollout/response_length": 3.9,
    "train/entropy": 0.8312,
    "tokens_per_second": 12345.6,
    "time/step": 0.5,
}


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=width, color_system=None)


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def run_steps(display: ProgressDisplay, steps: int) -> None:
    with display:
        for step in range(1, steps + 1):
            display.phase("generate")
            display.step(step, METRICS)


def test_the_panel_shows_step_reward_figures_and_time_left():
    """50 steps are left after step 10 of 60; at 0.5 s each that is 25 s."""
    console = terminal()
    run_steps(ProgressDisplay(60, enabled=True, console=console), 10)
    panel = shown(console).replace("\N{NO-BREAK SPACE}", " ")
    for text in ("step 10/60", "0:25 left", "reward 0.250 (first step 0.250)", "response 3.9 tokens", "entropy 0.831"):
        assert text in panel
    for text in ("12,346 tokens/s", "0.50 s/step", "done"):
        assert text in panel


def test_the_panel_fits_the_terminal():
    console = terminal(width=60)
    run_steps(ProgressDisplay(200, enabled=True, console=console), 200)
    last_frame = shown(console).rpartition("╭")[2]
    assert {len(line) for line in last_frame.splitlines() if line.startswith(("│", "╰"))} == {60}


@pytest.mark.parametrize(
    ("metrics", "figure"),
    [
        ({"kl/reference": 0.02}, "KL to reference 0.0200"),
        ({"train/ppo_kl": 0.01}, "KL to old policy 0.0100"),
        ({"kl/reference": 0.02, "train/ppo_kl": 0.01}, "KL to reference 0.0200"),
    ],
)
def test_the_kl_is_that_to_the_reference_or_in_a_run_without_one_that_to_the_old_policy(metrics, figure, caplog):
    caplog.set_level(logging.INFO, logger="lightrft")
    with ProgressDisplay(1, enabled=True, console=plain()) as display:
        display.step(1, metrics)
    (line,) = lines(caplog)
    assert figure in line and line.count("KL") == 1


def test_a_metric_that_the_run_lacks_is_left_out():
    console = terminal()
    run_steps(ProgressDisplay(2, enabled=True, console=console), 1)
    assert "KL" not in shown(console)


def test_the_panel_says_when_the_run_was_stopped_by_an_error():
    console = terminal()
    with pytest.raises(KeyboardInterrupt), ProgressDisplay(5, enabled=True, console=console) as display:
        display.step(1, METRICS)
        raise KeyboardInterrupt
    assert "stopped" in shown(console)


def test_the_cursor_is_visible_while_the_panel_is_up():
    """A signal may end the process at any moment."""
    console = terminal()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    with ProgressDisplay(5, enabled=True, console=console):
        assert shown(console).rindex(show) > shown(console).rindex(hide)


def test_without_a_terminal_only_the_first_and_the_last_step_of_a_fast_run_are_logged(caplog):
    caplog.set_level(logging.INFO, logger="lightrft")
    console = plain()
    run_steps(ProgressDisplay(4, enabled=True, console=console, seconds_between_lines=3600), 4)
    assert lines(caplog) == [
        "step 1/4: reward 0.250, response 3.9 tokens, entropy 0.831, 12,346 tokens/s, 0.50 s/step, 0:02 left",
        "step 4/4: reward 0.250, response 3.9 tokens, entropy 0.831, 12,346 tokens/s, 0.50 s/step, 0:00 left",
    ]
    assert shown(console) == ""


def test_without_a_terminal_a_line_comes_once_the_time_between_lines_is_over(caplog):
    caplog.set_level(logging.INFO, logger="lightrft")
    run_steps(ProgressDisplay(4, enabled=True, console=plain(), seconds_between_lines=0), 4)
    assert [line.partition(":")[0] for line in lines(caplog)] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]


def test_a_run_that_ends_early_still_logs_its_last_step(caplog):
    caplog.set_level(logging.INFO, logger="lightrft")
    run_steps(ProgressDisplay(100, enabled=True, console=plain(), seconds_between_lines=3600), 3)
    assert [line.partition(":")[0] for line in lines(caplog)] == ["step 1/100", "step 3/100"]


@pytest.mark.parametrize("make_console", [terminal, plain])
def test_other_ranks_show_nothing(make_console, caplog):
    """CLI-03."""
    caplog.set_level(logging.INFO, logger="lightrft")
    console = make_console()
    run_steps(ProgressDisplay(2, enabled=False, console=console), 2)
    assert shown(console) == ""
    assert lines(caplog) == []


def test_a_run_without_steps_shows_no_line(caplog):
    caplog.set_level(logging.INFO, logger="lightrft")
    run_steps(ProgressDisplay(0, enabled=True, console=plain()), 0)
    assert lines(caplog) == []


def test_a_sparkline_spans_the_lowest_to_the_highest_bar():
    """Four values of a line: 0, 1, 2, 3 of 3 are 0, 2.33, 4.67, 7 of the seven steps between eight bars."""
    assert sparkline([0.0, 1.0, 2.0, 3.0], width=10) == "▁▃▆█"


def test_a_sparkline_narrower_than_its_values_shows_means():
    """(0 + 0) / 2 = 0 is the least and (0 + 4) / 2 = 2 the greatest."""
    assert sparkline([0.0, 0.0, 0.0, 4.0], width=2) == "▁█"


@pytest.mark.parametrize(("values", "width", "expected"), [([], 5, ""), ([1.0], 0, ""), ([2.0, 2.0], 5, "▁▁")])
def test_a_sparkline_of_nothing_or_of_one_level(values, width, expected):
    assert sparkline(values, width) == expected


def test_durations_have_hours_from_an_hour_on():
    """4000 s = 1 h (3600 s) + 6 min (360 s) + 40 s."""
    assert [duration(seconds) for seconds in (0, 61, 3599, 4000)] == ["0:00", "1:01", "59:59", "1:06:40"]


def test_another_course_than_the_rewards_has_its_own_name(caplog):
    caplog.set_level(logging.INFO, logger="lightrft")
    display = ProgressDisplay(1, enabled=True, console=plain(), course=("train/accuracy", "pairs right"))
    with display:
        display.step(1, {"train/accuracy": 0.75, "train/loss": 0.5, "time/step": 1.0})
    assert lines(caplog) == ["step 1/1: pairs right 0.750, loss 0.5000, 1.00 s/step, 0:00 left"]
