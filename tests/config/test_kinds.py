from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightrft.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    StrategyConfig,
    check_config,
)
from lightrft.config.kinds import kind_errors

CONFIG = Config(ModelConfig("model"), DataConfig("prompts.jsonl"))


def errors(**owners: object) -> list[str]:
    return list(kind_errors(replace(CONFIG, **owners)))


def test_every_default_is_of_its_flags_kind():
    assert errors() == []


@pytest.mark.parametrize(
    ("owner", "rule"),
    [
        (RolloutConfig(rollout_batch_size="4"), "rollout_batch_size must be a whole number: rollout_batch_size='4'"),
        (RolloutConfig(rollout_batch_size=4.0), "rollout_batch_size must be a whole number: rollout_batch_size=4.0"),
        (RolloutConfig(rollout_batch_size=True), "rollout_batch_size must be a whole number: rollout_batch_size=True"),
        (RolloutConfig(rollout_batch_size=None), "rollout_batch_size must be a whole number: rollout_batch_size=None"),
        (RolloutConfig(temperature="1"), "temperature must be a number: temperature='1'"),
        (RolloutConfig(engine_type="hf"), "engine_type must be torch, vllm or sglang: engine_type='hf'"),
        (RolloutConfig(engine_sleep_level=True), "engine_sleep_level must be 1, 2 or None: engine_sleep_level=True"),
        (RolloutConfig(stop="ab"), "stop must be a tuple of texts: stop='ab'"),
        (RolloutConfig(stop=("a", 1)), "stop must be a tuple of texts: stop=('a', 1)"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_the_kind_it_must_be(owner, rule):
    assert errors(rollout=owner) == [f"{rule}. Change {rule.split()[0]}."]


def test_texts_switches_and_pairs_are_checked_too():
    assert errors(model=ModelConfig(Path("model"))) == [
        f"pretrain must be a text: pretrain={Path('model')!r}. Change pretrain."
    ]
    assert errors(strategy=StrategyConfig(fsdp="no")) == ["fsdp must be True or False: fsdp='no'. Change fsdp."]
    assert errors(data=DataConfig(max_samples="9")) == [
        "max_samples must be a whole number or None: max_samples='9'. Change max_samples."
    ]
    assert errors(optimizer=OptimizerConfig(adam_betas=(0.9,))) == [
        "adam_betas must be a tuple of 2 numbers: adam_betas=(0.9,). Change adam_betas."
    ]


def test_whole_numbers_are_numbers_and_lists_may_stand_for_tuples():
    """`temperature=1`, numpy's float64 (a float) and what JSON and YAML read are no mistakes."""
    rollout = RolloutConfig(temperature=1, top_p=np.float64(0.5), stop=["a", "b"])
    assert errors(rollout=rollout, optimizer=OptimizerConfig(adam_betas=[0, 0.9])) == []


def test_an_owner_that_is_no_owner_is_named():
    assert errors(model="path/to/model") == ["model must be a ModelConfig: got str. Write model=ModelConfig(...)."]


def test_kinds_are_checked_before_what_reckons_with_them():
    """All of them are said at once, and nothing else: sizes that are no numbers have no arithmetic."""
    config = replace(CONFIG, rollout=RolloutConfig(rollout_batch_size="4", engine_type="hf"))
    with pytest.raises(ValueError) as caught:
        check_config(config, 1)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["engine_type", "rollout_batch_size"]
    with pytest.raises(ValueError, match="config must be a Config: got dict"):
        check_config({"pretrain": "model"}, 1)
