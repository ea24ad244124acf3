"""PPOTrainer: the loop of rollouts and updates, evaluation and the run's records."""

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.strategy.strategy_base import StrategyBase, TrainedRole
from lightrft.trainer.fast_exp_maker import (
    FastExperienceMaker,
    NumberedPrompt,
    add_reward_means,
    scored,
    with_deviation,
)
from lightrft.trainer.kl_controller import make_kl_controller
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.replay_buffer import ReplayBuffer
from lightrft.types import Experience, PromptExample
from lightrft.utils.logging import get_logger
from lightrft.utils.means import Means, merged_means
from lightrft.utils.metrics import MetricsWriter
from lightrft.utils.sampler import PromptSampler

logger = get_logger(__name__)

# Evaluation draws with keys that no training step has, the same at the start and at the end.
EVALUATION_STEP = 2**32 - 1


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
        eval_prompts: Sequence[PromptExample] | None,
        sampler: PromptSampler,
        tokenizer: PreTrainedTokenizerBase,
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
        self.eval_prompts = eval_prompts
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.num_steps = num_steps
        self.writer = writer
        self.phases = phases
        algorithm = config.algorithm
        self.kl_controller = make_kl_controller(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self.replay_buffer = ReplayBuffer()

    @abstractmethod
    def ppo_train(self, step: int, means: Means) -> dict[str, float]:
        """Step 9: updates actor and critic on the replay buffer. Every rank must call it."""

    def fit(self) -> dict[str, float]:
        """Trains until the steps are done, leaves the process group, and returns what `summary.json` holds."""
        with closing(self.writer):
            with self.phases.progress:
                summary = self.train()
            self.save(summary)
        self.strategy.close()
        return summary

    def train(self) -> dict[str, float]:
        """All steps, with evaluation before and after them."""
        self.update_engine_weights()
        before = after = self.evaluate()
        self.log(0, before | self.phases.collect())
        train_seconds = 0.0
        for step, rows in enumerate(islice(self.sampler, self.num_steps), start=1):
            started = time.perf_counter()
            metrics = self.train_step(step, rows)
            train_seconds += time.perf_counter() - started
            if step == self.num_steps:
                after = self.evaluate()
                metrics |= after | self.phases.collect()
            self.log(step, metrics)
            self.phases.progress.step(step, metrics)
        return {"steps": self.num_steps, "train_seconds": train_seconds} | before_and_after(before, after)

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
        metrics = self.merged(means, "reward") | train_metrics | {"kl/coefficient": self.kl_controller.value}
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

    # Evaluation

    def evaluate(self) -> dict[str, float]:
        """Mean reward on the evaluation prompts, through the same rollout and reward path; trains on nothing."""
        if self.eval_prompts is None:
            return {}
        self.phases("evaluate")
        prompts = self.share(self.eval_prompts, range(len(self.eval_prompts)))
        samples = self.experience_maker.rollout(prompts, EVALUATION_STEP, num_samples=1)
        rewards = self.experience_maker.reward_engine.result()
        means = Means()
        judged = [scored(sample, reward) for sample, reward in zip(samples, rewards, strict=True)]
        add_reward_means(means, judged, "eval")
        return self.merged(means, "eval")

    # Records

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's line. Every rank must call it: what rank 0 cannot write stops all."""
        with self.strategy.collectives.collect("writing metrics"):
            self.writer.log(step, metrics)

    def merged(self, means: Means, prefix: str) -> dict[str, float]:
        return with_deviation(merged_means(self.strategy.collectives.all_gather_objects(means.sums)), prefix)

    def write_samples(self, step: int, experiences: Sequence[Experience]) -> None:
        """Writes the samples of all ranks, ordered by prompt."""
        parts = self.strategy.collectives.all_gather_objects([sample_row(step, sample) for sample in experiences])
        rows = sorted((row for part in parts for row in part), key=lambda row: (row["group"], row["index"]))
        with self.strategy.collectives.collect("writing samples"):
            self.writer.log_samples(rows)

    def save(self, summary: Mapping[str, float]) -> None:
        """Writes the final model and the summary."""
        self.strategy.save_pretrained(self.actor.model, self.tokenizer, f"{self.config.train.save_path}/model")
        with self.strategy.collectives.collect("writing the summary"):
            self.writer.write_summary(summary)


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """`eval/accuracy` becomes `accuracy_before` and `accuracy_after`, `eval/mean` becomes `reward_*`."""
    summary = {}
    for name in sorted(before.keys() & after.keys() - {"eval/std"}):
        short = "reward" if name == "eval/mean" else name.removeprefix("eval/")
        summary |= {f"{short}_before": before[name], f"{short}_after": after[name]}
    return summary


def sample_row(step: int, sample: Experience) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "step": step,
        "group": sample.group,
        "index": sample.index,
        "row": sample.example.row,
        "prompt": sample.example.prompt,
        "response": sample.response,
        "label": sample.example.label,
        "reward": sample.reward,
        **{f"reward/{name}": value for name, value in sample.reward_components.items()},
        "finish_reason": sample.finish_reason,
        "num_response_tokens": sample.num_response_tokens,
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peaks of this process, in GiB, since its start (host) and since the last call (device)."""
    metrics = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        metrics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["memory/device_gib"] = torch.cuda.memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
