"""The GSM8K example: its prompts, and that its script's flags are flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gsm8k_geo3k.data_preprocess.gsm8k import INSTRUCTION, main, prompt_row
from lightrft.config import Config, check_config, parse_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_geo3k"
BOXED = "\\boxed{number}"
ANSWER = "He has 3*400=<<3*400=1200>>1200.\nThat is 1200+34=<<1200+34=1234>>1234.\n#### 1,234"


def test_a_row_of_gsm8k_becomes_messages_a_number_and_its_solution():
    assert prompt_row("How many? ", ANSWER) == {
        "prompt": [{"role": "user", "content": f"How many?\n\n{INSTRUCTION.format(BOXED)}"}],
        "label": "1234",
        "reference": "He has 3*400=1200.\nThat is 1200+34=1234.",
        "completion": "He has 3*400=1200.\nThat is 1200+34=1234.\n\\boxed{1234}",
    }


def test_a_prompt_that_asks_for_hashes_has_a_worked_answer_that_ends_in_them():
    row = prompt_row("How many?", ANSWER, "hashes")
    assert row["prompt"][0]["content"].endswith("and end with the answer alone, as #### number.")
    assert row["completion"].endswith("That is 1200+34=1234.\n#### 1234")


@pytest.mark.parametrize("number", ["-5", "0.25", "1,234,567"])
def test_the_label_is_what_stands_behind_the_marks(number):
    assert prompt_row("?", f"So.\n#### {number}")["label"] == number.replace(",", "")


def test_both_splits_are_written_and_a_wrong_row_is_named(tmp_path, capsys):
    row = {"question": "1+1?", "answer": "2\n#### 2"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    main(str(tmp_path), tmp_path / "out")
    for split in ("train", "test"):
        (written,) = (tmp_path / "out" / f"{split}.jsonl").read_text().splitlines()
        assert json.loads(written)["label"] == "2"
    (tmp_path / "test.jsonl").write_text(json.dumps(row | {"answer": "2"}))
    with pytest.raises(SystemExit):
        main(str(tmp_path), tmp_path / "out")
    assert f"error: {tmp_path}/test.jsonl, row 0 (line 1) is no row of GSM8K: " in capsys.readouterr().err


def script_config(tmp_path: Path, *flags: str) -> Config:
    """What the run script hands to train_colocate.py, seen by a `torchrun` that writes its arguments down."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(tmp_path), "SAVE_PATH": str(tmp_path / "r")}
    script = EXAMPLE / "run_grpo_gsm8k_0.5b.sh"
    ended = subprocess.run([script, *flags], env=environment, capture_output=True, text=True, timeout=30, check=True)
    arguments = json.loads(ended.stdout)
    program = arguments.index("examples/gsm8k_geo3k/train_colocate.py")
    assert arguments[:2] == ["--nproc_per_node", "8"]
    return parse_config(arguments[program + 1 :])


def test_the_run_script_has_the_values_of_upstreams_and_fits_eight_gpus(tmp_path, capsys):
    """128 questions x 5 answers, 8 ranks with 4 answers each: 128 / (8 x 4) = 4 micro-batches a rank."""
    config = script_config(tmp_path, "--max_steps", "2")
    check_config(config, 8)
    assert "warning" not in capsys.readouterr().err
    rollout, algorithm, train = config.rollout, config.algorithm, config.train
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.generate_max_len) == (128, 5, 2048)
    assert (rollout.engine_tp_size, rollout.engine_mem_util) == (2, 0.6)
    assert (train.train_batch_size, train.micro_train_batch_size, train.num_episodes, train.max_steps) == (
        128,
        4,
        30,
        2,
    )
    assert (algorithm.advantage_estimator, algorithm.kl_estimator, algorithm.init_kl_coef) == ("group_norm", "k3", 0.01)
    assert (config.optimizer.actor_learning_rate, config.optimizer.l2, config.optimizer.lr_warmup_ratio) == (
        1e-6,
        0.01,
        0.03,
    )
    assert (config.data.prompt_max_len, config.data.max_eval_samples) == (1024, 1319)
    assert algorithm.use_kl_loss and config.strategy.fsdp and config.strategy.adam_offload and config.model.bf16
