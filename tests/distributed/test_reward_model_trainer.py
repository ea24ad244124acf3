"""Training of a reward model on two real ranks."""

import contextlib
import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import StrategyConfig
from lightrft.config.preference import ClassifierConfig, PairDataConfig, RewardModelConfig
from lightrft.models.reward_model import load_classifier
from lightrft.trainer import build_reward_model_trainer
from lightrft.trainer.reward_model_setup import check_pair_inputs
from lightrft.trainer.reward_model_trainer import RewardModelTrainer
from tests import tiny_models
from tests.distributed.runs import BACKENDS

NUM_PAIRS = 7
STEPS = 3
RATE = 1e-2


def rows(count: int = NUM_PAIRS) -> list[dict[str, Any]]:
    """Sums with a right and a wrong answer; every other pair has a margin, and no two are of the same length."""
    made = []
    for i in range(count):
        prompt = "+".join("1" * (1 + i % 4)) + "="
        made.append({"prompt": prompt, "chosen": str(1 + i % 4), "rejected": "9" * (1 + i % 3)})
        made[-1] |= {"margin": 0.5} if i % 2 else {}
    return made


def write(path: Path, values: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> RewardModelConfig:
    """All pairs are one batch; with a micro-batch of one pair, the ranks have 4 and 3 forwards' worth of pairs."""
    pairs = write(tmp_path / "pairs.jsonl", rows())
    base = RewardModelConfig(
        ClassifierConfig(tiny_models.save_model(tmp_path / "base")),
        PairDataConfig(pairs, eval_data=pairs, max_len=32),
        strategy=StrategyConfig(fsdp=True, dist_timeout_seconds=60.0),
    )
    return changed(
        base,
        optimizer={"learning_rate": RATE, "lr_scheduler": "constant", "lr_warmup_steps": 0},
        train={
            "train_batch_size": NUM_PAIRS,
            "micro_train_batch_size": 1,
            "num_epochs": STEPS,
            "save_path": str(tmp_path / "run"),
        },
    )


def changed(config: RewardModelConfig, **owners: dict[str, Any]) -> RewardModelConfig:
    return replace(config, **{owner: replace(getattr(config, owner), **values) for owner, values in owners.items()})


def run(config: RewardModelConfig, stop_after: int = 0) -> int:
    """Exit code of a run, in which rank 1 gets a signal during that step."""
    trainer = build_reward_model_trainer(config)
    train_step = trainer.train_step

    def signalled(pairs):
        if trainer.step + 1 == stop_after and trainer.strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(pairs)

    trainer.train_step = signalled
    try:
        trainer.fit()
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code
    return 0


def logged(config: RewardModelConfig) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as log:
        run(config)
    return log.getvalue()


def lines(config: RewardModelConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.train.save_path) / "metrics.jsonl").read_text().splitlines()]


def weights(config: RewardModelConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.train.save_path) / "model/model.safetensors")


