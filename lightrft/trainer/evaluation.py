"""Evaluation: how good the model is on prompts that it does not train on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from lightrft.config import Config
from lightrft.ops.attempts import majority, pass_at_k, pass_sizes
from lightrft.rewards.answers import answer_of
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.fast_exp_maker import add_fault_means, add_reward_means
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.records import gathered_rows, merged_metrics
from lightrft.trainer.rollouts import Rollouts
from lightrft.types import Experience, PromptExample
from lightrft.utils.logging import get_logger
from lightrft.utils.means import Means
from lightrft.utils.metrics import MetricsWriter

logger = get_logger(__name__)

# Evaluation draws with keys that no training step has, the same each time.
EVALUATION_STEP = 2**32 - 1


class Evaluation:
    """Rewards on the evaluation prompts, through the same rollout and reward path; trains on nothing.

    Every rank has one, and calls it alike.

    Args:
        config: All flags.
        strategy: Deals the prompts over ranks.
        rollouts: Samples responses and has them rewarded.
        prompts: None, or what to evaluate on.
        num_steps: Steps of the run.
        writer: Takes the samples.
        phases: Is told when an evaluation begins.
    """

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        rollouts: Rollouts,
        prompts: Sequence[PromptExample] | None,
        num_steps: int,
        writer: MetricsWriter,
        phases: PhaseClock,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.rollouts = rollouts
        self.prompts = prompts
        self.num_steps = num_steps
        self.writer = writer
        self.phases = phases
        temperature = config.evaluation.eval_temperature
        self.params = replace(rollouts.params, first_token_temperature=None)
        if temperature is not None:
            self.params = replace(self.params, temperature=temperature)
        self.before: Mapping[str, float] = {}
        """Metrics before the first step."""
        self.after: Mapping[str, float] = {}
        """Metrics of the last evaluation after that."""
        self.best: Mapping[str, float] = {}
        """`reward_best`, the highest mean reward, and `best_step`, the first step that had it."""

    def is_due(self, step: int) -> bool:
        """Whether the run evaluates after this step; 0 is its start."""
        every = self.config.evaluation.eval_steps
        at_end = step in (0, self.num_steps)
        return self.prompts is not None and (at_end or (every > 0 and step % every == 0))

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the model as it is after `step`, or none where no evaluation is due."""
        if self.prompts is None or not self.is_due(step):
            return {}
        self.phases("evaluate")
        samples = self.rewarded_samples(self.prompts)
        metrics = merged_metrics(self.strategy.collectives, self.means(samples), "eval")
        self.write_samples(step, samples)
        self.keep(step, metrics)
        return metrics

    def rewarded_samples(self, prompts: Sequence[PromptExample]) -> list[Experience]:
        """This rank's samples, all of a prompt together."""
        # Decoded media of all prompts at once may be more than a host holds.
        with_media = any(example.media for example in prompts)
        size = self.config.rollout.rollout_batch_size if with_media else max(1, len(prompts))
        batches = [
            [(start + i, prompts[start + i]) for i in self.strategy.local_share(min(size, len(prompts) - start))]
            for start in range(0, len(prompts), size)
        ]
        num_samples = self.config.evaluation.eval_n_samples_per_prompt
        return self.rollouts.rewarded(self.rollouts.rollout(batches, EVALUATION_STEP, num_samples, self.params))

    def means(self, samples: Sequence[Experience]) -> Means:
        """What this rank's samples contribute to the metrics."""
        options = self.config.evaluation
        means = Means()
        add_reward_means(means, samples, "eval")
        for sample in samples:
            add_fault_means(means, sample, "eval")
            means.add("eval/response_length", sample.num_response_tokens, 1)
            means.add("eval/truncated", sample.finish_reason == "length", 1)
        for _, group in groupby(samples, key=lambda sample: sample.group):
            add_group_means(means, group, options.eval_n_samples_per_prompt, options.eval_pass_threshold)
        return means

    def write_samples(self, step: int, samples: Sequence[Experience]) -> None:
        with_tokens = self.config.report.save_token_log_probs
        rows = gathered_rows(self.strategy.collectives, step, samples, with_tokens)
        with self.strategy.collectives.collect("writing samples"):
            self.writer.log_eval_samples(rows)

    def keep(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remembers the first, the last and the best, and says what came out."""
        if step == 0:
            self.before = metrics
        else:
            self.after = metrics
        reward = metrics.get("eval/mean")
        if reward is None:
            return
        if reward > self.best.get("reward_best", float("-inf")):
            self.best = {"reward_best": reward, "best_step": step}
        if self.strategy.is_rank_0:
            counted = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if "@" in name]
            logger.info("evaluation after step %d: %s", step, ", ".join([f"reward {reward:.3f}", *sorted(counted)]))

    def resume(self, before: Mapping[str, float], after: Mapping[str, float], best: Mapping[str, float]) -> None:
        """Takes over what the part of the run that is done had remembered."""
        self.before, self.after, self.best = before, after, best

    def summary(self) -> dict[str, float]:
        return before_and_after(self.before, self.after) | dict(self.best)


def add_group_means(means: Means, group: Iterable[Experience], num_samples: int, threshold: float) -> None:
    """pass@k and the majority vote among the responses to one prompt; excluded ones do not take part.

    Votes are for answers as `answer_of` reads them; the vote's reward is that of the first response that gives the
    winning one.
    """
    judged = [(sample.reward, answer_of(sample.response)) for sample in group if sample.reward is not None]
    num_passed = sum(reward >= threshold for reward, _ in judged)
    for k in pass_sizes(num_samples):
        if k <= len(judged):
            means.add(f"eval/pass@{k}", pass_at_k(len(judged), num_passed, k), 1)
    if num_samples > 1 and judged:
        reward, _ = judged[majority([answer for _, answer in judged])]
        means.add(f"eval/maj@{num_samples}", reward, 1)


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """`eval/accuracy` becomes `accuracy_before` and `accuracy_after`, `eval/mean` becomes `reward_*`."""
    summary = {}
    for name in sorted(before.keys() & after.keys() - {"eval/std"}):
        short = "reward" if name == "eval/mean" else name.removeprefix("eval/")
        summary |= {f"{short}_before": before[name], f"{short}_after": after[name]}
    return summary
