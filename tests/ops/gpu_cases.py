"""What ranks run in tests of ops over GPUs: several of them on one."""

from __future__ import annotations

import os
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.ops.parallel_behaviour import block, message_of, operands_of, with_gradients
from tpkernels.comm.transports import select as transports
from tpkernels.ops.tensor_parallel.column_linear import column_linear

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def blocks_on_one_gpu(sequence_parallel: bool) -> float:
    """Forward and backward of two layers, several times, against c10d on the CPU: the largest difference."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    worst = 0.0
    cpu = dist.new_group()
    with patch.dict(os.environ, {OVERLAPPING: "1"}):
        for seed in range(5):
            operands = operands_of(seed)
            expected = with_gradients(block, operands, sequence_parallel=sequence_parallel, group=cpu)
            with patch.object(transports, "requested_transport", "symmetric"):
                found = with_gradients(
                    block, [t.to(device) for t in operands], sequence_parallel=sequence_parallel
                )
            torch.cuda.synchronize()
            pairs = zip(found, expected, strict=True)
            worst = max(worst, *(float((x.cpu() - y).norm() / y.norm()) for x, y in pairs))
        dist.barrier()
    return worst


def gpu_shared_without_asking() -> str:
    """What ranks say that share a GPU, unless torch was told that they may."""
    torch.cuda.set_device(0)
    x, w = torch.randn(4, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    with patch.dict(os.environ), patch.object(transports, "requested_transport", "symmetric"):
        os.environ.pop(OVERLAPPING, None)
        return message_of(lambda: column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True))
