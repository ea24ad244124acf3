"""The reward curve."""

import json
import subprocess
import sys

import pytest

from lightrft.utils.plots import course, draw_rewards, moving_average, plot_rewards

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_moving_average_is_over_the_latest_values():
    assert moving_average([1.0, 2.0, 6.0, 1.0], 3) == pytest.approx([1.0, 1.5, 3.0, 3.0])  # (2 + 6 + 1) / 3 = 3
    assert moving_average([1.0, 2.0], 1) == [1.0, 2.0]
    assert moving_average([], 3) == []


def test_a_course_skips_steps_without_a_number_and_takes_a_repeated_step_s_last():
    rows = [{"step": 0}, {"step": 1, "a": 0.5}, {"step": 2, "a": None}, {"step": 3, "a": 1.0}, {"step": 1, "a": 0.25}]
    found = course(rows, "a")
    assert (found.steps, found.values) == ([1, 3], [0.25, 1.0])


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "eval/mean": 0.1}, {"step": 1, "reward/mean": 0.2}],
        [{"step": step, "reward/mean": step / 100} for step in range(100)],
        [{"step": 0, "eval/mean": 0.1}],
    ],
    ids=["few", "many", "evaluation alone"],
)
def test_the_picture_is_a_png(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_rewards(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "reward.png"]


def test_a_run_without_rewards_leaves_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": null}\n')
    plot_rewards(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    assert not (tmp_path / "reward.png").exists()


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path):
    (tmp_path / "reward.png").write_bytes(b"old")
    (tmp_path / "reward.png.writing").mkdir()
    with pytest.raises(IsADirectoryError):
        draw_rewards(course([{"step": 1, "a": 1.0}], "a"), course([], "a"), tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes() == b"old"


def test_drawing_opens_no_display_and_leaves_pyplot_alone(tmp_path):
    program = (
        "import sys; from lightrft.utils.plots import *; assert 'matplotlib' not in sys.modules;"
        f"draw_rewards(Course([1], [1.0]), Course([], []), Path({str(tmp_path / 'reward.png')!r}));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
