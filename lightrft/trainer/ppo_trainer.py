"""PPOTrainer: the loop of rollouts and updates, evaluation and the run's records."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from rich import get_console

from lightrft.config import Config
from lightrft.strategy.utils.broadcast_utils import SyncRecord
from lightrft.strategy.utils.collectives import GENERATION
from lightrft.trainer.callbacks import Callback, check_callbacks
from lightrft.trainer.checkpointing import TrainingState, flags_of, scores_of
from lightrft.trainer.data_setup import Rows
from lightrft.trainer.dynamic_sampling import further_rows
from lightrft.trainer.kl_controller import make_kl_controller
from lightrft.trainer.phases import phase_seconds
from lightrft.trainer.records import gathered_rows, merged_metrics
from lightrft.trainer.replay_buffer import ReplayBuffer
from lightrft.trainer.reward_setup import RewardCallable
from lightrft.trainer.rollouts import NumberedPrompt
from lightrft.trainer.setup import (
    Inputs,
    assemble,
    check_inputs,
    with_reward_name,
)
from lightrft.types import Experience, PromptExample
from lightrft.utils.garbage import full_collections_by_step
from lightrft.utils.logging import get_logger
from lightrft.utils.means import Means
from lightrft.utils.memory_ledger import ledger_metrics, ledger_table
from lightrft.utils.signals import StopSignals

logger = get_logger(__name__)


class PPOTrainer(ABC):
    """Drives one run. Every rank makes one and runs it; `ppo_train` is the optimisation that a subclass supplies.

    Making one checks everything, joins the process group and loads every role: nothing is left to do but `fit()`.

    Args:
        config: All flags.
        reward_fn: A function as `--reward_fn` names them; None takes the one that it names.
        train_data: Rows to train on, in the place of `--prompt_data`.
        eval_data: Rows to evaluate on, in the place of `--eval_data`.
        callbacks: Are told what happens; each rank has the same ones.
        inputs: What `check_inputs` made of all that before; None calls it.

    Raises:
        ValueError, NotImplementedError, OSError: The user's mistakes, before any model is loaded.
    """

    def __init__(
        self,
        config: Config,
        *,
        reward_fn: RewardCallable | None = None,
        train_data: Rows | None = None,
        eval_data: Rows | None = None,
        callbacks: Sequence[Callback] = (),
        inputs: Inputs | None = None,
    ) -> None:
        check_callbacks(callbacks)
        if inputs is None:
            inputs = check_inputs(config, reward_fn, train_data, eval_data)
        self.config = with_reward_name(config, inputs.rewards)
        inputs.strategy.setup_distributed()
        parts = assemble(self.config, inputs)
        self.callbacks = tuple(callbacks)
        self.strategy = parts.strategy
        self.actor = parts.actor
        self.critic = parts.critic
        self.experience_maker = parts.experience_maker
        self.media = parts.media
        self.prompts = parts.prompts
        self.evaluation = parts.evaluation
        self.sampler = parts.sampler
        self.checkpointer = parts.checkpointer
        self.profiler = parts.profiler
        self.num_steps = parts.num_steps
        self.writer = parts.writer
        self.phases = parts.phases
        self.policy_loss_function = inputs.policy_loss
        self.texts = inputs.texts
        algorithm = self.config.algorithm
        self.kl_controller = make_kl_controller(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self.replay_buffer = ReplayBuffer()
        self.phases.ledger.watch(lambda: {"replay buffer": self.replay_buffer.device_bytes(self.strategy.device)})
        self.step = 0
        self.train_seconds = 0.0
        self.stopped_by = 0
        """Number of the signal that has stopped the run, or 0."""
        self.should_stop = False
        """Callbacks set it to end the run after the running step."""
        self.has_run = False

    @abstractmethod
    def ppo_train(self, step: int, means: Means) -> dict[str, float]:
        """Step 9: updates actor and critic on the replay buffer. Every rank must call it."""

    def fit(self) -> dict[str, float]:
        """Trains until the steps are done, leaves the process group, and returns what `summary.json` holds.

        Raises:
            SystemExit: A signal has stopped the run after a step; the code is 128 + its number.
            ValueError: It was called before.
        """
        if self.has_run:
            raise ValueError("a trainer runs once, and this one has run. Make another.")
        self.has_run = True
        with closing(self.writer), closing(self.experience_maker.rollouts.reward_engine), closing(self.media):
            with self.phases.progress:
                summary = self.train()
            self.save(summary)
            self.notify(lambda callback: callback.on_train_end(self, summary))
        self.strategy.close()
        if self.stopped_by:
            raise SystemExit(128 + self.stopped_by)
        return summary

    def train(self) -> dict[str, float]:
        """All steps that are left, with evaluation before the first, after the last one and in between."""
        self.start()
        with full_collections_by_step() as collect_garbage, StopSignals() as signals:
            for step, rows in enumerate(islice(self.sampler, self.num_steps - self.step), start=self.step + 1):
                started = time.perf_counter()
                with self.profiler.step(step):
                    metrics = self.train_step(step, rows)
                self.step, self.train_seconds = step, self.train_seconds + time.perf_counter() - started
                metrics |= self.evaluate(step) | self.phase_metrics(step)
                self.log(step, metrics | self.checkpointer.metrics())
                self.phases.progress.step(step, metrics)
                self.end_step(step, metrics)
                collect_garbage(step)
                self.agree_to_stop(signals)
                self.save_checkpoint(metrics)
                if self.is_over:
                    break
        return self.summary()

    def start(self) -> None:
        """Goes on from a checkpoint, or evaluates the model as it is before the first step."""
        state = self.checkpointer.load()
        if state is not None:
            self.step, self.train_seconds = state.step, state.train_seconds
            self.evaluation.resume(state.before, state.after, state.best)
            self.kl_controller.value = state.kl_coefficient
            self.experience_maker.advantages.shaping.moments = state.reward_moments
        self.update_engine_weights()
        self.notify(lambda callback: callback.on_train_begin(self))
        if state is None:
            self.log(0, self.evaluate(0) | self.phase_metrics(0))

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the model as it is after `step`, or none where no evaluation is due."""
        metrics = self.evaluation.evaluate(step)
        if metrics:
            self.notify(lambda callback: callback.on_evaluate(self, step, metrics))
        return metrics

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.notify(lambda callback: callback.on_step_end(self, step, metrics))

    def notify(self, event: Callable[[Callback], None]) -> None:
        """Tells every callback. Every rank must call it: one that fails on any of them ends all."""
        with self.strategy.collectives.collect("callbacks"):
            for callback in self.callbacks:
                event(callback)

    def agree_to_stop(self, signals: StopSignals) -> None:
        """Every rank must call it: a signal to any of them, or its callback, stops all, after the same step."""
        wishes = [signals.received, self.should_stop]
        number, stop = self.strategy.collectives.all_reduce_max(wishes)
        self.should_stop = bool(stop)
        if self.step < self.num_steps:
            self.stopped_by = int(number)

    @property
    def is_over(self) -> bool:
        """Whether no step follows."""
        return self.step == self.num_steps or self.stopped_by > 0 or self.should_stop

    def summary(self) -> dict[str, float]:
        summary = {"steps": self.step, "train_seconds": self.train_seconds} | self.checkpointer.metrics()
        if self.stopped_by:
            summary["stopped_by_signal"] = self.stopped_by
        return summary | self.evaluation.summary()

    def train_step(self, step: int, rows: Sequence[int]) -> dict[str, float]:
        """One iteration: rollout, roles, rewards, update, weight sync, in the order of the runtime architecture."""
        started = time.perf_counter()
        means = Means()
        waited = self.strategy.collectives.waited
        waited.clear()
        prompts = self.media.decoded(self.share(self.prompts, rows))
        self.media.prefetch(self.share(self.prompts, self.sampler.peek()))
        further = partial(self.further_prompts, step, rows)
        rollout = self.experience_maker.make_experience_list(prompts, step, self.kl_controller.value, means, further)
        self.replay_buffer.fill(rollout.experiences, rollout.plan)
        self.phases("train")
        train_metrics = self.ppo_train(step, means)
        self.replay_buffer.clear()
        sync = self.update_engine_weights()
        means.add("time/generate_waiting", waited[GENERATION], 1)
        metrics = merged_metrics(self.strategy.collectives, means, "reward") | train_metrics | sync.metrics()
        metrics["kl/coefficient"] = self.kl_controller.value
        self.update_kl(metrics, len(rows))
        self.write_samples(step, rollout.experiences)
        local_tokens = sum(sample.num_tokens for sample in rollout.experiences)
        [num_tokens] = self.strategy.collectives.all_reduce_sum([local_tokens])
        seconds = time.perf_counter() - started
        metrics |= {"time/step": seconds, "tokens_per_second": num_tokens / seconds}
        return metrics

    def update_kl(self, metrics: Mapping[str, float], num_prompts: int) -> None:
        if "kl/reference" in metrics:
            self.kl_controller.update(metrics["kl/reference"], num_prompts * self.config.rollout.n_samples_per_prompt)

    def share(self, prompts: Sequence[PromptExample], rows: Sequence[int]) -> list[NumberedPrompt]:
        """This rank's prompts among `rows`, numbered by their place there."""
        return [(i, prompts[rows[i]]) for i in self.strategy.local_share(len(rows))]

    def further_prompts(self, step: int, rows: Sequence[int], num_batches: int) -> Sequence[NumberedPrompt] | None:
        """This rank's prompts of one more batch of the step, in random order; None once all rows were drawn."""
        size, seed = len(rows), self.config.train.seed
        taken = set(rows)
        for batch in range(1, num_batches + 1):
            more = further_rows(len(self.prompts), size, taken, (seed, step, batch))
            taken |= set(more)
        if not more:
            return None
        start = num_batches * size
        return self.media.decoded([(start + i, prompt) for i, prompt in self.share(self.prompts, more)])

    def update_engine_weights(self) -> SyncRecord:
        self.phases("sync")
        return self.strategy.update_engine_weights(self.actor.model)

    # Records

    def phase_metrics(self, step: int) -> dict[str, float]:
        """Seconds and memory of the phases since the last call, of rank 0 where it logs them."""
        records = self.phases.collect()
        by_owner = self.config.report.print_memory_ledger
        if by_owner and self.strategy.is_rank_0:
            # The console of the display, so that the table appears above its panel.
            get_console().print(ledger_table(records, f"Memory of rank 0, step {step}"))
        return phase_seconds(records) | ledger_metrics(records, by_owner)

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
        if not self.checkpointer.is_due(self.step, is_last=self.is_over):
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
            reward_moments=self.experience_maker.advantages.shaping.moments,
        )
        if self.checkpointer.save(state):
            self.notify(lambda callback: callback.on_checkpoint(self, self.step))
