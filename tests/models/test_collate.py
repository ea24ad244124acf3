"""Micro-batches carry each sample's tokens, masks and fields in order."""

import torch

from lightrft.models.collate import collate, micro_batches
from tests.tiny_models import sample


def test_packed_positions_restart_and_borders_match():
    micro = collate([sample([5, 6], [7]), sample([8], [9, 3, 4])], "packed")
    assert micro.model_inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 4]]
    assert micro.model_inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert micro.model_inputs["cu_seq_lens_q"].tolist() == [0, 3, 7]
    # Response token at 2 is predicted at 1; those at 4, 5, 6 at 3, 4, 5.
    assert micro.response_index.tolist() == [1, 3, 4, 5]
    assert micro.last_index.tolist() == [2, 6]
    assert micro.target_ids.tolist() == [7, 9, 3, 4]
    assert micro.lengths == (1, 3)


def test_padded_rows_are_filled_on_the_right():
    micro = collate([sample([5, 6], [7]), sample([8], [9, 3, 4])], "padded")
    assert micro.model_inputs["input_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 3, 4]]
    assert micro.model_inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert micro.response_index.tolist() == [1, 4, 5, 6]
    assert micro.last_index.tolist() == [2, 7]


def test_fields_are_concatenated_and_absent_ones_stay_none():
    micro = collate(
        [sample([5], [7], advantages=torch.tensor([1.0])), sample([8], [9, 3], advantages=torch.tensor([2.0, 3.0]))],
        "packed",
    )
    assert micro.advantages is not None and micro.advantages.tolist() == [1.0, 2.0, 3.0]
    assert micro.values is None


def test_an_empty_micro_batch_runs_the_shortest_sample_with_no_token_kept():
    """DIST-01: a rank with fewer micro-batches still joins every forward."""
    samples = [sample([5, 6], [7, 8]), sample([8], [9])]
    (first, _, first_is_last), (second, indices, second_is_last) = micro_batches(
        samples, [[0, 1], []], "packed", torch.device("cpu")
    )
    assert first.action_mask.all() and not first_is_last
    assert second.model_inputs["input_ids"].tolist() == [[8, 9]]
    assert not second.action_mask.any() and second_is_last and indices == []


def test_a_rank_without_samples_runs_a_fixed_one():
    [(micro, _, _)] = micro_batches([], [[]], "packed", torch.device("cpu"))
    assert not micro.action_mask.any() and micro.advantages is not None
