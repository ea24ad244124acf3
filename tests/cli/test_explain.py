import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from transformers import Qwen2Config

from lightrft.cli.explain import algorithms, main, split_world_size
from lightrft.cli.explanation import Line, explain
from lightrft.cli.words import size
from lightrft.config import Config, dump_yaml, parse_config
from lightrft.config.arguments import ADVANTAGE_NAMES, POLICY_LOSS_NAMES, KLEstimator, RolloutCorrection
from lightrft.config.flags import flag_values
from tests import tiny_models
from tests.distributed.runs import save_task

FLAGS = {
    "rollout_batch_size": 6,
    "n_samples_per_prompt": 4,
    "train_batch_size": 12,
    "micro_train_batch_size": 2,
    "max_epochs": 3,
    "prompt_max_len": 8,
    "generate_max_len": 6,
    "num_episodes": 5,
    "fsdp": True,
    "advantage_estimator": "group_norm",
    "lr_warmup_ratio": 0.1,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    save_task(folder)
    return folder


@pytest.fixture
def path(task, tmp_path) -> str:
    """A configuration file: 12 prompts, 6 of them and 24 responses a step."""
    files = {"pretrain": f"{task}/model", "prompt_data": f"{task}/prompts.jsonl", "save_path": f"{tmp_path}/run"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(FLAGS | files))
    return str(tmp_path / "run.yaml")


def config(path: str, *flags: str) -> Config:
    return parse_config(["--config", path, *flags])


def sections(config: Config) -> list[dict[str, Line]]:
    """The step, the run and the roles on two ranks."""
    return [{line.name: line for line in section} for section in list(explain(config, 2).sections.values())[:3]]


def test_a_step_is_explained_in_the_trainers_numbers(path):
    """6 prompts x 4 = 24 responses of 8 + 6 tokens; 24 / 12 = 2 updates an epoch; 12 / 2 ranks / 2 = 3 forwards."""
    step, _, _ = sections(config(path))
    assert step["prompts"] == Line("prompts", "6", "--rollout_batch_size; 3 on each rank")
    assert step["responses"].value == "24"
    assert step["tokens at most"].value == "336"
    assert step["rollout groups"].value == "2"
    assert step["micro-batches"].value == "about 3"
    assert "at most 28 tokens in one forward" in step["micro-batches"].meaning
    assert step["policy ratios"].value == "1, then not"
    assert step["optimizer steps"] == Line(
        "optimizer steps", "6", "--max_epochs 3 x 2 of 12 responses (--train_batch_size)"
    )


def test_one_update_a_step_is_on_policy_and_a_smaller_last_one_is_named(path):
    once, _, _ = sections(config(path, "--train_batch_size", "24", "--max_epochs", "1"))
    assert (once["optimizer steps"].value, once["policy ratios"].value) == ("1", "1")
    ragged, _, _ = sections(config(path, "--train_batch_size", "20"))
    assert ragged["optimizer steps"].meaning.endswith("2 of 20 responses (--train_batch_size), the last of 4")
    by_tokens, _, _ = sections(config(path, "--max_tokens_per_micro_batch", "100"))
    assert "at most 100 tokens" in by_tokens["micro-batches"].meaning


def test_the_run_is_explained_from_its_data(path):
    """12 prompts / 6 = 2 steps x 5 episodes = 10; x 3 epochs x 2 updates = 60; a tenth of them warms up."""
    _, run, _ = sections(config(path))
    assert (run["steps in an episode"].value, run["steps"].value) == ("2", "10")
    assert (run["optimizer steps"].value, run["actor warm-up"].value) == ("60", "6")
    _, stopped, _ = sections(config(path, "--max_steps", "4", "--lr_warmup_steps", "9"))
    assert (stopped["optimizer steps"].value, stopped["actor warm-up"].value) == ("24", "9")
    _, frozen, _ = sections(config(path, "--advantage_estimator", "gae", "--freezing_actor_steps", "4"))
    assert (frozen["optimizer steps"].value, frozen["critic warm-up"].value) == ("36", "6")


def test_the_numbers_are_those_of_a_run(two_ranks, path):
    """The trainer that the same configuration makes has as many steps, updates and parameters."""
    built = two_ranks.run(built_numbers, config(path, "--advantage_estimator", "gae"))[0]
    _, run, roles = sections(config(path, "--advantage_estimator", "gae"))
    assert run["steps"].value == str(built["steps"])
    assert [roles[role].value for role in ("actor", "initial_model", "critic")] == [
        f"{built[role] / 1e6:.2f} M" for role in ("actor", "initial_model", "critic")
    ]


def built_numbers(config: Config) -> dict[str, int]:
    from lightrft.trainer import build_trainer

    trainer = build_trainer(config)
    roles = trainer.experience_maker.roles
    models = {"actor": roles.actor, "initial_model": roles.initial_model, "critic": roles.critic}
    numbers = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    trainer.writer.close()
    trainer.strategy.close()
    return numbers | {"steps": trainer.num_steps}


@pytest.mark.parametrize(
    ("flags", "reference", "critic"),
    [
        (["--init_kl_coef", "0"], "none", "none"),
        (["--init_kl_coef", "0.1"], "0.02 M", "none"),
        (["--init_kl_coef", "0", "--advantage_estimator", "gae"], "none", "0.02 M"),
    ],
)
def test_roles_are_loaded_only_where_a_flag_needs_them(path, flags, reference, critic):
    _, _, roles = sections(config(path, *flags))
    assert (roles["initial_model"].value, roles["critic"].value) == (reference, critic)


def test_bytes_are_those_of_the_stored_dtypes_over_the_ranks(path):
    """P parameters on 2 ranks: 16 P / 2 bytes learn; frozen 4 P / 2, or 2 P / 2 in bf16; the engine's are whole."""
    count = sum(p.numel() for p in tiny_models.random_model(tiny_models.qwen2()).parameters())
    for flags, frozen_bytes in (([], 4), (["--bf16"], 2)):
        _, _, roles = sections(config(path, *flags))
        assert f": {size(count * 16 / 2)} a rank" in roles["actor"].meaning
        assert f"; {size(count * frozen_bytes / 2)} a rank in " in roles["initial_model"].meaning
        assert roles["engine"].meaning.startswith(f"{size(count * frozen_bytes)} a rank in ")


def test_a_teacher_behind_a_server_takes_no_memory_here(path):
    role = sections(config(path, "--teacher_url", "http://a:8000", "--teacher_api", "sglang"))[2]["teacher"]
    assert role == Line("teacher", "behind a server", "http://a:8000 (sglang)")


def test_rewards_that_servers_give_are_shown(path):
    flags = ["--remote_rm_url", "http://a:1/x,http://b:1/x", "--judge_url", "http://c", "--judge_model", "m"]
    roles = sections(config(path, *flags))[2]
    asked = "http://a:1/x,http://b:1/x: 8 responses a request (--remote_rm_batch_size)"
    assert roles["reward remote_rm"] == Line("reward remote_rm", "behind a server", asked)
    assert roles["reward judge"] == Line("reward judge", "behind a server", "m at http://c")


def test_reward_models_are_sized_and_have_a_phase(path, tmp_path):
    """A trunk as the actor's, and a head of 32 weights: 19,328 x 4 bytes over two ranks."""
    folder = tiny_models.save_classifier(tmp_path / "rm")
    run = config(path, "--reward_pretrain", f'{{"helpful": "{folder}"}}', "--reward_residency", "one")
    role = sections(run)[2]["reward helpful"]
    assert role.value == "0.02 M"
    assert "37.8 KiB a rank in float32, on the device while they score, one at a time" in role.meaning
    *_, peaks = explain(run, 2).sections.values()
    assert "reward" in [line.name for line in peaks]


def test_an_adapter_learns_beside_a_frozen_actor_that_is_its_own_reference(path):
    """Rank 2: 2 x (in + out), for q and o 32 + 32, k and v 32 + 16, three more 32 + 64, in two blocks: 2,048."""
    _, _, roles = sections(config(path, "--lora_rank", "2", "--bf16"))
    count = sum(p.numel() for p in tiny_models.random_model(tiny_models.qwen2()).parameters())
    assert roles["actor"].meaning == f"frozen beside its adapter; {size(count * 2 / 2)} a rank in bfloat16"
    assert roles["adapter"].value == "2,048"
    assert f": {size(2048 * 16 / 2)} a rank" in roles["adapter"].meaning
    assert roles["initial_model"].value == "0"


def test_each_phase_of_the_step_has_its_peak_by_owner_and_the_flags_that_lower_it(path):
    lines = {line.name: line for line in [*explain(config(path), 2).sections.values()][3]}
    assert list(lines) == ["generate", "actor", "reference", "train", "sync"]
    count = sum(p.numel() for p in tiny_models.random_model(tiny_models.qwen2()).parameters())
    assert "other 600.0 MiB" in lines["train"].meaning
    assert float(lines["train"].value.split()[0]) * 2**20 >= 600 * 2**20 + count * 16 / 2


def test_a_model_is_sized_without_its_weights(path, tmp_path):
    """What a folder with a configuration and no weights says: 0.5 billion parameters, with tied embeddings."""
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    large = Qwen2Config(**shape, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
    large.architectures = ["Qwen2ForCausalLM"]
    large.save_pretrained(tmp_path / "large")
    tiny_models.tokenizer().save_pretrained(tmp_path / "large")
    _, _, roles = sections(config(path, "--pretrain", str(tmp_path / "large")))
    assert roles["actor"].value == "494.03 M"


def test_what_does_not_divide_is_said_in_the_words_of_the_check(path):
    """CLI-02: the neighbours of 256 that 7 x 2 divides."""
    problems = explain(config(path, "--train_batch_size", "256"), 7).problems
    assert "256, 2 x 7 ranks = 14. Set --train_batch_size to 252 or 266." in problems[0]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--zero_stage", "3"], "zero_stage is a setting of DeepSpeed"),
        (["--prompt_data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--pretrain", "./nowhere"], "the model folder must exist"),
        (["--generate_max_len", "100"], "prompt and response must fit into the model's context"),
        (["--rollout_batch_size", "60"], "12 prompts < rollout_batch_size=60"),
    ],
)
def test_whatever_would_be_refused_is_among_the_problems_and_the_rest_still_explained(path, flags, problem, capsys):
    assert main([path, *flags, "--world_size", "2"]) == 1
    shown = capsys.readouterr().out
    assert "This would be refused:" in shown and problem in shown
    assert "optimizer steps" in shown and "initial_model" in shown


