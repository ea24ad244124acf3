"""Lines of samples.jsonl."""

from dataclasses import replace

import pytest
import torch

from lightrft.trainer.records import sample_row
from tests.tiny_models import sample

LOG_PROBS = torch.tensor([-0.5, -1.5])


def test_the_advantage_is_the_mean_over_kept_tokens():
    """Of 1, 3 and 100 the last is masked: (1 + 3) / 2 = 2; where all are masked there is none."""
    given = sample([3], [4, 5, 6], advantages=torch.tensor([1.0, 3.0, 100.0]))
    kept = replace(given, action_mask=torch.tensor([True, True, False]))
    assert sample_row(1, kept, with_tokens=False)["advantage"] == 2.0
    excluded = replace(given, action_mask=torch.zeros(3, dtype=torch.bool))
    assert sample_row(1, excluded, with_tokens=False)["advantage"] is None


def test_without_advantages_or_tokens_their_columns_are_left_out():
    row = sample_row(2, sample([3, 4], [5]), with_tokens=False)
    assert list(row) == [
        *("step", "group", "index", "row", "prompt", "response", "label", "reward"),
        *("finish_reason", "num_response_tokens"),
    ]


def test_tokens_come_with_the_log_probs_of_the_roles_in_the_run():
    given = sample([3, 4], [5, 6], rollout_log_probs=LOG_PROBS, action_log_probs=2 * LOG_PROBS)
    row = sample_row(1, given, with_tokens=True)
    columns = {name: value for name, value in row.items() if name.endswith(("_ids", "_log_probs"))}
    assert columns == {
        "prompt_ids": [3, 4],
        "response_ids": [5, 6],
        "rollout_log_probs": [-0.5, -1.5],
        "action_log_probs": [-1.0, -3.0],
    }
    row = sample_row(1, replace(given, base_action_log_probs=LOG_PROBS), with_tokens=True)
    assert row["base_action_log_probs"] == pytest.approx([-0.5, -1.5])
