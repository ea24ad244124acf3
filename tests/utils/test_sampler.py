import logging
from itertools import islice

import pytest

from lightrft.config.arguments import TailBatch
from lightrft.utils.sampler import PromptSampler


def sampler(
    num_rows: int = 5, batch_size: int = 2, num_episodes: int = 2, seed: int = 1, tail: TailBatch = "drop"
) -> PromptSampler:
    return PromptSampler(num_rows, batch_size, num_episodes, seed, tail)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    caplog.set_level(logging.INFO, "lightrft")
    return caplog


def test_two_episodes_of_five_prompts_drop_one_each_and_say_so(log):
    """DIST-05: 5 // 2 = 2 steps an episode, 4 in all; nothing depends on a rank."""
    batches = list(sampler(tail="drop"))
    assert [len(batch) for batch in batches] == [2, 2, 2, 2]
    assert all(len({*first, *second}) == 4 for first, second in (batches[:2], batches[2:]))
    (message,) = log.messages
    assert "2 steps per episode, 4 in all" in message and "the last 1 of an episode's order are left out" in message


def test_two_episodes_of_five_prompts_pad_one_each_and_say_so(log):
    """DIST-05: 3 steps an episode, 6 in all; every row is in its episode, and none twice in a batch."""
    batches = list(sampler(tail="pad"))
    assert [len(set(batch)) for batch in batches] == [2] * 6
    for episode in (batches[:3], batches[3:]):
        assert {row for batch in episode for row in batch} == set(range(5))
    (message,) = log.messages
    assert "3 steps per episode, 6 in all" in message and "takes 1 from the next episode's order" in message


def test_padding_comes_from_the_next_episodes_order_without_the_rows_at_hand():
    for seed in range(20):
        batches = list(sampler(seed=seed, tail="pad"))
        following = [row for batch in batches[3:] for row in batch]
        last, padding = batches[2]
        assert padding == next(row for row in following if row != last)


def test_fewer_rows_than_a_batch_are_an_error_with_both_numbers_or_repeat():
    """DATA-03"""
    with pytest.raises(ValueError, match="3 prompts < rollout_batch_size=8"):
        sampler(num_rows=3, batch_size=8, tail="drop")
    (batch,) = sampler(num_rows=3, batch_size=8, num_episodes=1, tail="pad")
    # 8 = 3 + 3 + 2: two whole orders and a part of the third.
    assert len(batch) == 8
    assert set(batch[:3]) == set(batch[3:6]) == {0, 1, 2}
    with pytest.raises(ValueError, match="0 prompts"):
        sampler(num_rows=0, tail="pad")


def test_steps_are_counted_as_they_come():
    for num_rows in range(4, 10):
        for tail in ("drop", "pad"):
            one = sampler(num_rows=num_rows, batch_size=4, num_episodes=3, tail=tail)
            assert one.total_steps == 3 * one.steps_per_episode == len(list(one))


def test_an_order_is_fixed_by_its_seed_and_episode():
    def orders(seed: int) -> list[list[int]]:
        return list(sampler(num_rows=50, batch_size=50, num_episodes=3, seed=seed))

    assert orders(1) == orders(1)
    different = [tuple(order) for seed in (0, 1, 2) for order in orders(seed)]
    assert len(set(different)) == 9
    assert all(sorted(order) == list(range(50)) for order in different)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_sampler_loaded_after_any_step_gives_the_rest_of_an_unbroken_run(tail):
    """CKPT-01"""
    whole = list(sampler(tail=tail))
    for steps in range(len(whole) + 1):
        first = sampler(tail=tail)
        assert list(islice(first, steps)) == whole[:steps]
        second = sampler(tail=tail)
        second.load_state_dict(first.state_dict())
        assert list(second) == whole[steps:]
        assert list(second) == []


def test_the_state_stands_behind_the_batch_at_hand():
    one = sampler()
    assert one.state_dict() == {"episode": 0, "offset": 0}
    states = [one.state_dict() for _ in one]
    assert states == [
        {"episode": 0, "offset": 2},
        {"episode": 1, "offset": 0},
        {"episode": 1, "offset": 2},
        {"episode": 2, "offset": 0},
    ]


def test_a_state_of_other_data_or_batches_is_refused():
    for offset in (1, 4, -2):
        with pytest.raises(ValueError, match=f"offset {offset}, 5 prompts in batches of 2"):
            sampler().load_state_dict({"episode": 0, "offset": offset})
