from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import lightrft
from lightrft.config import dump_yaml
from lightrft.config.flags import flag_types, flag_values
from lightrft.config.preference import (
    PAIR_RANGES,
    RewardModelConfig,
    check_reward_model_config,
    parse_reward_model_config,
    run_config,
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{}")
    return ["--pretrain", "model", "--train_data", str(pairs), "--fsdp", "--save_path", str(tmp_path / "run")]


def changed(config: RewardModelConfig, **values: Any) -> RewardModelConfig:
    owners = {
        owner: replace(part, **{name: values.pop(name) for name in vars(part) if name in values})
        for owner, part in vars(config).items()
    }
    assert not values
    return replace(config, **owners)


def test_flags_and_a_file_make_a_configuration_that_reads_back(flags, tmp_path):
    config = parse_reward_model_config([*flags, "--learning_rate", "1e-3", "--train_batch_size", "8", "--bf16"])
    check_reward_model_config(config)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert parse_reward_model_config(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (["--bf16", "True"], "A switch takes no value"),
        (["--fsdp"], "A flag may be given once"),
        (["--rollout_batch_size", "8"], "rollout_batch_size"),
        (["--actor_learning_rate", "1e-3"], "actor_learning_rate"),
    ],
)
def test_a_usage_error_ends_with_code_2(flags, flag, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_reward_model_config([*flags, *flag])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_key_of_the_file_that_is_no_flag_here_is_named(flags, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("generate_max_len: 8\n")
    with pytest.raises(SystemExit):
        parse_reward_model_config([*flags, "--config", str(tmp_path / "config.yaml")])
    assert "unknown key 'generate_max_len'" in capsys.readouterr().err


def test_every_flag_of_strategies_and_checkpoints_has_its_value_in_the_run(flags):
    """What both configurations have under one name is equal, and the rate and the passes have other names there."""
    config = parse_reward_model_config([*flags, "--seed", "7", "--l2", "0.5", "--num_epochs", "3", "--save_steps", "2"])
    here, run = flag_values(config), flag_values(run_config(config))
    of_data = set(get_type_hints(get_type_hints(RewardModelConfig)["data"]))
    shared = (here.keys() & run.keys()) - of_data - {"eval_steps"}
    assert {"pretrain", "bf16", "seed", "l2", "save_steps", "fsdp", "train_batch_size", "lr_scheduler"} <= shared
    assert {name: run[name] for name in shared} == {name: here[name] for name in shared}
    assert run["actor_learning_rate"] == here["learning_rate"] and run["num_episodes"] == 3


def test_ranges_are_of_flags():
    assert {"learning_rate", "num_epochs", "max_len"} <= PAIR_RANGES.keys() & flag_types(RewardModelConfig).keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be above 0: learning_rate=0.0."),
        ({"train_batch_size": 0}, "train_batch_size must be at least 1: train_batch_size=0."),
        ({"max_len": 0}, "max_len must be at least 1: max_len=0."),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"seed": "1"}, "seed must be a whole number: seed='1'."),
        ({"train_data": "absent.jsonl"}, "train_data must name files, folders or hub ids: 'absent.jsonl' is no file."),
        ({"eval_data": "absent.jsonl"}, "eval_data must name files, folders or hub ids: 'absent.jsonl' is no file."),
        ({"eval_steps": 2}, "eval_steps evaluates on eval_data: eval_steps=2, and eval_data is unset."),
        ({"system_prompt": "x"}, "system_prompt is a message of the chat template"),
        ({"zero_stage": 2}, "zero_stage is a setting of DeepSpeed, and fsdp trains with FSDP2"),
        ({"save_hf_ckpt": True}, "save_hf_ckpt writes a part of each checkpoint"),
        ({"fsdp_cpu_offload": True, "adam_offload": True}, "adam_offload has nothing to move"),
        ({"offload_actor": True}, "offload_actor is for reinforcement learning"),
        ({"offload_critic": True}, "offload_critic is for reinforcement learning"),
        ({"critic_cpu_offload": True}, "critic_cpu_offload is for reinforcement learning"),
        ({"save_adapter": True}, "save_adapter is for reinforcement learning"),
        ({"save_token_log_probs": True}, "save_token_log_probs is for reinforcement learning"),
    ],
)
def test_a_broken_rule_is_named_with_its_values(flags, values, message):
    with pytest.raises(ValueError) as error:
        check_reward_model_config(changed(parse_reward_model_config(flags), **values))
    assert message in str(error.value)


def test_another_configuration_is_refused():
    with pytest.raises(ValueError, match="config must be a RewardModelConfig: got dict"):
        check_reward_model_config({})  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", [*flag_types(RewardModelConfig)])
def test_every_flag_is_read_by_a_run_or_by_the_training(flag, flags):
    run = flag_values(run_config(parse_reward_model_config(flags)))
    sources = ["datasets/preferences.py", "trainer/reward_model_setup.py", "trainer/reward_model_trainer.py"]
    package = Path(lightrft.__file__).parent
    assert flag in run or any(f".{flag}" in (package / source).read_text() for source in sources)
