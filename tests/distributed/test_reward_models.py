"""Local reward models on two real ranks."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import Config
from lightrft.models.collate import collate
from lightrft.models.reward_model import RewardModel, load_classifier
from lightrft.rewards.records import Grade
from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy
from lightrft.trainer import SPMDPPOTrainer
from lightrft.trainer.local_rewards import LocalRewardModels, load_reward_models
from lightrft.types import Experience
from tests import reward_folders, tiny_models
from tests.distributed.runs import BACKENDS, config, ledger_peaks, make_config, read, strategy_on
from tests.tiny_models import random_samples


def scores_of(backend, folder, layout, trainable):
    """Of each rank's own samples."""
    samples = rank_samples()
    with strategy_on(backend, folder) as strategy:
        loaded = load_classifier(folder, layout)
        model = strategy.prepare_model(loaded, "classifier", RewardModel, trainable)
        if trainable:
            model = strategy.prepare_optimizer("reward_model", model, 1e-3, 10).model
        strategy.reload_model(model)
        with torch.no_grad():
            return model(collate(samples[strategy.rank], layout))


def rank_samples():
    samples = random_samples(7)
    return [samples[:4], samples[4:]]


@pytest.mark.parametrize(("layout", "trainable"), [("packed", False), ("padded", False), ("packed", True)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sharded_scores_equal_those_of_transformers(two_ranks, tmp_path, backend, layout, trainable):
    folder = tiny_models.save_classifier(tmp_path)
    whole = AutoModelForSequenceClassification.from_pretrained(folder)
    got = two_ranks.run(scores_of, backend, folder, layout, trainable)
    for samples, scores in zip(rank_samples(), got, strict=True):
        expected = [whole(input_ids=one.input_ids[None]).logits.detach()[0, 0] for one in samples]
        torch.testing.assert_close(scores, torch.stack(expected), atol=1e-5, rtol=0)


# LocalRewardModels


def sample(row: int, prompt: str, response: str, messages: list[dict[str, str]] | None = None) -> Experience:
    made = tiny_models.sample([5], [6], group=row)
    example = replace(made.example, prompt=prompt, messages=messages)
    return replace(made, example=example, response=response)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def folders(tmp_path) -> str:
    """Two models with a template, and one without; as the flag names them."""
    templates = {"helpful": reward_folders.TEMPLATE, "safe": reward_folders.TEMPLATE, "plain": None}
    saved = {
        name: reward_folders.save(tmp_path / name, seed, template)
        for seed, (name, template) in enumerate(templates.items())
    }
    return json.dumps(saved)


SAMPLES = [sample(0, "A1+1=", "2", user("1+1=")), sample(1, "A3+4=", "17", user("3+4=")), sample(2, "5+5=", "10")]
TEXTS = {
    # A text of the actor's template stands where the model has none, and a plain prompt is read as it is.
    "helpful": ["a1+1=cb2c", "a3+4=cb17c", "5+5=10"],
    "plain": ["A1+1=2", "A3+4=17", "5+5=10"],
}
ROWS = {"helpful": [0, 1, 2], "plain": [2, 0]}


def grades_of(backend: str, pretrain: str, packing: str) -> dict[str, list[Grade]]:
    """Rank 0 has three rows for one model and two for another; rank 1 has none, and nobody has any for the third."""
    with strategy_on(backend, model={"packing": packing}, reward={"reward_pretrain": pretrain}) as strategy:
        models = LocalRewardModels(strategy.config, strategy, load_reward_models(strategy.config))
        return models.grade(SAMPLES, ROWS) if strategy.rank == 0 else models.grade([], {})


@pytest.mark.parametrize(("backend", "packing"), [(b, "packed") for b in BACKENDS] + [("fsdp", "padded")])
def test_grades_are_scores_of_the_models_own_text_and_tokens(two_ranks, folders, backend, packing):
    """A rank without rows takes part in the forwards."""
    of_rank_0, of_rank_1 = two_ranks.run(grades_of, backend, folders, packing)
    assert of_rank_1 == {"helpful": [], "safe": [], "plain": []}
    assert of_rank_0["safe"] == []
    for name, rows in ROWS.items():
        folder = json.loads(folders)[name]
        whole = AutoModelForSequenceClassification.from_pretrained(folder)
        words = AutoTokenizer.from_pretrained(folder)
        ids = [words(TEXTS[name][i], return_tensors="pt")["input_ids"] for i in rows]
        assert all(one[0, 0] == 0 and (one[0, 1:] != 0).all() for one in ids), "DATA-01: one BOS"
        expected = [whole(input_ids=one).logits.item() for one in ids]
        assert [grade.fault for grade in of_rank_0[name]] == [None] * len(rows)
        assert [grade.value for grade in of_rank_0[name]] == pytest.approx(expected, abs=1e-5)


class Recording(FSDPV2Strategy):
    """Notes which model comes and leaves."""

    names: dict[nn.Module, str]
    events: list[str]

    def offload_model(self, model: nn.Module) -> None:
        super().offload_model(model)
        if model in self.names:
            self.events.append(f"{self.names[model]} leaves")

    def reload_model(self, model: nn.Module) -> None:
        super().reload_model(model)
        self.events.append(f"{self.names[model]} comes")


def recorded(pretrain: str, residency: str, fails: bool) -> list[str]:
    settings = config(reward={"reward_pretrain": pretrain, "reward_residency": residency})
    strategy = Recording(settings)
    strategy.setup_distributed()
    strategy.names, strategy.events = {}, []
    models = LocalRewardModels(settings, strategy, load_reward_models(settings), strategy.events.append)
    strategy.names = {model: name for name, model in models.models.items()}

    def fail(*args: Any) -> None:
        raise RuntimeError("in a forward")

    rows = {name: [0] for name in models.names}
    if fails:
        handle = models.models["safe"].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in a forward"):
            models.grade(SAMPLES, rows)
        handle.remove()
        # The phase can be run again.
        events = list(strategy.events)
        assert all(grade.fault is None for grades in models.grade(SAMPLES, rows).values() for grade in grades)
    else:
        models.grade(SAMPLES, rows)
        events = strategy.events
    strategy.close()
    return events


COME = ["helpful comes", "safe comes", "plain comes"]
ONE_BY_ONE = [f"{name} {what}" for name in ("helpful", "safe", "plain") for what in ("comes", "scored", "leaves")]


def test_all_models_come_and_each_leaves_after_its_turn_or_one_comes_at_a_time(two_ranks, folders):
    """Spec section 5, and MEM-06: none is left."""
    leave = [f"{name} {what}" for name in ("helpful", "safe", "plain") for what in ("scored", "leaves")]
    assert two_ranks.run(recorded, folders, "all", False) == [COME + leave] * 2
    assert two_ranks.run(recorded, folders, "one", False) == [ONE_BY_ONE] * 2


@pytest.mark.parametrize("residency", ["all", "one"])
def test_an_exception_in_the_phase_leaves_no_model_on_the_device(two_ranks, folders, residency):
    """MEM-06"""
    start = ["helpful scored", "helpful leaves"]
    expected = {
        "all": [*COME, *start, "safe leaves", "plain leaves"],
        "one": [*ONE_BY_ONE[:4], "safe leaves"],
    }
    for events in two_ranks.run(recorded, folders, residency, True):
        assert sorted(events) == sorted(expected[residency])
        assert events[: len(events) - 2] == expected[residency][: len(events) - 2]


def faults_of(pretrain: str) -> dict[str, list[Grade]]:
    with strategy_on("fsdp", reward={"reward_pretrain": pretrain}) as strategy:
        models = LocalRewardModels(strategy.config, strategy, load_reward_models(strategy.config))
        samples = [
            sample(3, "1+1=", "2"),
            sample(4, "1+1=", "2" * 59),
            sample(5, "1+1=", "2" * 60),
            sample(6, "", "2", [{"role": "system", "content": "1"}]),
        ]
        return models.grade(samples, {name: [0, 1, 2, 3] for name in models.names})


def test_what_cannot_be_scored_is_an_error_and_the_others_are_scored(two_ranks, tmp_path):
    """No score is made up, for a text that does not fit or for a NaN. The reward engine names the rows."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}1"
    good = reward_folders.save(tmp_path / "good", 0, strict)
    broken = reward_folders.save(tmp_path / "broken", 0, None)
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["score.weight"].fill_(torch.nan)
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    for grades in two_ranks.run(faults_of, json.dumps({"good": good, "broken": broken})):
        fitting, longest, overlong, refused = grades["good"]
        assert fitting.value is not None and longest.value is not None
        # A BOS, 4 characters and 60: one more than the context of 64.
        assert overlong.fault is not None and overlong.value is None and overlong.fault.kind == "error"
        assert overlong.fault.message.startswith(
            "prompt and response must fit into its context: they have 65 of its tokens, and the context is 64."
        )
        assert refused.fault is not None
        assert refused.fault.message.startswith("the reward model's chat template must take the messages: no system")
        for grade in grades["broken"][:2]:
            assert grade.value is None and grade.fault is not None
            assert grade.fault.message.startswith("a score must be finite: got nan.")


def run(settings: Config) -> list[dict[str, Any]]:
    SPMDPPOTrainer(settings).fit()
    return read(settings, "samples.jsonl")


@pytest.mark.parametrize("strategy", [{"fsdp": True}, {"fsdp": False, "zero_stage": 3}], ids=["fsdp", "zero3"])
def test_a_run_adds_up_its_reward_models_and_a_function(two_ranks, task, tmp_path, folders, strategy):
    """Every score in samples.jsonl is that of transformers on the text alone; dynamic sampling asks in between."""
    settings = make_config(
        task,
        tmp_path / "run",
        reward={"reward_pretrain": folders, "reward_residency": "one"},
        rollout={"dynamic_sampling": True, "dynamic_sampling_tries": 2},
        report={"print_memory_ledger": True},
        strategy=strategy,
    )
    rows = two_ranks.run(run, settings)[0]
    assert len(rows) == 2 * 16
    for name, folder in json.loads(folders).items():
        whole = AutoModelForSequenceClassification.from_pretrained(folder)
        words = AutoTokenizer.from_pretrained(folder)
        ids = [words(row["prompt"] + row["response"], return_tensors="pt")["input_ids"] for row in rows]
        expected = [whole(input_ids=one).logits.item() for one in ids]
        assert [row[f"reward/{name}"] for row in rows] == pytest.approx(expected, abs=1e-5)
    for row in rows:
        parts = [row[f"reward/{name}"] for name in ("contains_answer", "helpful", "safe", "plain")]
        assert row["reward"] == pytest.approx(sum(parts), abs=1e-5)
    peak = ledger_peaks(read(settings, "metrics.jsonl")[-1], "reward")
    # A trunk of 19 tokens and a head: 19,328 + 32 weights of 4 bytes on two ranks, and rotary frequencies.
    assert peak["reward_helpful_weights"] == peak["reward_plain_weights"] == pytest.approx(2 * 19_360, rel=0.01)


def in_bf16(backend: str, pretrain: str) -> tuple[set[torch.dtype], list[Grade]]:
    with strategy_on(backend, model={"bf16": True}, reward={"reward_pretrain": pretrain}) as strategy:
        models = LocalRewardModels(strategy.config, strategy, load_reward_models(strategy.config))
        dtypes = {parameter.dtype for parameter in models.models["plain"].parameters()}
        return dtypes, models.grade(SAMPLES, {"plain": [0, 1, 2]})["plain"]


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_with_bf16_they_are_stored_in_it_as_the_reference_is(two_ranks, folders, backend):
    folder = json.loads(folders)["plain"]
    whole = AutoModelForSequenceClassification.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    expected = [whole(input_ids=words(text, return_tensors="pt")["input_ids"]).logits.item() for text in TEXTS["plain"]]
    for dtypes, grades in two_ranks.run(in_bf16, backend, folders):
        assert dtypes == {torch.bfloat16}
        values = [grade.value for grade in grades]
        assert values == pytest.approx(expected, rel=0.1, abs=0.1) and values != pytest.approx(expected, abs=1e-5)
