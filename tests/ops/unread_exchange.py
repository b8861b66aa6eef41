"""A program of two ranks that end while one still waits for the other to read; prints their exit codes."""

from __future__ import annotations

import multiprocessing
import sys

import torch
import torch.distributed as dist

from tests.loopback import start
from tests.ops.transport_cases import open_exchanges, using
from tpkernels.ops import column_linear


def serve(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    with using("shared"):
        column_linear(torch.randn(2, 8), torch.randn(4, 8), None, dist.group.WORLD, sequence_parallel=True)
        (exchange,) = open_exchanges()
        for _ in range(4 * (rank == 0)):
            exchange.released(exchange.order.begun)
            start(exchange, [torch.zeros(2, 8)] * 2)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=serve, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
    print([process.exitcode for process in ranks])
    for process in ranks:
        process.kill()
