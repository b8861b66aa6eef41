"""One engine in the hands of several threads, and ranks that share buckets: for the thread sanitizer.

Ranks are threads here, each with an engine of its own: it sees nothing of other processes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group

from tests.buckets.hostile import run_programs
from tests.buckets.test_ext_arguments import arranged, ended_at_once
from tpkernels.extension import ExtensionState, extension

ROUNDS = 600
SIZES = (60, 7200, 12)  # of buckets that ranks share


def at_once(*functions: Callable[[], object]) -> None:
    """Each in a thread of its own, ROUNDS times. What they refuse (use after `detach`, say) is well."""

    def repeat(function: Callable[[], object]) -> None:
        for _ in range(ROUNDS):
            try:
                function()
            except RuntimeError as error:
                if "GradientBuckets" not in str(error):
                    raise

    threads = [threading.Thread(target=repeat, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def parameters_of_their_own() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of two threads: none is another's, for torch itself races on one parameter's gradient."""
    made = [torch.nn.Parameter(torch.ones(size)) for size in ((4, 3), (5,), ())]
    return made[:2], made[2:]


def backward_of(tensors: list[torch.Tensor]) -> None:
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()


def used_by_many() -> None:
    first, second = parameters_of_their_own()
    engine = arranged(parameters=[*first, *second])
    at_once(
        lambda: backward_of(first),
        lambda: backward_of(second),
        engine.finish,
        lambda: [engine.launched_in_backward(), engine.arrivals(), engine.last_arrivals()],
        lambda: [engine.buckets(), engine.views()],
        lambda: [engine.set_synchronizing(False), engine.set_synchronizing(True)],
    )
    at_once(lambda: backward_of(first), lambda: backward_of(second), engine.detach)


def let_go_while_hooks_run() -> None:
    first, second = parameters_of_their_own()
    engine = arranged(parameters=[*first, *second])
    threads = [threading.Thread(target=backward_of, args=(tensors,)) for tensors in (first, second)]
    for thread in threads:
        thread.start()
    del engine
    for thread in threads:
        thread.join()


def group_of_threads(name: str, rank: int, ranks: int) -> dist.ProcessGroup:
    """In which nothing is sent."""
    group = dist.ProcessGroup(dist.HashStore(), rank, ranks)
    backend = FakeProcessGroup._create_internal(rank, ranks, FakeProcessGroup.Options())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    _register_process_group(name, group)
    return group


def shared_by_ranks(ranks: int, *, reduce_scatter: bool) -> None:
    """Each adds up its shard of all, and writes into all of its own once it has been told."""
    names = [f"thread {rank} of {ranks}, shards: {reduce_scatter}" for rank in range(ranks)]
    groups = [group_of_threads(name, rank, ranks) for rank, name in enumerate(names)]
    parameters = [[torch.nn.Parameter(torch.ones(size)) for size in SIZES] for _ in range(ranks)]
    flats = [[torch.zeros(size) for size in SIZES] for _ in range(ranks)]
    engines = [
        arranged(
            [0, 1, 2],
            [0, 0, 0],
            flats[rank],
            parameters=parameters[rank],
            group=names[rank],
            reduce_scatter=reduce_scatter,
        )
        for rank in range(ranks)
    ]
    doorbells = [torch.zeros(2, dtype=torch.int64) for _ in range(ranks)]
    words = [torch.zeros(2 * len(SIZES), dtype=torch.int64) for _ in range(ranks)]
    for engine in engines:
        every = [flat for own in flats for flat in own]
        engine.meet(False, [*range(ranks)], doorbells, words, every, "", [], 60_000)
        engine.expect([1] * len(SIZES))

    def take_part(rank: int) -> None:
        for number in range(ROUNDS):
            engine, own = engines[rank], parameters[rank]
            engine.zero()
            torch.stack([(tensor * (number + rank)).sum() for tensor in own]).sum().backward()
            engine.launch_rest()
            assert engine.settle(60.0)
            engine.finish()
            if not reduce_scatter:
                assert [tensor.grad[0].item() for tensor in own] == [number + (ranks - 1) / 2] * len(SIZES)

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(take_part, range(ranks)))  # an error of one is one here
    assert len(groups) == ranks  # which engines hold weakly


def main() -> None:
    assert extension().state is ExtensionState.LOADED
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for ranks in (2, 3):
        shared_by_ranks(ranks, reduce_scatter=False)
    shared_by_ranks(2, reduce_scatter=True)
    used_by_many()
    for _ in range(60):
        let_go_while_hooks_run()
    for _ in range(5):
        ended_at_once()
    run_programs("threads", range(10), "/dev/null")
    print("no race was seen")


if __name__ == "__main__":
    main()
