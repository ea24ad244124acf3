"""The benchmarks measure what a run does, on weights that no file holds."""

import argparse
import json

import pytest
import torch

from benchmarks import head, idle_memory, rollout, rounding, scaling, weight_sync
from benchmarks.cases import Case, markdown, measure_case
from benchmarks.models import SIZES, load_random, write_model
from lightrft.models.loading import empty_model, load_tokenizer, pretrained_weights
from lightrft.models.weights import persistent_tensors

CASE = Case("torch", "tiny")
COMMON = {
    "backends": ["fsdp2", "zero3"],
    "nproc_per_node": 2,
    "engine_mem_util": 0.4,
    "engine_tp_size": 1,
    "fp32": True,
    "enforce_eager": False,
    "disable_engine_sleep": False,
    "zero_without_optimizer": False,
    "repeats": 2,
}
SYNC = {"weight_bucket_mib": [1, 2]}
ROLLOUT = {"prompts": 2, "samples": 2, "prompt_tokens": 8, "new_tokens": 6, "scored": 4}


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


@pytest.mark.parametrize(
    "size, billions", [("0.5b", 0.494), ("1.5b", 1.544), ("3b", 3.086), ("7b", 7.616), ("14b", 14.770)]
)
def test_sizes_are_those_of_qwen(tmp_path, size, billions):
    # Parameters as their model cards state them: 0.49, 1.54, 3.09, 7.61 and 14.7 billion.
    tensors = persistent_tensors(empty_model(load_random(write_model(size, tmp_path)), "causal_lm", torch.bfloat16))
    assert sum(t.numel() for _, t in tensors) == pytest.approx(billions * 1e9, rel=1e-3)
    assert size in SIZES


def test_syncs_and_rollouts_of_each_backend_are_measured_with_one_engine(two_ranks, tmp_path):
    """Log-probs are the actor's, whose weights the engine has."""
    args = flags(rows=tmp_path / "rows.jsonl", **SYNC, **ROLLOUT)
    two_ranks.run(measure_case, CASE, args, [weight_sync.BENCHMARK, rollout.BENCHMARK])
    lines = [json.loads(line) for line in args.rows.read_text().splitlines()]
    assert [(title, row["backend"]) for title, row in lines] == [
        (title, backend) for backend in args.backends for title in ("Weight sync", "Rollout")
    ]
    for title, row in lines:
        if title == "Weight sync":
            assert row["GiB"] > 0 and row["extra MiB"] is None and row["update of 2 MiB s"] > 0
            assert all(value > 0 for name, value in row.items() if name.endswith(" s"))
        else:
            assert row["adapter tokens/s"] > 0 and row["bare tokens/s"] > 0
            assert row["adapter mismatch"] < 1e-5 and row["bare mismatch"] < 1e-5


def test_memory_is_looked_at_in_each_stage_of_an_engine(two_ranks, tmp_path):
    """On a CPU there is none to see; the stages are those of a run."""
    args = idle_memory.parser().parse_args(["--fp32", "--disable_engine_sleep", "--rows", str(tmp_path / "row.json")])
    two_ranks.run(idle_memory.measure, "torch", scaling.Layout(2, 1), args)
    assert json.loads(args.rows.read_text()) == {
        "groups joined": None,
        "first all-reduce": None,
        "engine created": None,
        "engine asleep": None,
        "awake": None,
        "after a rollout": None,
        "asleep again": None,
        "without the actor": None,
    }


def test_a_sync_needs_no_optimizer(two_ranks, tmp_path):
    """Nor does a rollout, which nobody compares then."""
    args = flags(rows=tmp_path / "rows.jsonl", **SYNC, **ROLLOUT)
    args.backends, args.zero_without_optimizer = ["zero3"], True
    two_ranks.run(measure_case, CASE, args, [weight_sync.BENCHMARK, rollout.BENCHMARK])
    [(_, sync), (_, drawn)] = [json.loads(line) for line in args.rows.read_text().splitlines()]
    assert sync["update_engine_weights s"] > 0
    assert drawn["adapter tokens/s"] > 0 and "adapter mismatch" not in drawn


def test_steps_of_a_layout_are_measured(tmp_path):
    args = scaling.parser().parse_args(
        ["--fp32", "--prompts", "2", "--samples", "2", "--new_tokens", "8", "--steps", "2", "--flags", "--lora_rank 4"]
    )
    assert scaling.run_flags("fsdp2", "torch", scaling.Layout(1, 1), args)[-2:] == ["--lora_rank", "4"]
    inputs = scaling.write_inputs(tmp_path, args, max_ranks=2)
    row = scaling.run("fsdp2", "torch", scaling.Layout(1, 1, runs=2), inputs, args)
    assert [row.get(name) for name in ("TP x DP", "steps", "verified")] == ["1 x 1, 2 runs", "2", "50"], row
    numbers = {name: float(row[name] or 0) for name in ("mismatch", "step s", "generate")}
    assert numbers["mismatch"] < 1e-5 and numbers["step s"] > numbers["generate"] > 0


def test_layouts_are_given_as_sizes_and_runs_at_once(monkeypatch):
    pair = scaling.Layout.parse("1x1*2")
    assert (pair.ranks, pair.runs, str(pair)) == (1, 2, "1 x 1, 2 runs")
    assert str(scaling.Layout.parse("2x1")) == "2 x 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [scaling.devices_of(number, pair) for number in range(2)] == [["4"], ["5"]]


def test_a_table_has_a_column_for_whatever_a_row_has():
    rows = [{"size": "tiny", "s": 0.012345}, {"size": "14b", "note": "failed (1)"}]
    assert markdown(rows).splitlines() == [
        "| size | s | note |",
        "|---|---|---|",
        "| tiny | 0.01235 |  |",
        "| 14b |  | failed (1) |",
    ]


def test_two_ways_to_round_are_as_far_apart_as_each_is_from_fp32():
    """Hugging Face's forward and the engines' are apart by as much as each is from fp32."""
    row = rounding.measure(SIZES["tiny"] | {"num_hidden_layers": 2}, num_tokens=16)
    distances = [float(row[name] or 0) for name in ("HF - fp32", "kernels - fp32", "kernels - HF")]
    assert all(1e-4 < distance < 1e-2 for distance in distances)
    assert max(distances) < 3 * min(distances)


def test_the_head_s_table_has_a_row_of_seconds_and_of_rounding():
    args = head.parser().parse_args(["--tokens", "64", "--repeats", "1"])
    row = head.measure("tiny", 16, args)
    assert float(row["forward ms"] or 0) > 0 and float(row["forward and backward ms"] or 0) > 0
    # bf16 has 8 bits, and the gradient is rounded once.
    assert 1e-3 < float(row["rounding"] or 0) < 4e-3
