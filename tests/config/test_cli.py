import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightrft.config import Config, DataConfig, ModelConfig, RolloutConfig, cli, dump_yaml, parse_config, usage_errors

REQUIRED = ["--pretrain", "model", "--prompt_data", "prompts.jsonl"]


def usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Text of the usage error, on one line as far as tyro's box breaks it."""
    with pytest.raises(SystemExit) as stop:
        parse_config(argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return " ".join(captured.err.replace("│", " ").split())


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_are_flat_and_defaults_are_those_of_the_dataclasses():
    config = parse_config([*REQUIRED, "--engine-tp-size", "2", "--adam_betas", "0.8", "0.9", "--stop", "</a>", "\n"])
    assert config.rollout == RolloutConfig(engine_tp_size=2, stop=("</a>", "\n"))
    assert config.optimizer.adam_betas == (0.8, 0.9)
    assert config.model == ModelConfig(pretrain="model")


def test_engine_sleep_is_switched_off_by_either_spelling():
    assert not parse_config([*REQUIRED, "--disable_engine_sleep"]).rollout.enable_engine_sleep
    assert not parse_config([*REQUIRED, "--disable-engine-sleep"]).rollout.enable_engine_sleep
    assert not parse_config([*REQUIRED, "--no_enable_engine_sleep"]).rollout.enable_engine_sleep


@pytest.mark.parametrize(
    "tokens", [["--bf16", "False"], ["--bf16", "true"], ["--bf16=0"], ["--no-bf16", "1"], ["--bf16="]]
)
def test_a_value_after_a_switch_is_a_usage_error_that_says_what_to_write(tokens, capsys):
    """CLI-01"""
    message = usage_error([*REQUIRED, *tokens], capsys)
    assert message == f"error: A switch takes no value: {' '.join(tokens)}. Write --bf16 or --no_bf16."


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--max-epochs=1", "--max_epochs=2"),
        ("--bf16", "--no_bf16"),
        ("--enable_engine_sleep", "--disable_engine_sleep"),
        ("--config=a", "--config=b"),
    ],
)
def test_a_flag_given_twice_is_a_usage_error_that_names_it(first, second, capsys):
    message = usage_error([*REQUIRED, first, second], capsys)
    assert message == f"error: A flag may be given once: {first} and {second}. Drop one of them."


def test_a_repeated_flag_is_seen_whatever_stands_between_its_name_and_value(capsys):
    assert "--seed=1 and --seed." in usage_error([*REQUIRED, "--seed=1", "--seed", "2"], capsys)


def test_an_unknown_flag_is_a_usage_error_that_names_close_ones(capsys):
    assert "--micro_train_batch_size" in usage_error([*REQUIRED, "--micro_train_batch", "2"], capsys)


def test_the_config_file_is_read_and_flags_come_before_it(tmp_path):
    path = write(
        tmp_path / "run.yaml",
        "pretrain: model\nseed: 7\nactor_learning_rate: 1e-5\nkl_target: null\nadam_betas: [0.8, 0.9]\n"
        "enable_engine_sleep: false\nbf16: true\nstop: []\n",
    )
    config = parse_config(["--config", path, "--prompt_data", "prompts.jsonl", "--seed", "8"])
    assert config.train.seed == 8
    assert config.optimizer.actor_learning_rate == 1e-5
    assert config.optimizer.adam_betas == (0.8, 0.9)
    assert not config.rollout.enable_engine_sleep
    assert config.model == ModelConfig(pretrain="model", bf16=True)
    assert parse_config(["--prompt_data=p", f"--config={path}", "--no_bf16"]).model.bf16 is False


def test_a_required_flag_that_neither_names_is_a_clear_usage_error(tmp_path, capsys):
    path = write(tmp_path / "run.yaml", "prompt_data: prompts.jsonl\n")
    message = usage_error(["--config", path], capsys)
    assert "Required options" in message and "--pretrain" in message and "--prompt_data" not in message


def test_a_wrong_type_in_the_file_is_the_same_error_as_the_flag(tmp_path, capsys):
    path = write(tmp_path / "run.yaml", "max_epochs: many\n")
    in_file = usage_error([*REQUIRED, "--config", path], capsys)
    assert in_file == usage_error([*REQUIRED, "--max_epochs", "many"], capsys)
    assert "--max_epochs" in in_file and "many" in in_file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("micro_batch_size: 2", "unknown key 'micro_batch_size'. Close to it: micro_train_batch_size, "),
        ("zzz: 2", "unknown key 'zzz'. --help lists the flags."),
        ("train:\n  seed: 2", "unknown key 'train'."),
        ("1: 2", "unknown key '1'."),
        ("seed: 1\nseed: 2", "a key may be given once: seed."),
        ("seed: null", "seed cannot be null."),
        ("pretrain: null", "pretrain cannot be null."),
        ("seed: [1, 2]", "seed must be a single value: [1, 2]."),
        ("stop: {a: b}", "stop must be a single value"),
        ("bf16: 'False'", "bf16 must be true or false: 'False'."),
        ("bf16: 1", "bf16 must be true or false: 1."),
        ("label_key: yes", "label_key must be text: True. Put it in quotes."),
        ("stop: [a, 1.0]", "stop must be text: ['a', 1.0]."),
        ("stop: [a, --bf16]", "stop may hold a text like a flag only in the first place"),
        ("- seed", "a configuration must be a mapping of flags to values."),
        ("seed: [", "while parsing"),
    ],
)
def test_a_mistake_in_the_file_is_a_usage_error_that_names_file_and_key(text, message, tmp_path, capsys):
    path = write(tmp_path / "run.yaml", text)
    error = usage_error([*REQUIRED, "--config", path], capsys)
    assert error.startswith(f"error: {path}: ") and message in error


