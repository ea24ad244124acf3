"""What the collector of garbage looks through while a run trains, and when."""

import gc
import weakref

import pytest

from lightrft.utils.garbage import STEPS, full_collections_by_step


class Node:
    itself: "Node"


def old_cycle() -> weakref.ref:
    """Garbage that has survived two looks at younger objects."""
    node = Node()
    node.itself = node
    gc.collect(1)
    return weakref.ref(node)


def make_many_objects() -> None:
    """So many that everything is looked through several times, by the default thresholds."""
    kept = [[] for _ in range(200)]
    for _ in range(2000):
        kept.append([[] for _ in range(500)])
    assert kept


def full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def test_everything_is_looked_through_after_each_hundredth_step_alone():
    thresholds = gc.get_threshold()
    with full_collections_by_step() as collect:
        before = full_collections()
        make_many_objects()
        collect(STEPS - 1)
        dropped = old_cycle()
        assert full_collections() == before
        assert dropped() is not None
        collect(STEPS)
        assert full_collections() == before + 1
        assert dropped() is None
    assert gc.get_threshold() == thresholds


def test_young_garbage_goes_at_once_and_thresholds_come_back_after_an_error():
    thresholds = gc.get_threshold()
    with pytest.raises(KeyError), full_collections_by_step():
        node = Node()
        node.itself = node
        ref = weakref.ref(node)
        del node
        make_many_objects()
        assert ref() is None
        raise KeyError
    assert gc.get_threshold() == thresholds
