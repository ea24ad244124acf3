"""Runs that train an adapter: beside frozen weights, with the reference inside the actor, and whatever the ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from lightrft.cli.main import main
from lightrft.config import Config
from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.loading import load_config, with_adapter
from lightrft.models.lora import adapter_tensors
from lightrft.strategy.roles import hf_model_of
from lightrft.strategy.utils.sharded_state import saved_shapes
from lightrft.trainer import build_trainer
from lightrft.trainer.setup import check_inputs
from tests import tiny_models
from tests.adapters import adapted, disturb, live, merged, save_adapter
from tests.distributed.resumed_runs import assert_same, history, run, six_steps
from tests.distributed.runs import BACKENDS, make_config, read, strategy_on
from tests.distributed.test_fsdp import train
from tests.distributed.test_weight_sync import engine_differences
from tests.tiny_models import random_samples

LORA = {"lora_rank": 4, "lora_alpha": 8}
REFERENCE = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3"}


# Training


def adapter_role(strategy, learning_rate=1e-2):
    loaded = with_adapter(load_config(strategy.config.model.pretrain, "auto"), strategy.config)
    model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
    return strategy.prepare_optimizer("actor", model, learning_rate, 100)


def reference(folder, samples, steps=2):
    """The same training in one plain process."""
    model = live(adapted(folder, **LORA))
    actor = Actor(model)
    learned = [tensor for _, tensor in adapter_tensors(model)]
    optimizer = torch.optim.AdamW(learned, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for _ in range(steps):
        loss = -torch.cat([actor(collate([one], "padded"), 1.0).log_probs for one in samples]).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(learned, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model


def trained_adapter(folder, backend, options):
    flags = {
        "model": LORA | {"gradient_checkpointing": True},
        "optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0},
        "strategy": options,
        "train": {"micro_train_batch_size": 2},
    }
    with strategy_on(backend, folder, **flags) as strategy:
        role = adapter_role(strategy)
        samples = random_samples(7)
        norms = [train(strategy, role, [samples[i] for i in strategy.local_share(7)])[1] for _ in range(2)]
        expected_norms, model = reference(folder, samples)
        with torch.no_grad():
            got = {name: tensor.clone() for name, tensor in strategy.named_weights(role.model, torch.float32)}
        expected = merged(model, torch.float32)
        assert got.keys() == expected.keys()
        return norms, expected_norms, max((got[n] - expected[n]).abs().max().item() for n in got)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("fsdp", {}),
        ("fsdp", {"fsdp_cpu_offload": True}),
        ("zero2", {}),
        ("zero3", {}),
        ("zero3", {"adam_offload": True}),
    ],
)
def test_two_ranks_train_an_adapter_as_one_process_does(two_ranks, tmp_path, backend, options):
    """With gradient checkpointing, clipping and ragged shares."""
    folder = tiny_models.save_model(tmp_path)
    for norms, expected, difference in two_ranks.run(trained_adapter, folder, backend, options):
        assert norms == pytest.approx(expected, rel=1e-5) and min(norms) > 1e-2
        assert difference < 2e-5


def mixed_precision(folder, backend):
    flags = {"model": LORA | {"bf16": True}, "optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0}}
    with strategy_on(backend, folder, **flags) as strategy, torch.no_grad():
        role = adapter_role(strategy)
        with torch.enable_grad():
            train(strategy, role, random_samples(4, seed=strategy.rank))
        hf_model = hf_model_of(role.model)
        dtypes = {(p.requires_grad, p.dtype) for p in hf_model.parameters()}
        whole = live(adapted(folder, **LORA), torch.bfloat16)
        names, tensors = zip(*((n, p) for n, p in hf_model.named_parameters() if not p.requires_grad), strict=True)
        frozen = strategy.full_tensors(tensors, [t.dtype for t in tensors])
        changed = [
            n for n, tensor in zip(names, frozen, strict=True) if not torch.equal(tensor, whole.get_parameter(n))
        ]
        moved = [
            name for name, t in strategy.named_adapter(role.model) if not torch.equal(t, whole.get_parameter(name))
        ]
        for name, tensor in strategy.named_adapter(role.model):
            whole.get_parameter(name).copy_(tensor)
        got = {name: tensor.clone() for name, tensor in strategy.named_weights(role.model, torch.bfloat16)}
        expected = merged(whole, torch.bfloat16)
        assert got.keys() == expected.keys()
        return dtypes, changed, len(moved), [name for name in got if not torch.equal(expected[name], got[name])]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("fsdp", torch.float32), ("zero2", torch.bfloat16), ("zero3", torch.bfloat16)]
)
def test_an_adapter_learns_beside_weights_frozen_in_bf16(two_ranks, tmp_path, backend, dtype):
    """WGT-05, WGT-08: merged in fp32 and rounded once; what DeepSpeed computes with is bf16, its masters are fp32."""
    folder = tiny_models.save_model(tmp_path)
    for dtypes, changed, num_moved, differing in two_ranks.run(mixed_precision, folder, backend):
        assert dtypes == {(True, dtype), (False, torch.bfloat16)}
        assert changed == differing == []
        # B of 14 layers; A has no gradient while B is 0, or is rounded to bf16.
        assert num_moved >= 14


def compared_run(config: Config) -> tuple[list[dict], list[list[str]], list[str]]:
    """History of a run; the weights in which the engine differs from the actor after each sync; those that moved."""
    trainer = build_trainer(config)
    strategy, actor = trainer.strategy, trainer.actor.model
    update = strategy.update_engine_weights
    differences = []

    def compared(model):
        record = update(model)
        with torch.no_grad():
            differences.append(engine_differences(strategy, model))
        return record

    with torch.no_grad():
        before = {name: tensor.clone() for name, tensor in strategy.named_weights(actor, torch.float32)}
    strategy.update_engine_weights = compared
    trainer.train()
    with torch.no_grad():
        after = dict(strategy.named_weights(actor, torch.float32))
        moved = [name for name in before if not torch.equal(before[name], after[name])]
    trainer.writer.close()
    strategy.close()
    return history(config), differences, moved


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_grpo_with_an_adapter_starts_on_policy_and_learns(two_ranks, task, tmp_path, backend):
    """NUM-17: KL to the reference, the actor without its adapter, and ratios; then sevens are rewarded, and come."""
    (tmp_path / "reward.py").write_text("def sevens(response):\n    return response.count('7') / 6\n")
    config = make_config(
        task,
        tmp_path,
        model=LORA | {"gradient_checkpointing": True},
        algorithm={"init_kl_coef": 0.001},
        rollout={"rollout_batch_size": 12},
        train={"train_batch_size": 48, "micro_train_batch_size": 12, "max_steps": 8, "num_episodes": 8},
        optimizer={"actor_learning_rate": 2e-2},
        reward={"reward_fn": f"{tmp_path}/reward.py:sevens"},
        strategy=BACKENDS[backend],
    )
    lines, differences, moved = two_ranks.run(compared_run, config)[0]
    assert lines[1]["kl/reference"] == lines[1]["train/ppo_kl"] == 0.0
    assert all(line["train/ppo_kl"] == 0.0 and line["rollout/log_prob_mismatch"] < 1e-4 for line in lines[1:])
    assert all(line["kl/reference"] != 0.0 for line in lines[2:])
    assert differences == [[]] * 9
    # Matrices of the two blocks, and nothing else.
    assert len(moved) == 14 and all(name.endswith("_proj.weight") for name in moved)
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])


def whole_run(config: Config) -> None:
    build_trainer(config).fit()


def test_one_rank_and_two_train_an_adapter_alike(two_ranks, one_rank, task, tmp_path):
    """DIST-03: the adapter is drawn from the seed alone."""
    configs = [
        make_config(task, tmp_path / name, model=LORA, algorithm=REFERENCE | {"advantage_estimator": "gae"})
        for name in ("one", "two")
    ]
    for ranks, config in zip((one_rank, two_ranks), configs, strict=True):
        ranks.run(whole_run, config)
    assert_same(configs[1], configs[0], tolerance=1e-4)
    assert read(configs[0], "metrics.jsonl")[2]["train/kl_loss"] > 0


def step_zero(config: Config) -> tuple[float, float, float]:
    trainer = build_trainer(config)
    trainer.update_engine_weights()
    metrics = trainer.train_step(1, next(iter(trainer.sampler)))
    trainer.writer.close()
    trainer.strategy.close()
    return metrics["kl/reference"], metrics["train/ppo_kl"], metrics["rollout/log_prob_mismatch"]


@pytest.mark.parametrize(
    ("backend", "model"),
    [("fsdp", {}), ("zero2", {}), ("zero3", {}), ("fsdp", {"bf16": True}), ("zero3", {"bf16": True})],
)
def test_a_run_from_a_saved_adapter_starts_at_kl_0(two_ranks, task, tmp_path, backend, model):
    """NUM-17: the reference has the adapter as well, so it is not the model without it."""
    start = live(adapted(str(task / "model"), **LORA))
    disturb(start)
    written = save_adapter(tmp_path / "adapter", start)
    config = make_config(
        task,
        tmp_path / "run",
        model=model | {"lora_path": written},
        algorithm=REFERENCE,
        strategy=BACKENDS[backend],
    )
    for kl, ppo_kl, mismatch in two_ranks.run(step_zero, config):
        assert kl == ppo_kl == 0.0
        assert mismatch < (0.02 if model else 1e-4)


# Checkpoints and exports


@pytest.mark.parametrize(
    "strategy",
    [{"adam_offload": True}, {"fsdp_cpu_offload": True}, BACKENDS["zero2"], BACKENDS["zero3"]],
    ids=["adam_offload", "fsdp_cpu_offload", "zero2", "zero3"],
)
def test_four_steps_with_an_adapter_equal_three_a_stop_and_one(two_ranks, task, tmp_path, strategy):
    """CKPT-01: only the adapter and its optimizer state are written, and the reference is as it was."""
    owners = {"model": LORA, "algorithm": REFERENCE, "strategy": strategy, "train": {"num_episodes": 2}}
    straight = six_steps(task, tmp_path / "straight", **owners)
    assert two_ranks.run(run, straight) == [0, 0]
    broken = six_steps(task, tmp_path / "broken", **owners, checkpoint={"load_checkpoint": True})
    assert two_ranks.run(run, broken, 3) == [143, 143]
    roles = Path(str(broken.checkpoint.ckpt_path)) / "step_00000003" / "roles"
    names = list(saved_shapes(roles))
    # A and B of 14 layers: the weight, two moments and a count of steps.
    assert len(names) == 28 * 4 and all(".lora_" in name for name in names)
    assert two_ranks.run(run, broken) == [0, 0]
    assert_same(broken, straight)


@pytest.fixture(scope="module")
def finished(two_ranks, task, tmp_path_factory) -> Config:
    """A run whose exports are merged."""
    folder = tmp_path_factory.mktemp("finished")
    config = six_steps(
        task,
        folder,
        model=LORA,
        train={"max_steps": 2},
        optimizer={"actor_learning_rate": 1e-2, "lr_scheduler": "constant", "lr_warmup_steps": 0},
        checkpoint={"save_steps": 2, "save_hf_ckpt": True},
    )
    assert two_ranks.run(run, config) == [0, 0]
    return config


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3, 4, 5, 6, 7]])).logits


def test_exports_are_merged_and_load_without_peft(finished, tmp_path):
    """WGT-05, CKPT-06: the folder of the checkpoint, the final model and `lightrft export` agree to the bit."""
    folder = Path(finished.train.save_path)
    assert main(["export", str(folder / "ckpt"), str(tmp_path / "out")]) == 0
    paths = (tmp_path / "out", folder / "model", folder / "ckpt" / "step_00000002" / "hf")
    first, *others = (load_file(path / "model.safetensors") for path in paths)
    for other in others:
        assert other.keys() == first.keys() and all(torch.equal(other[name], first[name]) for name in first)
    base = AutoModelForCausalLM.from_pretrained(finished.model.pretrain)
    assert first.keys() == {name for name, _ in base.named_parameters()}
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(base), atol=1e-2)


def test_an_exported_adapter_loads_with_peft_and_scores_as_the_merged_model(two_ranks, task, finished, tmp_path):
    """Of a checkpoint, and of a run with --save_adapter."""
    folder = Path(finished.train.save_path)
    assert main(["export", str(folder / "ckpt"), str(tmp_path / "adapter"), "--adapter"]) == 0
    config = replace(
        finished,
        train=replace(finished.train, save_path=str(tmp_path / "run")),
        checkpoint=replace(finished.checkpoint, ckpt_path=str(tmp_path / "run" / "ckpt"), save_adapter=True),
    )
    two_ranks.run(run, config)
    expected = logits(AutoModelForCausalLM.from_pretrained(folder / "model"))
    for path in (tmp_path / "adapter", tmp_path / "run" / "model", tmp_path / "run" / "ckpt" / "step_00000002" / "hf"):
        base = AutoModelForCausalLM.from_pretrained(finished.model.pretrain)
        torch.testing.assert_close(logits(PeftModel.from_pretrained(base, path)), expected, atol=1e-5, rtol=0)
        assert "library_name: peft" in (path / "README.md").read_text()
        assert not list(path.glob("model*.safetensors"))


def test_an_adapter_goes_on_as_it_was_scaled(finished, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    again = replace(finished, checkpoint=replace(finished.checkpoint, load_checkpoint=True))
    for change, message in (
        ({"lora_alpha": 16}, "lora_alpha is 8 in .* and 16 here"),
        ({"use_rslora": True}, "use_rslora is False in .* and True here"),
        ({"lora_rank": 2}, r"lora_A.default.weight is \(4, 32\) there and \(2, 32\) here"),
        ({"lora_rank": 0, "lora_alpha": 16}, "is of other ones: .* is not in it"),
    ):
        with pytest.raises(ValueError, match=message):
            check_inputs(replace(again, model=replace(again.model, **change)))


def test_a_checkpoint_without_an_adapter_exports_none(two_ranks, task, tmp_path, capsys):
    config = six_steps(task, tmp_path / "run", train={"max_steps": 1})
    two_ranks.run(run, config)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run" / "ckpt"), str(tmp_path / "out"), "--adapter"])
    assert "there must be an adapter to export" in capsys.readouterr().err