def test_a_missing_config_file_or_value_is_a_usage_error(tmp_path, capsys):
    assert "nowhere.yaml is no file" in usage_error([*REQUIRED, "--config", "nowhere.yaml"], capsys)
    assert "--config needs a value" in usage_error([*REQUIRED, "--config"], capsys)
    assert "--config needs a value" in usage_error(["--config", *REQUIRED], capsys)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--disable_engine_sleep", "--bf16", "--fsdp", "--max_steps", "3", "--eval_data", "e.jsonl"],
        ["--kl_target", "0.1", "--actor_learning_rate", "3e-07", "--adam_betas", "0", "0.5", "--gamma", "1"],
        ["--stop", "\n\n", "", "#: yes", "no", "1.0", "---", "é '\"", "-5"],
        ["--stop=-END", "--reward_fn", "my.module:f", "--save_path", "null", "--input_key=--seed", "--label_key", "on"],
    ],
)
def test_dumped_yaml_is_read_back_as_an_equal_config(argv, tmp_path):
    config = parse_config([*REQUIRED, *argv])
    path = write(tmp_path / "config.yaml", dump_yaml(config))
    assert parse_config(["--config", path]) == config


def test_dumped_yaml_keeps_values_that_another_process_wrote_as_other_numbers(tmp_path):
    config = Config(ModelConfig("model"), DataConfig("p"), rollout=replace(RolloutConfig(), temperature=1))
    assert parse_config(["--config", write(tmp_path / "config.yaml", dump_yaml(config))]) == config


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, PermissionError])
def test_usage_errors_turns_a_mistake_into_a_message_and_code_2(kind, capsys):
    with pytest.raises(SystemExit) as stop, usage_errors():
        raise kind("rule: values. remedy.")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: rule: values. remedy.\n"


def test_usage_errors_leaves_other_errors_alone():
    with pytest.raises(KeyError), usage_errors():
        raise KeyError("ours")


@pytest.mark.parametrize(("rank", "local_rank", "turn"), [("0", "0", 0), ("8", "0", 1), ("9", "1", 2)])
def test_a_rank_waits_for_rank_0_and_for_the_first_of_its_node_then_tells_its_own_mistake(
    rank, local_rank, turn, monkeypatch, capsys
):
    """Rank 0 may have no such mistake: a folder can lack on one node."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(cli, "HEAD_START_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(SystemExit) as stop, usage_errors():
        raise ValueError("rule: values. remedy.")
    assert stop.value.code == 2
    assert time.monotonic() - started >= 0.2 * turn
    prefix = "" if rank == "0" else f"[rank {rank}] "
    assert capsys.readouterr().err == f"{prefix}error: rule: values. remedy.\n"


@pytest.mark.parametrize("argv", [["--seed=x"], ["--nothing"], ["--gamma=x"]])
def test_the_parser_speaks_on_rank_0_only(argv, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(cli, "HEAD_START_SECONDS", 0.0)
    with pytest.raises(SystemExit) as stop:
        parse_config([*REQUIRED, *argv])
    assert stop.value.code == 2
    assert capfd.readouterr() == ("", "")


def test_other_ranks_wait_until_rank_0_has_spoken():
    command = [sys.executable, "-c", "from lightrft.config import parse_config; parse_config(['--seed=1', '--seed=2'])"]
    other = subprocess.Popen(command, env={**os.environ, "RANK": "1"}, stderr=subprocess.PIPE, text=True)
    try:
        first = subprocess.run(
            command, env={**os.environ, "RANK": "0"}, capture_output=True, text=True, timeout=60, check=False
        )
        assert first.returncode == 2 and "--seed" in first.stderr
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=2)
    finally:
        other.kill()
        _, spoken = other.communicate()
    assert spoken == ""


def test_help_lists_every_flag_and_imports_no_torch():
    program = """
import sys
from lightrft.config import parse_config
try:
    parse_config(["--help"], prog="train")
finally:
    assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    for text in ("usage: train", "--config FILE.yaml", "--pretrain", "--disable_engine_sleep", "--reward_fn"):
        assert text in shown.stdout
