"""What the desync report says."""

from dataclasses import replace

from lightrft.strategy.utils.desync import RankState, describe_desync
from lightrft.strategy.utils.trace import CollectiveTrace

WAITING = RankState(site="all_reduce at a.py:3", sequence=12, inside=True, age_seconds=20.0)
BEHIND = RankState(site="barrier at a.py:2", sequence=11, inside=False, age_seconds=31.2)


def test_a_rank_that_is_behind_is_missing():
    assert describe_desync([WAITING, BEHIND, WAITING], timeout_seconds=30).splitlines() == [
        "ranks 0, 2 waiting for 20.0 s (the timeout is 30 s) in all_reduce at a.py:3 (#12): rank 1 missing",
        "  ranks 0, 2 in all_reduce at a.py:3 (#12) for 20 s",
        "  rank 1 in no collective since 31 s; last: barrier at a.py:2 (#11)",
    ]


def test_a_rank_at_another_site_with_the_same_number_is_missing():
    elsewhere = replace(WAITING, site="broadcast at b.py:9", age_seconds=19.0)
    report = describe_desync([elsewhere, WAITING], timeout_seconds=30)
    assert "rank 1 waiting for 20.0 s (the timeout is 30 s) in all_reduce at a.py:3 (#12): rank 0 missing" in report
    assert "rank 0 in broadcast at b.py:9 (#12) for 19 s" in report


def test_a_rank_that_has_left_the_site_already_is_not_missing():
    report = describe_desync([WAITING, replace(WAITING, inside=False)], timeout_seconds=30)
    assert (
        "rank 0 waiting for 20.0 s (the timeout is 30 s) in all_reduce at a.py:3 (#12): all ranks are there" in report
    )


def test_a_rank_that_has_ended_or_fallen_silent_is_missing():
    ended = replace(WAITING, ended=True, inside=False)
    silent = replace(WAITING, lost="without a sign of life since 9 s")
    report = describe_desync([WAITING, ended, silent], timeout_seconds=30)
    assert "ranks 1-2 missing" in report
    assert "rank 1 ended; last: all_reduce at a.py:3 (#12)" in report
    assert "rank 2 without a sign of life since 9 s; was in all_reduce at a.py:3 (#12) for 20 s" in report


def test_a_rank_before_its_first_site_is_named():
    assert "rank 1 in no collective since 4 s; it has entered none yet" in describe_desync(
        [WAITING, RankState(age_seconds=4.0)], timeout_seconds=30
    )


def test_a_site_is_named_by_the_line_that_asked_for_it():
    trace = CollectiveTrace()
    with trace.site("forward"):
        pass
    assert str(trace.state.site).startswith("forward at strategy/test_desync.py:")


def test_an_exception_in_a_site_tells_which_one():
    trace = CollectiveTrace()
    try:
        with trace.site("forward"):
            raise RuntimeError("connection closed by peer")
    except RuntimeError as error:
        assert error.__notes__[0].startswith("Raised in forward at strategy/test_desync.py:")
    assert not trace.state.inside
