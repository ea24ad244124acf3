"""The benchmarks measure what a run does, on weights that no file holds."""

import argparse

import pytest
import torch

from benchmarks import rollout, weight_sync
from benchmarks.cases import Case, markdown
from benchmarks.models import SIZES, load_random, write_model
from lightrft.models.loading import empty_model, load_tokenizer, pretrained_weights
from lightrft.models.weights import persistent_tensors

CASE = Case("fsdp2", "torch", "tiny")
COMMON = {"engine_mem_util": 0.4, "engine_tp_size": 1, "fp32": True, "enforce_eager": False}


def flags(**own):
    return argparse.Namespace(**COMMON | own)


def test_random_weights_are_those_of_the_model_and_all_different(tmp_path):
    loaded = load_random(write_model("tiny", tmp_path))
    weights = pretrained_weights(loaded, "causal_lm", torch.bfloat16)
    expected = persistent_tensors(empty_model(loaded, "causal_lm", torch.bfloat16))
    assert {n: (w.shape, w.dtype) for n, w in weights.items()} == {n: (t.shape, t.dtype) for n, t in expected}
    rows = torch.cat([w[:, :32].float() for w in weights.values() if w.ndim == 2])
    assert len(rows.unique(dim=0)) == len(rows)
    assert 0.018 < rows.std() < 0.022
    assert load_tokenizer(str(tmp_path)).eos_token_id == 1


@pytest.mark.parametrize("size, billions", [("0.5b", 0.494), ("1.5b", 1.544), ("7b", 7.616), ("14b", 14.770)])
def test_sizes_are_those_of_qwen(tmp_path, size, billions):
    # Parameters as their model cards state them: 0.49, 1.54, 7.61 and 14.7 billion.
    tensors = persistent_tensors(empty_model(load_random(write_model(size, tmp_path)), "causal_lm", torch.bfloat16))
    assert sum(t.numel() for _, t in tensors) == pytest.approx(billions * 1e9, rel=1e-3)
    assert size in SIZES


def test_a_sync_is_measured(two_ranks):
    args = flags(weight_bucket_bytes=2**20, repeats=2, disable_engine_sleep=False)
    first, second = two_ranks.run(weight_sync.measure, CASE, args)
    assert first.keys() == second.keys()
    assert first["GiB"] > 0 and first["extra MiB"] is None
    assert all(value > 0 for name, value in first.items() if name.endswith(" s"))


def test_a_rollout_is_measured_and_its_log_probs_are_the_actors(two_ranks):
    args = flags(prompts=2, samples=2, prompt_tokens=8, new_tokens=6, repeats=1, scored=4)
    for row in two_ranks.run(rollout.measure, CASE, args):
        assert row["adapter tokens/s"] > 0 and row["bare tokens/s"] > 0
        assert row["adapter mismatch"] < 1e-5 and row["bare mismatch"] < 1e-5


def test_a_table_has_a_column_for_whatever_a_row_has():
    rows = [{"size": "tiny", "s": 0.012345}, {"size": "14b", "note": "failed (1)"}]
    assert markdown(rows).splitlines() == [
        "| size | s | note |",
        "|---|---|---|",
        "| tiny | 0.01235 |  |",
        "| 14b |  | failed (1) |",
    ]
