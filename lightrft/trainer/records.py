"""Records of a step over all ranks: metrics, and the lines of samples.jsonl."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightrft.strategy.utils.collectives import Collectives
from lightrft.types import Experience
from lightrft.utils.means import Means, merged_means


def merged_metrics(collectives: Collectives, means: Means, prefix: str) -> dict[str, float]:
    """Means over all ranks, and the rewards' deviation under `prefix`. Every rank must call it."""
    return with_deviation(merged_means(collectives.all_gather_objects(means.sums)), prefix)


def with_deviation(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Replaces the mean square by the population standard deviation."""
    square = metrics.pop(f"{prefix}/mean_square", None)
    if square is not None:
        metrics[f"{prefix}/std"] = max(square - metrics[f"{prefix}/mean"] ** 2, 0.0) ** 0.5
    return metrics


def gathered_rows(
    collectives: Collectives, step: int, samples: Iterable[Experience], with_tokens: bool
) -> list[dict[str, Any]]:
    """Lines for the samples of all ranks, ordered by prompt. Every rank must call it."""
    parts = collectives.all_gather_objects([sample_row(step, sample, with_tokens) for sample in samples])
    return sorted((row for part in parts for row in part), key=lambda row: (row["group"], row["index"]))


def sample_row(step: int, sample: Experience, with_tokens: bool) -> dict[str, Any]:
    """One line; with tokens it holds their ids and the log-probs of each role that has scored them.

    A sample that has been given advantages has their mean over its kept tokens, or None where none is kept.
    """
    row = {
        "step": step,
        "group": sample.group,
        "index": sample.index,
        "row": sample.example.row,
        "prompt": sample.example.prompt,
        "response": sample.response,
        "label": sample.example.label,
        "reward": sample.reward,
        **{f"reward/{name}": value for name, value in sample.reward_components.items()},
        **{f"fault/{name}": fault.message for name, fault in sample.reward_faults.items()},
        "finish_reason": sample.finish_reason,
        "num_response_tokens": sample.num_response_tokens,
    }
    if sample.advantages is not None:
        kept = sample.advantages[sample.action_mask]
        row["advantage"] = float(kept.double().mean()) if len(kept) else None
    return row | token_columns(sample) if with_tokens else row


def token_columns(sample: Experience) -> dict[str, list[float]]:
    """One entry per token: of the prompt, and of the response in all other columns."""
    ids = sample.input_ids
    columns: dict[str, Tensor | None] = {
        "prompt_ids": ids[: sample.response_start],
        "response_ids": ids[sample.response_start :],
        "rollout_log_probs": sample.rollout_log_probs,
        "action_log_probs": sample.action_log_probs,
        "base_action_log_probs": sample.base_action_log_probs,
    }
    return {name: column.tolist() for name, column in columns.items() if column is not None}