def test_what_other_files_of_a_run_lack_would_be_refused_too(path, tmp_path):
    """Functions, texts and a teacher are looked at as a run looks at them."""
    (tmp_path / "mine.py").write_text("def two(inputs, other): ...\ndef answer(answer): ...")
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1=2"}')
    for name, value, problem in [
        ("reward_fn", f"{tmp_path}/mine.py:answer", "first parameter must be response or responses"),
        ("reward_recipe", "{'*': {gone: 1}}", "reward_recipe must name known components: gone is none of exact_match"),
        ("advantage_estimator", f"{tmp_path}/mine.py:two", "advantage_estimator must name a function of one argument"),
        ("policy_loss", f"{tmp_path}/mine.py:gone", "has no gone. Its functions: two, answer."),
        ("pretrain_data", f"{tmp_path}/texts.jsonl", "texts.jsonl, row 0 (line 1)"),
        ("teacher_pretrain", "./nowhere", "the model folder must exist: ./nowhere"),
        ("reward_pretrain", '{"a": "./nowhere"}', "reward_pretrain a: the model folder must exist: ./nowhere"),
        ("reward_pretrain", '{"a": ', "must be a folder or a JSON object"),
    ]:
        (found,) = explain(config(path, f"--{name}", value), 2).problems
        assert problem in found


