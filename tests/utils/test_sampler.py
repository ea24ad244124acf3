import logging
from itertools import islice

import pytest

from lightrft.config.arguments import TailBatch
from lightrft.utils.sampler import MixedSampler, PairSampler, PromptSampler, rows_per_episode


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


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_rows_that_fill_their_batches_leave_nothing_for_the_rule(tail, log):
    sampler(num_rows=6, tail=tail)
    (message,) = log.messages
    assert message.endswith(f"3 steps per episode, 6 in all; tail_batch={tail}: no row of an episode is left over")


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_the_batch_that_was_peeked_at_is_the_next_and_looking_changes_nothing(tail):
    looking, plain = sampler(tail=tail), list(sampler(tail=tail))
    seen = [looking.peek()]
    for batch in looking:
        assert batch == seen[-1]
        seen.append(looking.peek())
        assert looking.peek() == seen[-1]
    assert seen == [*plain, []]


def test_padding_comes_from_the_next_episodes_order_without_the_rows_at_hand():
    for seed in range(20):
        batches = list(sampler(seed=seed, tail="pad"))
        following = [row for batch in batches[3:] for row in batch]
        last, padding = batches[2]
        assert padding == next(row for row in following if row != last)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_fewer_rows_than_a_batch_are_an_error_with_both_numbers(tail):
    """DATA-03: padded, a batch would hold a row twice and train on copies, since keys follow from rows."""
    for num_rows in (3, 0):
        with pytest.raises(ValueError, match=f"{num_rows} prompts < rollout_batch_size=8. Set a smaller"):
            sampler(num_rows=num_rows, batch_size=8, tail=tail)


def test_a_batch_as_large_as_the_data_holds_each_row_once():
    assert [sorted(batch) for batch in sampler(num_rows=3, batch_size=3, tail="pad")] == [[0, 1, 2]] * 2


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


def mixed(
    sizes: tuple[int, ...] = (70, 300), batch_size: int = 10, num_episodes: int = 3, tail: TailBatch = "drop"
) -> MixedSampler:
    """Shares 0.7 and 0.3: 70 rows of the first last for 70 / 0.7 = 100, of which 30 are the second's."""
    return MixedSampler(sizes, (0.7, 0.3), batch_size, num_episodes, seed=1, tail=tail)


def test_an_episode_ends_with_the_first_source_that_runs_out(log):
    """70 / 0.7 = 100 and 300 / 0.3 = 1000: the first ends first. 90 / 0.3 = 300 < 700 / 0.7: there the second does."""
    assert rows_per_episode((70, 300), (0.7, 0.3)) == (70, 30)
    assert rows_per_episode((700, 90), (0.7, 0.3)) == (210, 90)
    assert rows_per_episode((5, 1000), (0.999, 0.001)) == (5, 1)
    assert rows_per_episode((7,), (1.0,)) == (7,)
    assert mixed().steps_per_episode == 10
    assert log.messages[0] == "an episode takes of each source: 70 of 70, 30 of 300 prompts"


def test_every_batch_has_its_shares_and_no_row_comes_twice_in_an_episode():
    """Rows 0 to 69 are the first source's: 7 of each batch of 10."""
    batches = list(mixed())
    assert len(batches) == 30
    assert {sum(row < 70 for row in batch) for batch in batches} == {7}
    for first in (0, 10, 20):
        episode = [row for batch in batches[first : first + 10] for row in batch]
        assert len(set(episode)) == 100 and {row for row in episode if row < 70} == set(range(70))
        assert all(row < 370 for row in episode)


def test_uneven_batches_are_within_two_rows_of_their_shares():
    """8 x 0.7 = 5.6"""
    assert {sum(row < 70 for row in batch) for batch in mixed(batch_size=8)} <= {4, 5, 6, 7}


def test_the_next_episode_takes_other_rows_of_a_source_that_is_left_over():
    batches = list(mixed())
    seconds = [{row for batch in batches[i : i + 10] for row in batch if row >= 70} for i in (0, 10, 20)]
    assert len(seconds[0] | seconds[1] | seconds[2]) > 60
    assert batches[:10] != batches[10:20]


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_mixed_sampler_loaded_after_any_step_gives_the_rest_of_an_unbroken_run(tail):
    """CKPT-01: episodes of 7 + 3 rows in batches of 4, across their borders."""
    whole = list(mixed((7, 9), 4, tail=tail))
    assert len(whole) == (6 if tail == "drop" else 9)
    assert all(len(set(batch)) == 4 for batch in whole)
    for steps in range(len(whole) + 1):
        first, second = mixed((7, 9), 4, tail=tail), mixed((7, 9), 4, tail=tail)
        assert list(islice(first, steps)) == whole[:steps]
        second.load_state_dict(first.state_dict())
        assert list(second) == whole[steps:]


def test_a_mix_smaller_than_a_batch_is_an_error_with_its_rows():
    """DATA-03: 7 + 3 rows."""
    with pytest.raises(ValueError, match="10 prompts < rollout_batch_size=16"):
        mixed((7, 9), 16)


def test_pairs_are_called_by_their_name():
    with pytest.raises(ValueError, match=r"must fill a batch: 3 pairs < train_batch_size=4\. Set a smaller --t"):
        PairSampler(3, 4, num_epochs=1, seed=0)
    assert PairSampler(9, 4, num_epochs=2, seed=0).total_steps == 4
