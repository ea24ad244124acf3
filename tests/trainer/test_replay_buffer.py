"""Minibatches come from one permutation of all ranks' samples."""

from lightrft.trainer.replay_buffer import minibatch_orders

ORDERS = [(group, index) for group in range(5) for index in range(2)]


def test_ten_samples_by_four_are_four_four_and_two():
    """NUM-19"""
    minibatches = minibatch_orders(ORDERS, 4, seed=(1, 1, 0))
    assert [len(m) for m in minibatches] == [4, 4, 2]
    assert sorted(order for m in minibatches for order in m) == ORDERS


def test_the_permutation_depends_on_the_seed_and_not_on_who_holds_the_samples():
    dealt_otherwise = ORDERS[1::2] + ORDERS[::2]
    assert minibatch_orders(dealt_otherwise, 4, (1, 2, 0)) == minibatch_orders(ORDERS, 4, (1, 2, 0))
    assert minibatch_orders(ORDERS, 4, (1, 2, 1)) != minibatch_orders(ORDERS, 4, (1, 2, 0))


def test_one_minibatch_is_not_permuted():
    assert minibatch_orders(ORDERS[::-1], 10, (1, 1, 0)) == [ORDERS]
