import logging

import pytest

from lightrft.models.reward_model import load_classifier
from lightrft.trainer.reward_model_setup import name_padding
from lightrft.trainer.setup import steps_of_run
from lightrft.utils.sampler import PairSampler
from tests import tiny_models
from tests.distributed.runs import config


@pytest.mark.parametrize(("pad_token", "expected"), [("<pad>", 0), (None, 1)])
def test_a_model_that_names_no_padding_gets_its_tokenizers_or_else_the_end_token(tmp_path, pad_token, expected):
    """An id of 0 is one too: transformers would look for the last token that is not the end token."""
    tokenizer = tiny_models.tokenizer()
    tokenizer.pad_token = pad_token
    loaded = load_classifier(tiny_models.save_model(tmp_path, tiny_models.qwen2(pad_token_id=None)), "auto", True)
    name_padding(loaded, tokenizer)
    assert loaded.hf_config.pad_token_id == expected


def test_more_steps_than_the_pairs_make_are_told_by_the_flags_of_this_training(caplog, monkeypatch):
    """7 pairs in batches of 3, twice, are 4 steps; 10 steps take 5 passes."""
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    assert steps_of_run(config(train={"max_steps": 10}), PairSampler(7, 3, 2, seed=0)) == 4
    assert "max_steps=10 is more than the data has: num_epochs=2 makes 4 steps. Set --num_epochs 5" in caplog.text
