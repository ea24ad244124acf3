from pathlib import Path
from typing import Any

import pytest

from lightrft.config import Config, DataConfig, ModelConfig, RewardConfig, parse_config
from lightrft.config.checks import check_config
from lightrft.config.remote_checks import remote_reward_errors
from tests.distributed.runs import make_config

RM = {"remote_rm_url": "http://a:5000/get_reward"}
JUDGE = {"judge_url": "http://a:8000", "judge_model": "m"}


def errors(**reward: Any) -> list[str]:
    return list(remote_reward_errors(Config(ModelConfig("m"), DataConfig("d"), reward=RewardConfig(**reward))))


@pytest.mark.parametrize(
    "reward",
    [
        {},
        RM,
        {"remote_rm_url": "https://a/get_reward/,http://[::1]:5000/x", "remote_rm_batch_size": 1, "reward_requests": 4},
        JUDGE,
        JUDGE | {"judge_url": "http://a:8000/v1", "judge_pattern": r"Grade: (\d+)", "judge_range": (1.0, 5.0)},
        RM | JUDGE,
    ],
)
def test_what_is_right_has_no_error(reward):
    assert errors(**reward) == []


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"remote_rm_url": "a:5000"}, "remote_rm_url must be as http://host:5000/get_reward, "),
        ({"remote_rm_url": "http://a:5000,"}, "remote_rm_url must be as "),
        ({"remote_rm_url": "ftp://a:5000"}, "remote_rm_url must be as "),
        ({"remote_rm_url": "http://a:5000/x?key=1"}, "remote_rm_url must be as "),
        ({"judge_url": "a", "judge_model": "m"}, "judge_url must be as http://host:8000, "),
        ({"judge_url": "http://a"}, "a judge needs a model's name: "),
        (JUDGE | {"judge_prompt": "/no/file"}, "judge_prompt must be a file of text: /no/file: "),
        (
            JUDGE | {"judge_pattern": "Score: [0-9]+"},
            "judge_pattern must have one group, the score: 'Score: [0-9]+' has 0.",
        ),
        (JUDGE | {"judge_pattern": "(a)(b)"}, "judge_pattern must have one group, the score: '(a)(b)' has 2."),
        (JUDGE | {"judge_pattern": "("}, "judge_pattern must be a regular expression: '(': "),
        ({"reward_requests": 2}, "reward_requests is a setting of remote_rm_url and judge_url: "),
    ],
)
def test_what_is_wrong_is_one_error(reward, message):
    [error] = errors(**reward)
    assert error.startswith(message)


@pytest.mark.parametrize("url", ["http://me:s3cret@a:5000", "http://a:5000/x?key=s3cret", "http://me:s3?cret@a:5000"])
def test_a_secret_in_a_url_is_not_shown(url):
    [error] = errors(remote_rm_url=url)
    assert "s3" not in error and "LIGHTRFT_REWARD_API_KEY" in error


def test_a_judges_text_without_the_response_is_refused(tmp_path: Path):
    path = tmp_path / "prompt.txt"
    path.write_text("Is {prompt} right?")
    [error] = errors(**JUDGE, judge_prompt=str(path))
    assert error.startswith(f"judge_prompt must say where the response goes: {path} has no {{response}}.")
    path.write_bytes(b"{response} \xff")
    [error] = errors(**JUDGE, judge_prompt=str(path))
    assert error.startswith(f"judge_prompt must be a file of text: {path}: ")


@pytest.mark.parametrize("score_range", [(5.0, 5.0), (5.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_needs_two_numbers_in_order(score_range, tmp_path):
    (tmp_path / "prompts.jsonl").touch()
    config = make_config(tmp_path, tmp_path / "run", reward=JUDGE | {"judge_range": score_range})
    with pytest.raises(ValueError, match=r"^judge_range must be a finite number and a larger one: "):
        check_config(config, 1)


def test_the_command_line_gives_them(capsys):
    argv = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "http://a:1/x,http://b:1/x", "--judge_url"]
    argv += ["http://c", "--judge_model", "m", "--judge_range", "-1", "1", "--judge_pattern", r"Grade: (\d+)"]
    reward = parse_config(argv).reward
    assert reward.remote_rm_url == "http://a:1/x,http://b:1/x"
    assert (reward.judge_range, reward.judge_pattern) == ((-1.0, 1.0), r"Grade: (\d+)")
    assert capsys.readouterr().err == ""
