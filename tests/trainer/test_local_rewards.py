"""What --reward_pretrain names is looked at before anything is loaded."""

import json
from dataclasses import replace

import pytest
from transformers import Qwen2ForSequenceClassification

from lightrft.config import Config
from lightrft.trainer.local_rewards import check_conversations, load_reward_models
from lightrft.types import PromptExample
from tests import reward_folders, tiny_models
from tests.distributed.runs import config


def named(**folders: object) -> Config:
    models = json.dumps({name: str(folder) for name, folder in folders.items()})
    return config(reward={"reward_pretrain": models})


def test_models_come_in_the_order_of_the_flag_with_their_own_tokenizers(tmp_path):
    own = reward_folders.save(tmp_path / "own", 0)
    other = tiny_models.save_classifier(tmp_path / "other")
    first, second = load_reward_models(named(z=own, a=other))
    assert (first.name, second.name) == ("z", "a")
    assert first.tokenizer.encode("1") != second.tokenizer.encode("1")


@pytest.mark.parametrize("name", ["mean", "response_length", "exact_match", "answer", "remote_rm", "judge"])
def test_a_name_that_is_a_metrics_or_another_components_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is another component's or metric's"):
        load_reward_models(named(**{name: "anywhere"}))


def test_a_folder_that_holds_no_reward_model_is_refused_under_the_models_name(tmp_path):
    two_labels = tmp_path / "two"
    Qwen2ForSequenceClassification(tiny_models.qwen2(num_labels=2)).save_pretrained(two_labels)
    without_tokenizer = tmp_path / "mute"
    tiny_models.random_classifier(tiny_models.qwen2()).save_pretrained(without_tokenizer)
    for folder, problem in {
        "./nowhere": "the model folder must exist: ./nowhere does not",
        tiny_models.save_model(tmp_path / "policy"): "must be a sequence classifier with one label",
        two_labels: "must have one label",
        without_tokenizer: "must hold a tokenizer",
    }.items():
        with pytest.raises(ValueError, match=f"^reward_pretrain safe: .*{problem}"):
            load_reward_models(named(safe=folder))


def test_roles_that_a_models_template_does_not_take_are_refused_with_a_row_that_has_them(tmp_path):
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}1"
    loaded = load_reward_models(named(safe=reward_folders.save(tmp_path, 0, strict)))
    example = PromptExample(0, "", [1], messages=[{"role": "user", "content": "1"}])
    check_conversations(loaded, [example, replace(example, messages=None)])
    with_system = replace(example, row=7, messages=[{"role": "system", "content": "2"}, *(example.messages or ())])
    with pytest.raises(ValueError, match=r"^reward_pretrain safe, row 7: .*no system role \(roles: system, user"):
        check_conversations(loaded, [example, with_system])