def plain_training(config: RewardModelConfig) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, losses and norms of a loop without any of our code: one pair after the other, unpadded."""
    model = AutoModelForSequenceClassification.from_pretrained(
        config.model.pretrain, num_labels=1, dtype=torch.float32, attention_dropout=0.0
    )
    torch.nn.init.zeros_(model.score.weight)
    tokenizer = AutoTokenizer.from_pretrained(config.model.pretrain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for row in rows():
            texts = [row["prompt"] + row[answer] for answer in ("chosen", "rejected")]
            chosen, rejected = (
                model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0] for text in texts
            )
            total = total - F.logsigmoid(chosen - rejected - row.get("margin", 0.0)) / NUM_PAIRS
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(total.item())
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, losses, norms


@pytest.mark.parametrize(
    ("backend", "packing"), [*((backend, "padded") for backend in BACKENDS), ("fsdp", "packed"), ("zero3", "packed")]
)
def test_two_ranks_train_as_a_plain_loop_does(two_ranks, config, backend, packing):
    """NUM-19, of pairs: the divisor is those of all ranks, whatever rank and forward each is in."""
    config = changed(config, strategy=BACKENDS[backend], model={"packing": packing})
    assert two_ranks.run(run, config, timeout=120) == [0, 0]
    expected, losses, norms = plain_training(config)
    assert [line["train/loss"] for line in lines(config)[1:]] == pytest.approx(losses, abs=1e-5)
    assert [line["train/grad_norm"] for line in lines(config)[1:]] == pytest.approx(norms, rel=1e-3)
    got = weights(config)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        # Adam divides by the gradient's size: rounding of the smallest ones shows.
        torch.testing.assert_close(tensor, expected[name], atol=2e-4, rtol=0)


def test_the_export_scores_as_the_trained_model_did_and_is_a_reward_model(two_ranks, config):
    two_ranks.run(run, config)
    folder = Path(config.train.save_path) / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    assert load_classifier(str(folder), "auto").hf_config.num_labels == 1

    def scores(answer: str) -> torch.Tensor:
        batch = tokenizer([row["prompt"] + row[answer] for row in rows()], padding=True, return_tensors="pt")
        with torch.no_grad():
            return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]

    margins = torch.tensor([row.get("margin", 0.0) for row in rows()])
    chosen, rejected = scores("chosen"), scores("rejected")
    last = lines(config)[-1]
    assert last["eval/loss"] == pytest.approx(-F.logsigmoid(chosen - rejected - margins).mean().item(), abs=1e-5)
    assert last["eval/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert last["eval/chosen_score"] == pytest.approx(chosen.mean().item(), abs=1e-5)


def test_a_new_head_is_right_half_of_the_time_and_the_summary_says_before_and_after(two_ranks, config):
    """All scores are 0: ties, and log 2 without a margin, log(1 + e^0.5) = 0.9741 with one, of 3 in 7 pairs."""
    two_ranks.run(run, config)
    summary = json.loads((Path(config.train.save_path) / "summary.json").read_text())
    assert (summary["steps"], summary["accuracy_before"]) == (STEPS, 0.5)
    assert summary["loss_before"] == pytest.approx((4 * 0.693147 + 3 * 0.974077) / 7, abs=1e-5)
    assert summary["accuracy_after"] == lines(config)[-1]["eval/accuracy"] > 0.8


def test_a_reward_model_is_trained_on_from_its_own_head(two_ranks, config, tmp_path):
    folder = tiny_models.save_classifier(tmp_path / "classifier")
    config = changed(config, model={"pretrain": folder}, optimizer={"learning_rate": 1e-9})
    two_ranks.run(run, config)
    torch.testing.assert_close(
        weights(config)["score.weight"], load_file(f"{folder}/model.safetensors")["score.weight"]
    )


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_a_stop_and_the_rest_equal_an_unbroken_run(two_ranks, config, tmp_path, backend):
    """CKPT-01, CKPT-03: order of the pairs, schedule and optimizer. 7 pairs in batches of 3 are 2 steps an epoch."""
    config = changed(
        config,
        strategy=BACKENDS[backend],
        optimizer={"lr_scheduler": "cosine", "lr_warmup_steps": 2},
        train={"train_batch_size": 3, "micro_train_batch_size": 2, "num_epochs": 2},
    )
    straight = changed(config, train={"save_path": str(tmp_path / "straight")})
    assert two_ranks.run(run, straight, timeout=120) == [0, 0]
    broken = changed(config, checkpoint={"ckpt_path": str(tmp_path / "ckpt"), "load_checkpoint": True})
    assert two_ranks.run(run, broken, 3, timeout=120) == [143, 143]
    assert [line["step"] for line in lines(broken)] == [0, 1, 2, 3]
    assert two_ranks.run(run, broken, timeout=120) == [0, 0]
    for line, wanted in zip(lines(broken), lines(straight), strict=True):
        learned = {name: value for name, value in wanted.items() if name.startswith(("train/", "eval/"))}
        assert {name: line[name] for name in learned} == pytest.approx(learned, abs=1e-6)
    for name, tensor in weights(broken).items():
        torch.testing.assert_close(tensor, weights(straight)[name], atol=1e-6, rtol=0)


def test_checkpoints_are_also_classifiers_and_the_best_is_kept(two_ranks, config, tmp_path):
    checkpoint = {"ckpt_path": str(tmp_path / "ckpt"), "save_steps": 1, "max_ckpt_num": 1, "save_hf_ckpt": True}
    config = changed(config, checkpoint=checkpoint, train={"eval_steps": 1})
    two_ranks.run(run, config)
    accuracy = {line["step"]: line["eval/accuracy"] for line in lines(config)[1:]}
    best = max(accuracy, key=lambda step: (accuracy[step], step))
    names = {f"step_{step:08d}" for step in (best, STEPS)}
    assert {folder.name for folder in (tmp_path / "ckpt").iterdir()} == names
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "ckpt" / f"step_{STEPS:08d}" / "hf")


def test_a_checkpoint_of_another_model_is_refused(two_ranks, config, tmp_path):
    config = changed(config, checkpoint={"ckpt_path": str(tmp_path / "ckpt")})
    two_ranks.run(run, config)
    other = tiny_models.save_model(tmp_path / "other", tiny_models.qwen2(intermediate_size=96))
    config = changed(config, model={"pretrain": other}, checkpoint={"load_checkpoint": True})
    with pytest.raises(ValueError, match="a run goes on with the models of its checkpoint"):
        check_pair_inputs(config)


def test_a_bf16_run_learns_and_writes_bf16(two_ranks, config):
    """The loss falls in bf16 as well."""
    config = changed(config, model={"bf16": True}, optimizer={"learning_rate": 3e-3}, train={"num_epochs": 8})
    two_ranks.run(run, config)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights(config).values())
    assert lines(config)[-1]["eval/loss"] < lines(config)[0]["eval/loss"] - 0.1


def test_offloading_changes_no_number(two_ranks, config, tmp_path):
    two_ranks.run(run, config)
    strategy = {"fsdp_cpu_offload": True}
    moved = changed(config, strategy=strategy, train={"save_path": str(tmp_path / "moved")})
    two_ranks.run(run, moved)
    for name, tensor in weights(moved).items():
        torch.testing.assert_close(tensor, weights(config)[name], atol=1e-6, rtol=0)


def different_pairs(config: RewardModelConfig) -> None:
    if os.environ["RANK"] == "1":
        path = Path(config.data.train_data).with_name("other.jsonl")
        config = changed(config, data={"train_data": write(path, rows(NUM_PAIRS + 1)[1:])})
    RewardModelTrainer(config)


def test_ranks_with_different_pairs_are_refused(two_ranks, config):
    with pytest.raises(ValueError, match="the same pairs in the same order: rank 1 and rank 0 differ"):
        two_ranks.run(different_pairs, config)


def test_equal_answers_are_counted_in_the_log(two_ranks, config, tmp_path):
    same = {"prompt": "1=", "chosen": "1", "rejected": "1"}
    config = changed(config, data={"train_data": write(tmp_path / "equal.jsonl", [*rows(), same])})
    log, _ = two_ranks.run(logged, config)
    assert "1 of 8 rows of" in log and "left out: both answers are the same" in log


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ({"train": {"train_batch_size": 8}}, "A data set must fill a batch: 7 pairs < train_batch_size=8."),
        ({"data": {"max_len": 65}}, "max_len=65, context 64. Lower --max_len to 64."),
        ({"data": {"chosen_key": "better"}}, "no key 'better'"),
        ({"model": {"pretrain": "/absent"}}, "the model folder must exist"),
        ({"data": {"apply_chat_template": True}}, "apply_chat_template needs a tokenizer with a chat template"),
    ],
)
def test_a_mistake_is_named_before_the_model_is_loaded(config, owners, message):
    with pytest.raises(ValueError) as error:
        check_pair_inputs(changed(config, **owners))
    assert message in str(error.value)
