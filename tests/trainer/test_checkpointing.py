from dataclasses import replace

import pytest

from lightrft.config import CheckpointConfig
from lightrft.trainer.checkpointing import (
    TrainingState,
    changed_flags,
    checkpoint_root,
    data_identity,
    flags_of,
    kept_steps,
    model_card,
    saves_checkpoints,
    scores_of,
)
from lightrft.types import PromptExample
from tests.distributed.runs import config


def by_reward(**rewards: float) -> dict[int, dict[str, float]]:
    return {int(step.removeprefix("s")): {"reward/mean": value} for step, value in rewards.items()}


def test_the_newest_and_the_best_are_kept():
    """CKPT-04: keep 2 of the steps 8 to 11, of which 8 is the best."""
    scores = by_reward(s8=0.9, s9=0.1, s10=0.2, s11=0.3)
    assert kept_steps(scores, 2) == {8, 10, 11}
    assert kept_steps(dict(reversed(scores.items())), 2) == {8, 10, 11}


def test_the_best_may_be_among_the_newest():
    assert kept_steps(by_reward(s9=0.1, s10=0.5, s11=0.3), 2) == {10, 11}


def test_of_two_that_are_equally_good_the_later_is_kept():
    assert kept_steps(by_reward(s1=0.5, s2=0.5, s3=0.1, s4=0.1), 1) == {2, 4}


def test_a_score_of_the_evaluation_comes_before_all_of_the_training():
    scores = by_reward(s1=0.9, s2=0.8, s3=0.1)
    assert kept_steps(scores | {2: {"eval/mean": 0.3, "reward/mean": 0.8}}, 1) == {2, 3}


def test_checkpoints_without_a_score_are_kept_by_their_step_alone():
    assert kept_steps({1: {}, 2: {}, 3: {}}, 2) == {2, 3}
    assert scores_of({"reward/std": 1.0}) == {}


def test_where_and_whether_checkpoints_are_saved():
    def with_options(**options):
        return replace(config(train={"save_path": "runs/a"}), checkpoint=CheckpointConfig(**options))

    assert str(checkpoint_root(with_options())) == "runs/a/checkpoints"
    assert str(checkpoint_root(with_options(ckpt_path="disk/b"))) == "disk/b"
    assert not saves_checkpoints(with_options(load_checkpoint=True))
    assert saves_checkpoints(with_options(save_steps=1)) and saves_checkpoints(with_options(ckpt_path="disk/b"))


def prompts(*texts: str) -> list[PromptExample]:
    return [PromptExample(row=row, prompt=t, prompt_ids=[1]) for row, t in enumerate(texts)]


def test_other_prompts_and_another_order_are_other_data():
    """CKPT-01"""
    known = data_identity(prompts("a", "b"), 1, "drop")
    assert data_identity(prompts("a", "b"), 1, "drop") == known
    others = [(prompts("a", "c"), 1, "drop"), (prompts("a"), 1, "drop"), (prompts("a", "b"), 2, "drop")]
    assert known not in {data_identity(*other) for other in others}


def test_changed_flags_are_named_with_both_values():
    state = TrainingState(
        1, 6, 0.0, 0.0, {}, "", scores={}, before={}, after={}, best={}, flags=flags_of(config(train={"seed": 1}))
    )
    now = replace(config(train={"seed": 2}), checkpoint=CheckpointConfig(load_checkpoint=True))
    assert changed_flags(state, now) == ["seed: 1 -> 2"]


@pytest.mark.parametrize("base", ["models/tiny", 'C: "odd" name'])
def test_a_model_card_names_base_steps_and_flags_in_valid_yaml(base):
    """CKPT-06"""
    import yaml

    card = model_card(base, 12, flags_of(config(rollout={"stop": ("</answer>", 'say "x"')})))
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["base_model"] == base
    flags = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert flags["stop"] == ["</answer>", 'say "x"'] and flags["adam_betas"] == [0.9, 0.95]
    assert "after 12 steps" in text
