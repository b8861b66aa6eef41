"""One engine in the hands of several threads, for the thread sanitizer to watch."""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.buckets.hostile import run_programs
from tests.buckets.test_ext_arguments import arranged, ended_at_once
from tpkernels.comm._ext import ExtensionState, extension

ROUNDS = 600


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


def main() -> None:
    assert extension().state is ExtensionState.LOADED
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    used_by_many()
    for _ in range(60):
        let_go_while_hooks_run()
    for _ in range(5):
        ended_at_once()
    run_programs("threads", range(10), "/dev/null")
    print("no race was seen")


if __name__ == "__main__":
    main()
