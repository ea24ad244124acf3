import shlex
from pathlib import Path

import pytest

from lightrft.config import check_config, parse_config
from lightrft.config.flags import field_of_spelling
from lightrft.config.translate import translate
from lightrft.config.upstream import FATES, UPSTREAM_FLAGS, Accepted, Refused, Renamed, fate_of, markdown_table

DOCS = Path(__file__).parents[2] / "docs" / "upstream_flags.md"
REQUIRED = ["--pretrain", "model", "--prompt_data", "prompts.jsonl"]
NAMES = [name for names in UPSTREAM_FLAGS.values() for name in names]

GSM8K = """
    --pretrain Qwen/Qwen2.5-0.5B-Instruct --save_trajectories --advantage_estimator group_norm --fsdp --use_kl_loss
    --flash_attn --rm_use_engine --reward_pretrain "{}" --save_path results/gsm8k --ckpt_path results/gsm8k
    --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 4 --rollout_batch_size 128
    --max_epochs 1 --num_episodes 30 --lr_warmup_ratio 0.03 --n_samples_per_prompt 5 --prompt_max_len 1024
    --generate_max_len 2048 --zero_stage 3 --bf16 --actor_learning_rate 1e-6 --init_kl_coef 0.01 --kl_estimator k3
    --prompt_data data/gsm8k --input_key prompt --label_key label --eval_steps 20 --eval_split test
    --max_eval_samples 1319 --apply_chat_template --gradient_checkpointing --save_steps 20 --max_ckpt_num 3
    --engine_type sglang --engine_mem_util 0.6 --engine_tp_size 2 --enable_engine_sleep
    --system_prompt 'Think, then answer in \\boxed{}, like this: <think> thoughts </think> \\boxed{answer}.' --l2 1.0e-2
    --freeze_prefix --adam_offload --text_only --use_wandb KEY-OF-A-PERSON --wandb_project LightRFT-GSM8K
    --wandb_run_name gsm8k-1
"""
"""run_grpo_gsm8k_qwen2.5_0.5b.sh, with its variables filled in."""
SECOND_GSM8K = (
    GSM8K.replace("--engine_type sglang", "--engine_type vllm")
    .replace("--n_samples_per_prompt 5", "--n_samples_per_prompt 8")
    .replace("--micro_train_batch_size 4", "--micro_train_batch_size 1")
    .replace("--micro_rollout_batch_size 4", "--micro_rollout_batch_size 1")
    .replace("--use_wandb KEY-OF-A-PERSON", '--use_wandb ""')
)
"""The second script for GSM8K: vLLM, micro-batches of one, and here without a key."""


def usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_config([*REQUIRED, *argv])
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(("script", "num_samples"), [(GSM8K, 5), (SECOND_GSM8K, 8)])
def test_the_argument_list_of_a_gsm8k_script_parses(script, num_samples, capsys):
    config = parse_config(shlex.split(script))
    assert config.rollout.n_samples_per_prompt == num_samples
    assert (config.data.input_key, config.optimizer.l2, config.rollout.engine_tp_size) == ("prompt", 0.01, 2)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    dropped = ("flash_attn", "rm_use_engine", "freeze_prefix", "text_only")
    for name in ("save_trajectories", "micro_rollout_batch_size", *dropped):
        assert sum(line.startswith(f"warning: --{name} has no effect: ") for line in lines) == 1, name
    assert len(lines) == 6 + script.count("KEY-OF-A-PERSON")
    assert captured.out == "" and "KEY-OF-A-PERSON" not in captured.err


@pytest.mark.parametrize("script", [GSM8K, SECOND_GSM8K])
def test_a_gsm8k_script_passes_the_checks_on_its_eight_gpus_once_it_names_one_backend_and_evaluation_data(
    script, tmp_path
):
    """128 x 5 or 8 responses, 128 an optimizer step, 4 or 1 a forward on each of 8 ranks, rollout groups of 2."""
    (tmp_path / "gsm8k").mkdir()
    argv = shlex.split(script.replace("data/gsm8k", f"{tmp_path}/gsm8k").replace("results/", f"{tmp_path}/results/"))
    argv[argv.index("--engine_type") + 1] = "torch"
    with pytest.raises(ValueError, match=r"^zero_stage is a setting of DeepSpeed, and fsdp trains with FSDP2: "):
        check_config(parse_config(argv), 8, local_world_size=8)
    stage = argv.index("--zero_stage")
    del argv[stage : stage + 2]
    with pytest.raises(ValueError, match=r"^eval_steps is a setting of eval_data: .*$"):
        check_config(parse_config(argv), 8, local_world_size=8)
    check_config(parse_config([*argv, "--eval_data", f"{tmp_path}/gsm8k"]), 8, local_world_size=8)


