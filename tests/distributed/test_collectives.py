"""Collectives on two gloo ranks, and the phases that agree on errors."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightrft.strategy.utils.collectives import Collectives, PhaseError
from lightrft.strategy.utils.gathering import gather_rows
from lightrft.strategy.utils.trace import CollectiveTrace

CPU = torch.device("cpu")


def _reduce_tensors() -> list[list[float]]:
    collectives = Collectives(CPU)
    values = torch.tensor([1.0, 5.0]) if collectives.rank == 0 else torch.tensor([2.0, 3.0])
    reduced = []
    for op in ("sum", "max", "min"):
        tensor = values.clone()
        assert collectives.all_reduce(tensor, op) is tensor
        reduced.append(tensor.tolist())
    return reduced


def _reduce_values() -> tuple[list[float], list[float]]:
    collectives = Collectives(CPU)
    values = [2.0**53 - 2, 3] if collectives.rank == 0 else [1, -7]
    return collectives.all_reduce_sum(values), collectives.all_reduce_max(values)


def _broadcast() -> tuple[list[int], str]:
    collectives = Collectives(CPU)
    tensor = torch.full((2,), collectives.rank)
    return collectives.broadcast(tensor, src=1).tolist(), collectives.broadcast_object(f"of {collectives.rank}", src=1)


def _gather() -> list[list[int]]:
    collectives = Collectives(CPU)
    return collectives.all_gather_objects([collectives.rank] * (collectives.rank + 1))


def _gather_in_a_group_of_one() -> list[str]:
    collectives = Collectives(CPU)
    groups = [dist.new_group([rank]) for rank in range(2)]
    return collectives.all_gather_objects(f"of {collectives.rank}", group=groups[collectives.rank])


def _time_of_leaving_a_barrier(late_rank: int) -> tuple[float, float]:
    collectives = Collectives(CPU)
    if collectives.rank == late_rank:
        time.sleep(0.3)
    arrived = time.monotonic()
    collectives.barrier()
    return arrived, time.monotonic()


def _exchange_objects() -> list:
    collectives = Collectives(CPU)
    to_zero_and_one = [["0 to 0"], []] if collectives.rank == 0 else [{"from": 1}, None]
    return collectives.all_to_all_objects(to_zero_and_one)


def _exchange_tensors() -> list:
    collectives = Collectives(CPU)
    rows = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
    tensors = {
        "column": rows[:, 1],
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3, dtype=torch.int32),
    }
    return collectives.all_to_all_objects([tensors, tensors])


def _size_of_a_slice_in_flight() -> int:
    sent = []
    collectives = Collectives(CPU)
    storage = torch.zeros(1_000_000, dtype=torch.uint8)
    real = dist.all_to_all_single

    def counting(output, tensor, *splits):
        sent.append(tensor.numel())
        return real(output, tensor, *splits)

    dist.all_to_all_single = counting
    try:
        received = collectives.all_to_all_objects([storage[:10], storage[:10]])
    finally:
        dist.all_to_all_single = real
    assert [tensor.numel() for tensor in received] == [10, 10]
    return sent[1]


def _gather_sharded_tensors(dtype: torch.dtype | None, alone: bool) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    # Three rows, one row (the second rank has none), a vector, and other sizes of an element.
    wholes = [
        torch.arange(6).reshape(3, 2),
        torch.rand(1, 5),
        torch.rand(7, 2, 2).to(torch.bfloat16),
        torch.rand(4, dtype=torch.float64),
    ]
    for whole in wholes:
        dist.broadcast(whole, src=0)
    shards = [distribute_tensor(whole, mesh, [Shard(0)]).to_local() for whole in wholes]
    dtypes = [dtype or whole.dtype for whole in wholes]
    parts = [slice(i, i + 1) for i in range(4)] if alone else [slice(0, 4)]
    gathered = [
        tensor
        for part in parts
        for tensor in gather_rows(shards[part], [w.shape for w in wholes[part]], dtypes[part], CPU, Collectives(CPU))
    ]
    return [torch.equal(w.to(d), again) for w, d, again in zip(wholes, dtypes, gathered, strict=True)]


def _grade(failing_ranks: list[int]) -> str:
    """A phase whose body fails on some ranks; what each rank then raised."""
    collectives = Collectives(CPU)
    try:
        with collectives.collect("reward"):
            if collectives.rank in failing_ranks:
                raise ZeroDivisionError(f"no score on {collectives.rank}")
    except PhaseError as error:
        return f"{error}\ncause: {error.__cause__!r}"
    return "agreed"


def _grade_in_nested_phases() -> int:
    """Rank 1 fails before the inner phase that rank 0 reaches; ranks must still meet afterwards."""
    collectives = Collectives(CPU)
    try:
        with collectives.collect("outer"):
            if collectives.rank == 1:
                raise ZeroDivisionError("early")
            with collectives.collect("inner"):
                pass
    except PhaseError:
        return int(collectives.all_reduce_sum([1])[0])
    return 0


def _interrupt_a_phase() -> str:
    try:
        with Collectives(CPU).collect("reward"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return "at once, without the other rank"


def _raise_phase_error() -> None:
    with Collectives(CPU).collect("reward"):
        raise ZeroDivisionError("everywhere")


def _trace_sites() -> list[tuple[str, int, bool]]:
    trace = CollectiveTrace()
    collectives = Collectives(CPU, trace)
    seen = []

    def note() -> None:
        site = trace.state.site
        seen.append((site.name if site is not None else "", trace.state.sequence, trace.state.inside))

    note()
    with collectives.site("forward"):
        note()
        collectives.barrier()
        note()
    note()
    return seen


def test_tensors_are_reduced_in_place(two_ranks):
    # [1, 5] and [2, 3]
    assert two_ranks.run(_reduce_tensors) == [[[3, 8], [2, 5], [1, 3]]] * 2


def test_counts_are_summed_exactly(two_ranks):
    # fp32 could not tell 2^53 - 1 from 2^53.
    assert two_ranks.run(_reduce_values) == [([2**53 - 1, -4], [2**53 - 2, 3])] * 2


def test_a_broadcast_gives_what_the_source_holds(two_ranks):
    assert two_ranks.run(_broadcast) == [([1, 1], "of 1")] * 2


def test_objects_of_any_size_are_gathered_in_rank_order(two_ranks):
    assert two_ranks.run(_gather) == [[[0], [1, 1]]] * 2


def test_a_group_gathers_its_own_ranks_only(two_ranks):
    assert two_ranks.run(_gather_in_a_group_of_one) == [["of 0"], ["of 1"]]


@pytest.mark.parametrize("late_rank", [0, 1])
def test_no_rank_leaves_a_barrier_before_all_have_come(two_ranks, late_rank):
    times = two_ranks.run(_time_of_leaving_a_barrier, late_rank)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def test_objects_go_to_their_rank_in_order_and_may_be_empty(two_ranks):
    assert two_ranks.run(_exchange_objects) == [[["0 to 0"], {"from": 1}], [[], None]]


def test_tensors_travel_with_dtype_shape_and_values_but_without_a_graph(two_ranks):
    for received in two_ranks.run(_exchange_tensors):
        for tensors in received:
            assert tensors["column"].tolist() == [1, 4] and not tensors["column"].requires_grad
            assert tensors["half"].dtype == torch.bfloat16 and tensors["half"].tolist() == [1.5]
            assert tensors["mask"].dtype == torch.bool and tensors["mask"].tolist() == [True, False]
            assert tensors["scalar"].shape == () and tensors["scalar"].item() == 7
            assert tensors["empty"].shape == (0, 3) and tensors["empty"].dtype == torch.int32


def test_a_slice_travels_without_the_storage_it_looks_into(two_ranks):
    assert max(two_ranks.run(_size_of_a_slice_in_flight)) < 2_000


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("alone", [True, False])
def test_sharded_tensors_become_whole_and_cast_on_each_rank(two_ranks, dtype, alone):
    assert two_ranks.run(_gather_sharded_tensors, dtype, alone) == [[True] * 4] * 2


def test_a_phase_that_fails_nowhere_raises_nowhere(two_ranks):
    assert two_ranks.run(_grade, []) == ["agreed", "agreed"]


def test_an_error_of_rank_1_is_raised_on_both_with_the_traceback_of_rank_1(two_ranks):
    of_0, of_1 = two_ranks.run(_grade, [1])
    for message in (of_0, of_1):
        assert message.startswith("reward failed on rank 1 of 2.\n--- rank 1 ---\nTraceback")
        assert 'raise ZeroDivisionError(f"no score on {collectives.rank}")' in message
        assert "ZeroDivisionError: no score on 1" in message
    assert of_0.endswith("cause: None")
    assert of_1.endswith("cause: ZeroDivisionError('no score on 1')")


def test_errors_of_several_ranks_are_all_told(two_ranks):
    for message in two_ranks.run(_grade, [0, 1]):
        assert message.startswith("reward failed on ranks 0-1 of 2.")
        assert "no score on 0" in message and "no score on 1" in message


def test_the_same_error_on_all_ranks_is_told_once(two_ranks):
    with pytest.raises(PhaseError) as caught:
        two_ranks.run(_raise_phase_error)
    assert "--- ranks 0-1 ---" in str(caught.value)
    assert str(caught.value).count("ZeroDivisionError: everywhere") == 1


def test_ranks_leave_nested_phases_in_step(two_ranks):
    assert two_ranks.run(_grade_in_nested_phases) == [2, 2]


def test_an_interrupt_does_not_wait_for_other_ranks(two_ranks):
    assert two_ranks.run(_interrupt_a_phase) == ["at once, without the other rank"] * 2


def test_the_trace_counts_sites_and_returns_to_the_outer_one(two_ranks):
    expected = [("", 0, False), ("forward", 1, True), ("forward", 2, True), ("forward", 2, False)]
    assert two_ranks.run(_trace_sites) == [expected] * 2


def _waited() -> dict[str, float]:
    collectives = Collectives(CPU)
    collectives.barrier()
    with collectives.collect("work"):
        time.sleep(0.5 * collectives.rank)
    return dict(collectives.waited)


def test_a_phase_knows_how_long_a_rank_waits_for_the_slowest(two_ranks):
    first, second = two_ranks.run(_waited)
    assert first.keys() == second.keys() == {"work"}
    assert first["work"] > 0.25 and first["work"] > 3 * second["work"]
