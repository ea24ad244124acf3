"""RewardModelTrainer: trains a reward model on pairs of a better and a worse answer."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
from rich import get_console
from torch import Tensor

from lightrft.config.preference import RewardModelConfig
from lightrft.datasets.preferences import PreferencePair
from lightrft.models.collate import Layout, micro_batches
from lightrft.models.reward_model import text_sample
from lightrft.ops.aggregation import mean_scale
from lightrft.ops.preference import bradley_terry_loss
from lightrft.strategy.utils.distributed_util import balanced_destinations
from lightrft.trainer.checkpointing import TrainingState, flags_of, scores_of
from lightrft.trainer.phases import phase_seconds
from lightrft.trainer.reward_model_setup import (
    PairInputs,
    assemble_pairs,
    check_pair_inputs,
    tokens_of,
)
from lightrft.utils.garbage import full_collections_by_step
from lightrft.utils.means import Means, merged_means
from lightrft.utils.memory_ledger import ledger_metrics, ledger_table
from lightrft.utils.signals import StopSignals


class RewardModelTrainer:
    """Drives one run. Every rank makes one and runs it.

    The two answers of a pair are in one forward; an optimizer step's loss is the mean over its pairs on all ranks.

    Args:
        config: All flags.
        inputs: What `check_pair_inputs` made of them before; None calls it.

    Raises:
        ValueError, NotImplementedError, OSError: The user's mistakes, before any model is loaded.
    """

    def __init__(self, config: RewardModelConfig, *, inputs: PairInputs | None = None) -> None:
        inputs = check_pair_inputs(config) if inputs is None else inputs
        self.config = config
        self.strategy = inputs.strategy
        self.strategy.setup_distributed()
        parts = assemble_pairs(config, inputs)
        self.role = parts.role
        self.pairs = inputs.pairs
        self.eval_pairs = inputs.eval_pairs
        self.layout: Layout = inputs.model.layout
        self.sampler = inputs.sampler
        self.writer = inputs.writer
        self.checkpointer = parts.checkpointer
        self.profiler = parts.profiler
        self.num_steps = parts.num_steps
        self.phases = parts.phases
        self.before: Mapping[str, float] = {}
        """Metrics of the evaluation before the first step."""
        self.after: Mapping[str, float] = {}
        """Metrics of the last evaluation after that."""
        self.step = 0
        self.train_seconds = 0.0
        self.stopped_by = 0
        """Number of the signal that has stopped the run, or 0."""

    def fit(self) -> dict[str, float]:
        """Trains until the steps are done, leaves the process group, and returns what `summary.json` holds.

        Raises:
            SystemExit: A signal has stopped the run after a step; the code is 128 + its number.
        """
        with closing(self.writer):
            with self.phases.progress:
                self.train()
            summary = self.summary()
            self.save(summary)
        self.strategy.close()
        if self.stopped_by:
            raise SystemExit(128 + self.stopped_by)
        return summary

    def train(self) -> None:
        """All steps that are left, with evaluation before the first, after the last one and in between."""
        self.start()
        with full_collections_by_step() as collect_garbage, StopSignals() as signals:
            for step, rows in enumerate(islice(self.sampler, self.num_steps - self.step), start=self.step + 1):
                started = time.perf_counter()
                with self.profiler.step(step):
                    metrics = self.train_step([self.pairs[row] for row in rows])
                self.step, self.train_seconds = step, self.train_seconds + time.perf_counter() - started
                metrics |= self.evaluate() | self.phase_metrics()
                self.log(metrics | self.checkpointer.metrics())
                self.phases.progress.step(step, metrics)
                collect_garbage(step)
                self.agree_to_stop(signals)
                self.save_checkpoint(metrics)
                if self.stopped_by:
                    break

    def start(self) -> None:
        """Goes on from a checkpoint, or evaluates the model as it is before the first step."""
        state = self.checkpointer.load()
        if state is None:
            self.log(self.evaluate() | self.phase_metrics())
            return
        self.step, self.train_seconds = state.step, state.train_seconds
        self.before, self.after = state.before, state.after

    def train_step(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """One optimizer step on the pairs of all ranks. Every rank must call it."""
        started = time.perf_counter()
        self.phases("train")
        metrics = {"train/lr": float(self.role.scheduler.get_last_lr()[0])}
        scale = mean_scale(len(pairs), self.strategy.world_size)
        means = Means()
        loss = torch.zeros((), device=self.strategy.device)
        with self.strategy.optimizer_on_device(self.role):
            for scores, of, is_last in self.scores(self.share(pairs)):
                part = self.loss(scores, of, means, "train") * scale
                self.strategy.backward(part, self.role, is_last)
                loss += part.detach()
            self.phases.observe("gradients")
            result = self.strategy.optimizer_step(self.role, loss)
        if not result.skipped:
            metrics["train/grad_norm"] = result.grad_norm
        metrics["train/skipped_steps"] = float(result.skipped)
        metrics |= self.merged(means)
        seconds = time.perf_counter() - started
        num_tokens = sum(tokens_of(pairs, padded=False))
        return metrics | {"time/step": seconds, "tokens_per_second": num_tokens / seconds}

    def share(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """This rank's part, of about as many tokens as those of the others."""
        ranks = balanced_destinations(tokens_of(pairs, padded=False), self.strategy.world_size)
        return [pair for pair, rank in zip(pairs, ranks, strict=True) if rank == self.strategy.rank]

    def scores(self, pairs: Sequence[PreferencePair]) -> Iterator[tuple[Tensor, list[PreferencePair], bool]]:
        """Scores of this rank's pairs, a micro-batch at a time, and whether it is the last.

        Each next() is a collective: every rank drains the iterator. A micro-batch without pairs has scores that count
        nothing, since the others run one more.
        """
        samples = [text_sample(ids) for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
        padded = self.layout == "padded"
        plan = self.strategy.agree_plan_of_lengths(tokens_of(pairs, padded), padded)
        of_samples = [[sample for pair in part for sample in (2 * pair, 2 * pair + 1)] for part in plan]
        for micro, indices, is_last in micro_batches(samples, of_samples, self.layout, self.strategy.device):
            with self.strategy.waiting("reward_model forward"):
                scores = self.role.model(micro)
            yield scores, [pairs[sample // 2] for sample in indices[::2]], is_last

    def loss(self, scores: Tensor, pairs: Sequence[PreferencePair], means: Means, prefix: str) -> Tensor:
        """Sum of the pairs' losses.

        Args:
            scores: `(2 B,)`, of each pair the chosen answer's and the rejected one's.
            pairs: `B` of them, or none, for scores that count nothing.
            means: Takes what was seen.
            prefix: Of the metrics' names.
        """
        if not pairs:
            return scores.sum() * 0.0
        chosen, rejected = scores.view(-1, 2).unbind(1)
        margins = torch.tensor([pair.margin for pair in pairs], device=scores.device)
        losses = bradley_terry_loss(chosen, rejected, margins)
        # Equal scores, as those of a new head are, are right half of the time.
        right = 0.5 + 0.5 * (chosen - rejected).detach().sign()
        seen = {"loss": losses, "accuracy": right, "chosen_score": chosen, "rejected_score": rejected}
        for name, values in seen.items():
            means.add(f"{prefix}/{name}", values.detach().double().sum(), len(pairs))
        return losses.sum()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out pairs, or none where no evaluation is due. Every rank must call it."""
        every = self.config.train.eval_steps
        at_end = self.step in (0, self.num_steps)
        if self.eval_pairs is None or not (at_end or (every > 0 and self.step % every == 0)):
            return {}
        self.phases("evaluate")
        means = Means()
        with torch.no_grad():
            for scores, of, _ in self.scores(self.share(self.eval_pairs)):
                self.loss(scores, of, means, "eval")
        metrics = self.merged(means)
        if self.step == 0:
            self.before = metrics
        else:
            self.after = metrics
        return metrics

    def merged(self, means: Means) -> dict[str, float]:
        return merged_means(self.strategy.collectives.all_gather_objects(means.sums))

    # Records

    def phase_metrics(self) -> dict[str, float]:
        """Seconds and memory of the phases since the last call, of rank 0 where it logs them."""
        records = self.phases.collect()
        by_owner = self.config.report.print_memory_ledger
        if by_owner and self.strategy.is_rank_0:
            get_console().print(ledger_table(records, f"Memory of rank 0, step {self.step}"))
        return phase_seconds(records) | ledger_metrics(records, by_owner)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Writes a step's line. Every rank must call it: what rank 0 cannot write stops all."""
        with self.strategy.collectives.collect("writing metrics"):
            self.writer.log(self.step, metrics)

    def agree_to_stop(self, signals: StopSignals) -> None:
        """Every rank must call it: a signal to any of them stops all, after the same step."""
        [number] = self.strategy.collectives.all_reduce_max([signals.received])
        if self.step < self.num_steps:
            self.stopped_by = int(number)

    def summary(self) -> dict[str, float]:
        summary = {"steps": self.step, "train_seconds": self.train_seconds} | self.checkpointer.metrics()
        if self.stopped_by:
            summary["stopped_by_signal"] = self.stopped_by
        for when, metrics in (("before", self.before), ("after", self.after)):
            names = [name for name in ("accuracy", "loss") if f"eval/{name}" in metrics]
            summary |= {f"{name}_{when}": metrics[f"eval/{name}"] for name in names}
        return summary

    def save(self, summary: Mapping[str, float]) -> None:
        """Writes the summary, and the final model of a run that has come to its end."""
        if not self.stopped_by:
            self.checkpointer.export(self.step, Path(self.config.train.save_path) / "model")
        with self.strategy.collectives.collect("writing the summary"):
            self.writer.write_summary(summary)

    def save_checkpoint(self, metrics: Mapping[str, float]) -> None:
        """Saves a checkpoint where one is due. Every rank must call it."""
        is_over = self.step == self.num_steps or self.stopped_by > 0
        if not self.checkpointer.is_due(self.step, is_last=is_over):
            return
        self.phases("checkpoint")
        state = TrainingState(
            step=self.step,
            num_steps=self.num_steps,
            train_seconds=self.train_seconds,
            kl_coefficient=0.0,
            sampler=self.sampler.state_dict(),
            data=self.checkpointer.data,
            scores=scores_of(metrics),
            before=self.before,
            after=self.after,
            best={},
            flags=flags_of(self.config),
        )
        self.checkpointer.save(state)