def test_an_engine_that_is_not_there_is_a_usage_error_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(shlex.split(GSM8K.replace("sglang", "hf")))
    assert stop.value.code == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "invalid choice 'hf'" in message and all(name in message for name in ("torch", "vllm", "sglang"))


@pytest.mark.parametrize("name", NAMES)
def test_every_upstream_flag_has_a_fate(name):
    assert fate_of(name) is not None


def test_the_table_names_upstream_flags_once_and_no_others():
    assert sorted(NAMES) == sorted(set(NAMES))
    assert FATES.keys() - set(NAMES) == set()


def test_a_flag_that_is_here_is_never_dropped_or_refused_and_one_that_is_not_never_called_the_same():
    is_here = {name: f"--{name}" in field_of_spelling() for name in FATES}
    assert is_here == {name: not isinstance(fate, Accepted | Refused | Renamed) for name, fate in FATES.items()}


def test_the_page_of_the_docs_is_the_table():
    assert DOCS.read_text() == markdown_table()


@pytest.mark.parametrize("name", [name for name, fate in FATES.items() if isinstance(fate, Refused)])
def test_a_refused_flag_is_a_usage_error_with_what_to_do(name, capsys):
    fate = FATES[name]
    assert isinstance(fate, Refused)
    assert usage_error([f"--{name}", "1"], capsys) == f"error: --{name} {fate.why}. {fate.remedy}"


@pytest.mark.parametrize("name", [name for name, fate in FATES.items() if isinstance(fate, Accepted)])
def test_an_accepted_flag_is_dropped_with_one_warning_in_either_spelling(name, capsys):
    fate = FATES[name]
    assert isinstance(fate, Accepted)
    value = (fate.only or ("3",))[-1]
    flag = f"--{name.replace('_', '-')}"
    tokens = [[flag, value], [f"{flag}={value}"]] if fate.takes_value else [[flag]]
    for given in tokens:
        assert parse_config([*given, *REQUIRED]) == parse_config(REQUIRED)
        assert capsys.readouterr().err == f"warning: --{name} has no effect: {fate.why}.\n"


def test_a_renamed_flag_is_replaced_with_one_warning(capsys):
    assert parse_config([*REQUIRED, "--packing_samples"]).model.packing == "packed"
    assert capsys.readouterr().err == "warning: --packing_samples is --packing packed here.\n"


def test_a_renamed_flag_with_a_value_hands_it_to_each_flag_that_stands_for_it(capsys):
    config = parse_config([*REQUIRED, "--images_key", "pictures", "--max_pixels=282240"])
    assert config.data.image_key == "pictures"
    assert (config.data.image_max_pixels, config.data.video_max_pixels) == (282240, 282240)
    assert capsys.readouterr().err == (
        "warning: --images_key is --image_key here.\n"
        "warning: --max_pixels is --image_max_pixels --video_max_pixels here.\n"
    )


def test_a_value_that_asks_for_something_is_refused_where_upstreams_own_is_not(capsys):
    assert usage_error(["--sp_size", "2"], capsys) == "error: --sp_size must be 1: '2' is not supported yet. Drop it."


def test_all_refusals_are_said_at_once(capsys):
    error = usage_error(["--max_len", "3", "--flash_attn", "--enable_ema"], capsys)
    assert "--max_len would override two limits" in error and "--enable_ema is not supported yet" in error


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--flash_attn", "False"], "--flash_attn takes no value: --flash_attn False. Drop the value."),
        (["--packing_samples=1"], "--packing_samples takes no value: --packing_samples 1. Drop the value."),
        (["--plot_every"], "--plot_every takes one value: --plot_every. Give it one, or drop the flag."),
    ],
)
def test_a_dropped_flag_still_has_its_own_number_of_values(tokens, message, capsys):
    """CLI-01"""
    assert usage_error(tokens, capsys) == f"error: {message}"


def test_a_login_on_the_command_line_is_left_out_and_an_empty_one_means_none():
    key = translate(["--use_wandb", "KEY-OF-A-PERSON", "--seed", "1"])
    assert key.tokens == ["--use_wandb", "--seed", "1"]
    assert "KEY-OF-A-PERSON" not in key.warnings[0] and "wandb login" in key.warnings[0]
    assert translate(["--use_wandb", ""]).tokens == []
    assert translate(["--use_wandb", "False"]).tokens == ["--use_wandb", "False"]


def test_only_rank_0_warns(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse_config([*REQUIRED, "--flash_attn"])
    assert capsys.readouterr().err == ""


def test_values_that_look_like_flags_of_upstream_stay_where_they_are():
    tokens = ["--system_prompt", "use flash_attn", "--stop", "-5", "--", "--seed=1"]
    assert translate(tokens).tokens == tokens
