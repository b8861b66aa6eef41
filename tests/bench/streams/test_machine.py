"""The machine itself, by small programs: what it must find, and what it must let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from bench.streams import Machine, MachineError, cases, record, search
from bench.streams.device import current_device
from bench.streams.record import group_among
from tpkernels.kernels.dgrad import dgrad


def searched(
    body: Callable[[ProcessGroup], object], ranks: int = 1, orders: int = 20, **options: int
) -> None:
    search(record(Machine(ranks, **options), body), orders)  # type: ignore[arg-type]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda")


def test_what_streams_order_is_right():
    def body(group):
        x, y, side = ones(4), ones(4), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.add(x, 1, out=y)
        torch.cuda.current_stream().wait_stream(side)
        return [y * 2]

    program = record(Machine(1), body)
    search(program, 20, [[torch.full((4,), 4.0)]])
    with pytest.raises(MachineError, match="4 of 4 numbers differ from expected"):
        search(program, 1, [[torch.full((4,), 5.0)]])


def test_tensors_are_taken_for_those_of_a_gpu():
    def body(group):
        x = ones(2, 3)
        assert (x.device, x.is_cuda, x.is_cpu) == (torch.device("cuda", 0), True, False)
        assert x.t().device.type == x.new_empty(1).device.type == torch.zeros_like(x).device.type == "cuda"
        assert torch.zeros(2).is_cpu
        return [x]

    searched(body)


@pytest.mark.parametrize("waits", ["before", "after", "both"])
def test_a_wait_that_is_missing_is_found(waits):
    def body(group):
        x, y, side = ones(4), ones(4), torch.cuda.Stream()
        if waits != "after":
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.add(x, 1, out=y)
        if waits != "before":
            torch.cuda.current_stream().wait_stream(side)
        return [y * 2]

    if waits == "both":
        searched(body)
        return
    with pytest.raises(MachineError, match=r"seed 0: .* in no order"):
        searched(body)


def test_memory_that_is_freed_while_another_stream_reads_it_is_found():
    def body(group, keep=None):
        side, results = torch.cuda.Stream(), []
        for _ in range(2):
            x = ones(4)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                results.append(x + 1)
            if keep is not None:
                keep(x, side)
        torch.cuda.current_stream().wait_stream(side)
        return results

    with pytest.raises(MachineError, match=r"memory is freed .* writes what .* reads"):
        searched(body)
    searched(lambda group: body(group, keep=lambda x, side: x.record_stream(side)))


def test_an_event_marks_what_came_before_it_and_nothing_behind():
    def body(group, late=False):
        x, side, event = ones(4), torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        x.add_(1) if late else None
        side.wait_event(event)
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return [y]

    searched(body)
    with pytest.raises(MachineError, match="in no order"):
        searched(lambda group: body(group, late=True))


def test_an_event_that_was_never_recorded_is_refused():
    with pytest.raises(MachineError, match="never recorded"):
        searched(lambda group: torch.cuda.current_stream().wait_event(torch.cuda.Event()))


def test_a_host_that_reads_the_device_is_refused():
    reads = (
        float,
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: bool((x == 1).all()),
        lambda x: x.tolist(),
    )
    for read in reads:
        with pytest.raises(MachineError, match="the host"):
            searched(lambda group, read=read: read(ones(1)))


def collective(group: ProcessGroup, wait: bool = True, change: bool = False) -> list[Tensor]:
    x = torch.full((2,), float(group.rank()), device="cuda")
    y = torch.empty(2 * group.size(), device="cuda")
    work = dist.all_gather_into_tensor(y, x, group=group, async_op=True)
    if change:
        x.add_(1)
    if wait:
        work.wait()
    return [y + 0]


def test_a_collective_is_awaited_and_what_it_reads_is_left_alone():
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    search(record(Machine(3), collective), 20, [[expected]] * 3)
    for options in ({"wait": False}, {"change": True}):
        with pytest.raises(MachineError, match="in no order"):
            searched(lambda group, options=options: collective(group, **options), ranks=3)


def test_ranks_that_part_are_told():
    def body(group):
        x, y = ones(2), ones(2 * group.size() if group.rank() else 2)
        if group.rank():
            dist.all_gather_into_tensor(y, x, group=group)
        else:
            dist.all_reduce(y, group=group)
        return [y]

    with pytest.raises(MachineError, match=r"different collectives: '.*' of rank . meets '.*' of rank [01]"):
        searched(body, ranks=2)


def test_a_rank_that_makes_no_call_leaves_the_others_waiting():
    def body(group):
        y = ones(2)
        if group.rank() != 1:
            dist.all_reduce(y, group=group)
        return [y]

    said = r"can continue(.|\n)*all-reduce .* it waits for ranks \[1\](.|\n)*rank 1 has done all"
    with pytest.raises(MachineError, match=said):
        searched(body, ranks=3)


def test_sums_are_taken_in_the_order_of_ranks():
    def body(group):
        y = torch.full((2,), [1e8, 1.0, -1e8][group.rank()], device="cuda")
        dist.all_reduce(y, group=group)
        return [y]

    search(record(Machine(3), body), 20, [[torch.zeros(2)]] * 3)  # 1e8 + 1 is 1e8 in fp32


def captured(group: ProcessGroup, join: bool = True, inside: Callable[[], object] = int) -> list[Tensor]:
    x, side, graph = ones(4), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if join:
            torch.cuda.current_stream().wait_stream(side)
        inside()
    results = []
    for _ in range(3):
        x.add_(1)
        graph.replay()
        results.append(y.clone())
    return results


def test_a_graph_does_the_same_again_with_other_numbers():
    expected = [torch.full((4,), value) for value in (4.0, 6.0, 8.0)]
    search(record(Machine(1), captured), 20, [expected])


def test_captures_that_would_fail_are_refused():
    with pytest.raises(MachineError, match="has not been joined"):
        searched(lambda group: captured(group, join=False))
    with pytest.raises(MachineError, match="the host waits for the device in a capture"):
        searched(lambda group: captured(group, inside=torch.cuda.synchronize))


def test_a_capture_that_waits_for_what_came_before_it_is_refused():
    def body(group):
        before = torch.cuda.current_stream().record_event()
        return captured(group, inside=lambda: torch.cuda.current_stream().wait_event(before))

    with pytest.raises(MachineError, match="waits for an event outside the capture"):
        searched(body)


def test_a_stream_goes_on_after_a_capture_where_it_was():
    """What it did before is not forgotten, and what was captured has not run."""

    def body(group):
        x, graph, side = ones(4), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = torch.zeros(4, device="cuda")
        with torch.cuda.graph(graph, stream=side):
            y.add_(x)
        with torch.cuda.stream(side):
            y.add_(5)
        torch.cuda.current_stream().wait_stream(side)
        return [y + 0]

    search(record(Machine(1), body), 20, [[torch.full((4,), 5.0)]])


def test_what_a_kernel_is_loaded_for_orders_nothing():
    """The host may wait there for all that the device does, and may not."""

    def body(group):
        x, side = ones(4), torch.cuda.Stream()
        with torch.cuda.stream(side):
            current_device().load("a kernel")
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        return [y + 0]

    with pytest.raises(MachineError, match="in no order"):
        searched(body)


def test_a_tensor_of_a_side_stream_may_go_in_a_capture():
    def body(group):
        x, u, side, graph = ones(4), ones(4), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                t = x * 2
                torch.mul(t, 2, out=u)
            torch.cuda.current_stream().wait_stream(side)
            del t
        graph.replay()
        return [u + 0]

    search(record(Machine(1), body), 20, [[torch.full((4,), 4.0)]])


def test_what_the_host_has_is_read_when_it_is_copied():
    def body(group):
        staged, results = torch.zeros(2), []
        for value in range(3):
            staged.fill_(value)
            results.append(ones(2).copy_(staged))
        return results

    search(record(Machine(1), body), 5, [[torch.full((2,), float(value)) for value in range(3)]])
    with pytest.raises(MachineError, match="the host copies"):
        searched(lambda group: torch.zeros(1).copy_(ones(1)))


def test_products_of_batches_and_kernels_without_programs_run():
    def body(group):
        current_device().enqueue("a grid of nothing", [])
        return [torch.bmm(ones(2, 3, 4), ones(2, 4, 5))]

    search(record(Machine(1), body), 5, [[torch.full((2, 3, 5), 4.0)]])


def test_what_is_not_there_is_refused():
    def greatest(group):
        dist.all_reduce(ones(2), op=dist.ReduceOp.MAX, group=group)

    def of_some(group):
        if (alone := dist.new_group([0])) is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(ones(2), group=alone)

    for body, said in ((greatest, "expected ReduceOp.SUM"), (of_some, "or of `group_among`")):
        with pytest.raises(MachineError, match=said):
            searched(body, ranks=2)


def test_shared_memory_is_nobody_elses():
    """Nor what was freed before it was opened."""

    def body(group):
        gone = torch.zeros(1, device="cuda")
        del gone
        memory = symmetric_memory.empty(8, dtype=torch.int32, device="cuda")
        symmetric_memory.rendezvous(memory, group).get_buffer(1 - group.rank(), (8,), torch.int32)[4:].fill_(
            7
        )
        return [ones(1)]

    searched(body, ranks=2)


def test_a_product_beside_a_collective_is_told_on_request():
    def body(group):
        x = ones(16, 16)
        work = dist.all_reduce(x, group=group, async_op=True)
        y = ones(16, 16) @ ones(16, 16)
        work.wait()
        return [y + x]

    program = record(Machine(2), body)
    search(program, 5)
    with pytest.raises(MachineError, match="leaves 0 processors while"):
        search(program, 5, waves=True)


PRODUCTS = {  # whether each leaves the processors that torch's setting reserves, with cuBLAS preferred and Lt
    "mm": (lambda x: x @ x, {"cublas": False, "cublaslt": True}),
    "batches": (lambda x: torch.bmm(x[None], x[None]), {"cublas": False, "cublaslt": True}),
    "sum": (lambda x: torch.addmm(x, x, x), {"cublas": False, "cublaslt": True}),
    "bias": (lambda x: functional.linear(x, x, x[0]), {"cublas": True, "cublaslt": True}),
    "ours": (lambda x: dgrad(x, x), {"cublas": True, "cublaslt": True}),
}


@pytest.mark.parametrize("preferred", ["cublas", "cublaslt"])
@pytest.mark.parametrize(("product", "obeys"), PRODUCTS.values(), ids=PRODUCTS)
def test_libraries_are_told_apart_by_whether_they_read_the_setting(product, obeys, preferred):
    def body(group):
        settings, x, y = current_device().settings, ones(64, 64), ones(64, 64)
        before = replace(settings)
        settings.reserved = 1
        settings.library = getattr(torch._C._BlasBackend, preferred.capitalize())
        work = dist.all_reduce(y, group=group, async_op=True)
        product(x)
        work.wait()
        vars(settings).update(vars(before))
        return [y + 0]

    program = record(Machine(2), body)
    if obeys[preferred]:
        search(program, 2, waves=True)
        return
    with pytest.raises(MachineError, match="leaves 0 processors while"):
        search(program, 2, waves=True)


@pytest.mark.parametrize(("setting", "value"), [("reserved", 2), ("library", torch._C._BlasBackend.Cublaslt)])
def test_a_setting_that_is_not_restored_is_named(setting, value):
    def body(group):
        setattr(current_device().settings, setting, value)

    with pytest.raises(MachineError, match=f"rank 0 ends with .*{value}"):
        record(Machine(2), body)


def test_a_program_ends_when_its_caller_can_read_the_results():
    def body(group):
        with torch.cuda.Stream():
            return [ones(4)]

    with pytest.raises(MachineError, match=r"the caller reads its results .* in no order"):
        searched(body)


def in_two_groups(world: ProcessGroup, leaves: int = 2) -> list[Tensor]:
    """Sums over pairs, and over the ranks of one place in all pairs, next to a product."""
    rank = world.rank()
    groups = [group_among([rank // 2 * 2, rank // 2 * 2 + 1]), group_among([rank % 2, rank % 2 + 2])]
    sums = [torch.full((2,), float(rank), device="cuda") for _ in groups]
    current_device().settings.reserved = leaves
    works = [dist.all_reduce(y, group=each, async_op=True) for y, each in zip(sums, groups, strict=True)]
    functional.linear(ones(16, 16), ones(16, 16), ones(16))
    current_device().settings.reserved = None
    for work in works:
        work.wait()
    return [y + 0 for y in sums]


def test_groups_are_communicators_of_their_own():
    wanted = [[torch.full((2,), total) for total in totals] for totals in ((1, 2), (1, 4), (5, 2), (5, 4))]
    search(
        record(Machine(4), in_two_groups),
        20,
        [[t.float() for t in of_rank] for of_rank in wanted],
        waves=True,
    )


def test_a_product_beside_two_groups_leaves_processors_to_both():
    program = record(Machine(4), partial(in_two_groups, leaves=1))
    with pytest.raises(MachineError, match=r"leaves 1 processors while .* and .* which need 2"):
        search(program, 1, waves=True)


def test_a_communicator_runs_one_kernel_at_a_time():
    """Two in flight of one group take the processors of one."""

    def body(group):
        sums = [ones(2), ones(2)]
        current_device().settings.reserved = 1
        works = [dist.all_reduce(y, group=group, async_op=True) for y in sums]
        functional.linear(ones(16, 16), ones(16, 16), ones(16))
        current_device().settings.reserved = None
        for work in works:
            work.wait()
        return [y + 0 for y in sums]

    search(record(Machine(2), body), 20, [[torch.full((2,), 2.0)] * 2] * 2, waves=True)


def test_groups_that_wait_for_each_other_with_all_processors_are_found():
    """Ranks that start two communicators in other orders, where the blocks of one only fit."""

    def body(world):
        order = [0, 1] if world.rank() else [1, 0]
        groups, sums = [group_among([0, 1]) for _ in range(2)], [ones(2), ones(2)]
        for number in order:
            dist.all_reduce(sums[number], group=groups[number])
            torch.cuda.synchronize()
        return [y + 0 for y in sums]

    with pytest.raises(MachineError, match="no rank can continue"):
        searched(body, ranks=2, processors=1)


@pytest.mark.parametrize("channel", [0, 1])
def test_two_barriers_at_once_need_two_channels(channel):
    def body(group):
        memory = symmetric_memory.empty(8, dtype=torch.int32, device="cuda")
        handle, side = symmetric_memory.rendezvous(memory, group), torch.cuda.Stream()
        handle.barrier(0, 1000)
        with torch.cuda.stream(side):
            handle.barrier(channel, 1000)
        torch.cuda.current_stream().wait_stream(side)
        return [ones(1)]

    if channel:
        searched(body, ranks=2)
        return
    with pytest.raises(MachineError, match="may run at once on channel"):
        searched(body, ranks=2)


def test_a_wait_for_a_rank_that_never_comes_runs_out_and_the_host_is_told():
    assert "rows of rank 0 (chunk 0) did not arrive" in cases.rank_that_never_comes(Machine(2))


def test_a_collective_takes_its_processors_at_once():
    """On sixteen processors it needs two."""
    program, expected = cases.program_of("mlp, sequence-parallel", Machine(4, processors=16), "c10d")
    assert {task.needs_at_once for task in program.tasks} == {1, 2}
    search(program, 5, expected, waves=True)
