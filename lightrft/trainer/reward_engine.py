"""RewardComputationEngine: scores of samples, computed while the models run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrft.config import Config
from lightrft.config.recipes import Recipe
from lightrft.rewards.aggregation import weighted_sum
from lightrft.rewards.grading import Grading, PendingGrades
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.recipes import RewardPlan
from lightrft.rewards.records import FaultKind, Grade, RewardInput, RewardOutput
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.local_rewards import LocalRewardModels
from lightrft.types import Experience, PromptExample
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

SHOWN_FAULTS = 3
"""Of different faults, in an error."""


class RewardError(RuntimeError):
    """Responses could not be graded; the message has their rows and why."""


@dataclass(frozen=True)
class Submission:
    """Samples that are being graded."""

    samples: Sequence[Experience]
    recipes: Sequence[Recipe]
    pending: Sequence[PendingGrades]


class RewardComputationEngine:
    """Has the components of the reward graded, adds them up, and raises errors on all ranks alike.

    Args:
        config: All flags.
        strategy: Of the run.
        plan: What grades each component.
        pool: Processes for the plan's graders; None where it has none.
        local_models: None where the run has none.
    """

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        plan: RewardPlan,
        pool: GraderPool | None = None,
        local_models: LocalRewardModels | None = None,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.plan = plan
        self.local_models = local_models
        self._grading = Grading(plan, pool, config.reward.reward_timeout_seconds)
        self._submission: Submission | None = None

    def submit(self, samples: Sequence[Experience]) -> None:
        """Starts to score `samples`; `result` waits for it."""
        assert self._submission is None, "the result of an earlier submission was not taken"
        recipes = [self.plan.recipes.of(sample.example.label) for sample in samples]
        inputs = [
            reward_input(sample.example, sample.response, sample.finish_reason, sample.num_response_tokens)
            for sample in samples
        ]
        self._submission = Submission(samples, recipes, self._grading.start(inputs, rows_by_key(recipes)))

    def result(self) -> list[RewardOutput]:
        """Scores of the submitted samples, in their order. Every rank must call it.

        Raises:
            PhaseError: On some rank a function hangs, or a response could not be graded and --reward_errors is stop;
                the message holds the rows, and the tracebacks of functions.
        """
        submission, self._submission = self._submission, None
        assert submission is not None, "submit comes first"
        grades: list[dict[str, Grade]] = [{} for _ in submission.samples]
        # The threads go on while the models score.
        self._add_local_grades(submission, grades)
        outputs: list[RewardOutput] = []
        with self.strategy.collectives.collect("rewards"):
            for pending in submission.pending:
                for (key, i), grade in zip(pending.slots, pending.result(), strict=True):
                    grades[i][key] = grade
            outputs = [weighted_sum(*of_sample) for of_sample in zip(submission.recipes, grades, strict=True)]
            self._report(submission.samples, outputs)
        return outputs

    def close(self) -> None:
        """Ends the grader processes."""
        self._grading.close()

    def _add_local_grades(self, submission: Submission, grades: Sequence[dict[str, Grade]]) -> None:
        if self.local_models is None:
            return
        rows = rows_by_key(submission.recipes)
        by_name = {name: rows.get(key, ()) for key, name in self.plan.models.items()}
        of_models = self.local_models.grade(submission.samples, by_name)
        for key, name in self.plan.models.items():
            for i, grade in zip(by_name[name], of_models[name], strict=True):
                grades[i][key] = grade

    def _report(self, samples: Sequence[Experience], outputs: Sequence[RewardOutput]) -> None:
        """Says which rows have faults, once for each kind.

        Raises:
            RewardError: A fault is an error, and those stop the run.
        """
        if ungradable := faults_by_text(samples, outputs, "ungradable"):
            logger.info("ungradable: %s", fault_report(ungradable, len(samples), 1))
        errors = faults_by_text(samples, outputs, "error")
        if errors and self.config.reward.reward_errors == "stop":
            raise RewardError(fault_report(errors, len(samples), SHOWN_FAULTS))
        if errors:
            logger.warning("left out: %s", fault_report(errors, len(samples), 1))
        elif outputs and all(output.score is None for output in outputs):
            logger.warning("the reward is None for all %d responses of a rank: nothing is learned", len(samples))


def reward_input(
    example: PromptExample, response: str, finish_reason: str, response_length: int | None = None
) -> RewardInput:
    return RewardInput(
        prompt=example.prompt,
        response=response,
        label=example.label,
        reference=example.reference,
        extra=example.extra,
        row=example.row,
        finish_reason=finish_reason,
        media=example.media,
        messages=example.messages,
        response_length=response_length,
    )


def rows_by_key(recipes: Sequence[Recipe]) -> Mapping[str, list[int]]:
    """Which of the samples have each part, by its key."""
    rows: dict[str, list[int]] = defaultdict(list)
    for i, recipe in enumerate(recipes):
        for part in recipe:
            rows[part.key].append(i)
    return rows


def faults_by_text(
    samples: Sequence[Experience], outputs: Sequence[RewardOutput], kind: FaultKind
) -> dict[str, list[int]]:
    """Rows of the data set that have a fault, by what it says; a row is named once for each of its responses."""
    rows: dict[str, list[int]] = defaultdict(list)
    for sample, output in zip(samples, outputs, strict=True):
        for component, fault in output.faults.items():
            if fault.kind == kind:
                rows[f"{component}: {fault.message}"].append(sample.example.row)
    return rows


def fault_report(faults: Mapping[str, Sequence[int]], num_samples: int, shown: int) -> str:
    """How many there are, and the first different ones."""
    texts = [f"row {rows[0]}, {text}" for text, rows in faults.items()]
    num_faults = sum(map(len, faults.values()))
    more = "" if len(texts) <= shown else f"\nand {len(texts) - shown} more of other rows or kinds"
    return f"{num_faults} faults in the rewards of {num_samples} responses\n" + "\n".join(texts[:shown]) + more
