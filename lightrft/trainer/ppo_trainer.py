"""PPOTrainer: the loop of rollouts and updates, evaluation and the run's records."""

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch

from lightrft.config import Config
from lightrft.strategy.strategy_base import StrategyBase, TrainedRole
from lightrft.trainer.checkpointing import Checkpointer, TrainingState, flags_of, scores_of
from lightrft.trainer.evaluation import Evaluation
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, NumberedPrompt
from lightrft.trainer.kl_controller import make_kl_controller
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.records import gathered_rows, merged_metrics
from lightrft.trainer.replay_buffer import ReplayBuffer
from lightrft.types import Experience, PromptExample
from lightrft.utils.logging import get_logger
from lightrft.utils.means import Means
from lightrft.utils.metrics import MetricsWriter
from lightrft.utils.profiling import StepProfiler
from lightrft.utils.sampler import PromptSampler
from lightrft.utils.signals import StopSignals

logger = get_logger(__name__)


class PPOTrainer(ABC):
    """Drives one run. Every rank runs it; `ppo_train` is the optimisation that a subclass supplies."""

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        actor: TrainedRole,
        critic: TrainedRole | None,
        experience_maker: FastExperienceMaker,
        prompts: Sequence[PromptExample],
        evaluation: Evaluation,
        sampler: PromptSampler,
        checkpointer: Checkpointer,
        profiler: StepProfiler,
        num_steps: int,
        writer: MetricsWriter,
        phases: PhaseClock,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.actor = actor
        self.critic = critic
        self.experience_maker = experience_maker
        self.prompts = prompts
        self.evaluation = evaluation
        self.sampler = sampler
        self.checkpointer = checkpointer
        self.profiler = profiler
        self.num_steps = num_steps
        self.writer = writer
        self.phases = phases
        algorithm = config.algorithm
        self.kl_controller = make_kl_controller(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self.replay_buffer = ReplayBuffer()
        self.step = 0
        self.train_seconds = 0.0
        self.stopped_by = 0
        """Number of the signal that has stopped the run, or 0."""

    @abstractmethod
    def ppo_train(self, step: int, means: Means) -> dict[str, float]:
        """Step 9: updates actor and critic on the replay buffer. Every rank must call it."""

    def fit(self) -> dict[str, float]:
        """Trains until the steps are done, leaves the process group, and returns what `summary.json` holds.

        Raises:
            SystemExit: A signal has stopped the run after a step; the code is 128 + its number.
        """
        with closing(self.writer):
            with self.phases.progress:
                summary = self.train()
            self.save(summary)
        self.strategy.close()
        if self.stopped_by:
            raise SystemExit(128 + self.stopped_by)
        return summary

    def train(self) -> dict[str, float]:
        """All steps that are left, with evaluation before the first, after the last one and in between."""
        self.start()
        with StopSignals() as signals:
            for step, rows in enumerate(islice(self.sampler, self.num_steps - self.step), start=self.step + 1):
                started = time.perf_counter()
                with self.profiler.step(step):
                    metrics = self.train_step(step, rows)
                self.step, self.train_seconds = step, self.train_seconds + time.perf_counter() - started
                metrics |= self.evaluation.evaluate(step) | self.phases.collect()
                self.log(step, metrics | self.checkpointer.metrics())
                self.phases.progress.step(step, metrics)
                self.agree_to_stop(signals)
                self.save_checkpoint(metrics)
                if self.stopped_by:
                    break
        return self.summary()

    def start(self) -> None:
        """Goes on from a checkpoint, or evaluates the model as it is before the first step."""
        state = self.checkpointer.load()
        self.update_engine_weights()
        if state is None:
            self.log(0, self.evaluation.evaluate(0) | self.phases.collect())
        else:
            self.step, self.train_seconds = state.step, state.train_seconds
            self.evaluation.resume(state.before, state.after, state.best)
            self.kl_controller.value = state.kl_coefficient

    def agree_to_stop(self, signals: StopSignals) -> None:
        """Every rank must call it: a signal to any of them stops all, after the same step."""
        [number] = self.strategy.collectives.all_reduce_max([signals.received])
        if self.step < self.num_steps:
            self.stopped_by = int(number)

    def summary(self) -> dict[str, float]:
        summary = {"steps": self.step, "train_seconds": self.train_seconds} | self.checkpointer.metrics()
        if self.stopped_by:
            summary["stopped_by_signal"] = self.stopped_by
        return summary | self.evaluation.summary()

    def train_step(self, step: int, rows: Sequence[int]) -> dict[str, float]:
        """One iteration: rollout, roles, rewards, update, weight sync, in the order of the runtime architecture."""
        started = time.perf_counter()
        means = Means()
        prompts = self.share(self.prompts, rows)
        rollout = self.experience_maker.make_experience_list(prompts, step, self.kl_controller.value, means)
        self.replay_buffer.fill(rollout.experiences, rollout.plan)
        self.phases("train")
        train_metrics = self.ppo_train(step, means)
        self.replay_buffer.clear()
        self.update_engine_weights()
        metrics = merged_metrics(self.strategy.collectives, means, "reward") | train_metrics
        metrics["kl/coefficient"] = self.kl_controller.value
        self.update_kl(metrics, len(rows))
        self.write_samples(step, rollout.experiences)
        local_tokens = sum(sample.num_tokens for sample in rollout.experiences)
        [num_tokens] = self.strategy.collectives.all_reduce_sum([local_tokens])
        seconds = time.perf_counter() - started
        metrics |= {"time/step": seconds, "tokens_per_second": num_tokens / seconds}
        return metrics | self.phases.collect() | memory_metrics(self.strategy.device)

    def update_kl(self, metrics: Mapping[str, float], num_prompts: int) -> None:
        if "kl/reference" in metrics:
            self.kl_controller.update(metrics["kl/reference"], num_prompts * self.config.rollout.n_samples_per_prompt)

    def share(self, prompts: Sequence[PromptExample], rows: Sequence[int]) -> list[NumberedPrompt]:
        """This rank's prompts among `rows`, numbered by their place there."""
        return [(i, prompts[rows[i]]) for i in self.strategy.local_share(len(rows))]

    def update_engine_weights(self) -> None:
        self.phases("sync")
        self.strategy.update_engine_weights(self.actor.model)

    # Records

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's line. Every rank must call it: what rank 0 cannot write stops all."""
        with self.strategy.collectives.collect("writing metrics"):
            self.writer.log(step, metrics)

    def write_samples(self, step: int, experiences: Sequence[Experience]) -> None:
        """Writes the samples of all ranks, ordered by prompt."""
        with_tokens = self.config.report.save_token_log_probs
        rows = gathered_rows(self.strategy.collectives, step, experiences, with_tokens)
        with self.strategy.collectives.collect("writing samples"):
            self.writer.log_samples(rows)

    def save(self, summary: Mapping[str, float]) -> None:
        """Writes the summary, and the final model of a run that has come to its end."""
        if not self.stopped_by:
            self.checkpointer.export(self.step, Path(self.config.train.save_path) / "model")
        with self.strategy.collectives.collect("writing the summary"):
            self.writer.write_summary(summary)

    def save_checkpoint(self, metrics: Mapping[str, float]) -> None:
        """Saves a checkpoint where one is due. Every rank must call it."""
        if not self.checkpointer.is_due(self.step, is_last=self.step == self.num_steps or self.stopped_by > 0):
            return
        self.phases("checkpoint")
        state = TrainingState(
            step=self.step,
            num_steps=self.num_steps,
            train_seconds=self.train_seconds,
            kl_coefficient=self.kl_controller.value,
            sampler=self.sampler.state_dict(),
            data=self.checkpointer.data,
            scores=scores_of(metrics),
            before=self.evaluation.before,
            after=self.evaluation.after,
            best=self.evaluation.best,
            flags=flags_of(self.config),
        )
        self.checkpointer.save(state)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peaks of this process, in GiB, since its start (host) and since the last call (device)."""
    metrics = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        metrics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["memory/device_gib"] = torch.cuda.memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