def test_a_value_that_is_wrong_alone_is_said_without_numbers(path, capsys):
    assert main([path, "--train_batch_size", "0"]) == 1
    assert "train_batch_size must be at least 1" in capsys.readouterr().out


def test_the_table_fits_into_80_columns_and_nothing_is_written(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([path, "--world_size", "2"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert {line.index("--") for line in shown.splitlines() if re.match(r"  \w.*\d +--", line)} == {36}
    assert shown.endswith("Nothing keeps this from starting.\n")
    assert not (tmp_path / "run").exists()


def test_the_world_size_is_a_flag_or_the_environments_or_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert split_world_size(["--seed", "1"]) == (["--seed", "1"], 1)
    assert split_world_size(["--world_size", "4", "--seed", "1"]) == (["--seed", "1"], 4)
    assert split_world_size(["--seed", "1", "--world-size=4"]) == (["--seed", "1"], 4)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert split_world_size([]) == ([], 8)


@pytest.mark.parametrize("tokens", [["--world_size"], ["--world_size", "0"], ["--world_size=2", "--world_size=3"]])
def test_a_world_size_that_is_none_is_a_usage_error(path, tokens, capsys):
    with pytest.raises(SystemExit) as stop:
        main([path, *tokens])
    assert stop.value.code == 2
    assert "--world_size must be a number of ranks, given once" in capsys.readouterr().err


def test_the_world_size_may_come_before_the_file(path, capsys):
    assert main(["--world_size", "2", path]) == 0
    assert "A step on 2 ranks" in capsys.readouterr().out


def test_every_algorithm_is_listed_with_formula_and_source():
    listed = {title: [name for name, _ in entries if name] for title, entries in algorithms().items()}
    assert listed == {
        "--advantage_estimator": list(ADVANTAGE_NAMES),
        "--kl_estimator": list(get_args(KLEstimator)),
        "--policy_loss": list(POLICY_LOSS_NAMES),
        "--rollout_correction": [name for name in get_args(RolloutCorrection) if name != "none"],
    }
    texts = [text for entries in algorithms().values() for _, text in entries]
    assert "r - 1 - log r, with r = pi_ref / pi" in texts
    assert 'J. Schulman, "Approximating KL Divergence" (2020), estimator k3.' in texts


def test_the_saved_configuration_of_a_run_explains_it(path, tmp_path):
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_yaml(config(path)))
    command = [sys.executable, "-m", "lightrft.cli.main", "explain", str(saved), "--world_size", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert flag_values(config(str(saved))) == flag_values(config(path))
