"""What ranks do with random streams, utilities and mappings under Megatron's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.checks import error_of
from tpkernels.interop.megatron_core import mappings, rng, utilities
from tpkernels.interop.megatron_core import parallel_state as ps
from tpkernels.runtime.random import get_rng_tracker


def streams() -> list[float]:
    """A number of each stream, and whether the CPU's generator is where the caller left it."""
    ps.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    rng.model_parallel_cuda_manual_seed(7)
    drawn = []
    for name in ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"):
        with rng.get_cuda_rng_tracker().fork(name):
            drawn.append(float(torch.rand(1)))
    unchanged = torch.equal(before, torch.get_rng_state())
    return [*drawn, float(unchanged)]


def expected_streams() -> list[list[float]]:
    """Of 4 ranks: tensor rank = rank % 2, expert rank = rank % 2, one rank to an expert."""

    def number(seed: int) -> float:
        return float(torch.rand(1, generator=torch.Generator().manual_seed(seed)))

    return [
        [number(7 + 2718 + rank % 2), number(7 + 1024 + 100 * (rank % 2)), number(7), 1.0]
        for rank in range(4)
    ]


def recomputed() -> list[bool]:
    """Gradients with and without recomputation, and with shards saved; dropout draws alike."""
    ps.initialize_model_parallel(2)
    torch.manual_seed(3)
    rng.model_parallel_cuda_manual_seed(11)
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    asked = []

    def function(x: torch.Tensor, scale: Any) -> torch.Tensor:
        asked.append(rng.is_checkpointing())
        with rng.get_cuda_rng_tracker().fork():
            dropped = torch.nn.functional.dropout(x @ weight, 0.5)
        return torch.nn.functional.dropout(dropped, 0.5) * (2.0 if scale is None else scale)

    moment = get_rng_tracker().snapshot()
    gradients = []
    for distribute in (None, False, True, "without"):
        get_rng_tracker().return_to(moment)
        weight.grad = None
        x = torch.linspace(0, 1, 32).view(4, 8).requires_grad_()
        y = function(x, None) if distribute == "without" else rng.checkpoint(function, distribute, x, None)
        after = torch.get_rng_state()
        y.square().sum().backward()
        gradients.append([y.detach(), x.grad, weight.grad, after])
        found = [x.grad is not None, torch.equal(after, torch.get_rng_state())]
    same = [all(torch.equal(a, b) for a, b in zip(each, gradients[-1], strict=True)) for each in gradients]
    return [*same, *found, asked == [True] * 6 + [False], not rng.is_checkpointing()]


def utilities_of_ranks() -> list[Any]:
    ps.initialize_model_parallel(2)
    rank = dist.get_rank()
    x = torch.arange(12.0).view(3, 4)
    chunk = utilities.split_tensor_into_1d_equal_chunks(x)
    copy = utilities.split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    data = {"a": torch.full((2, 3), rank), "b": torch.tensor(rank), "c": torch.empty(0, 4, dtype=torch.int64)}
    own = utilities.broadcast_data(["a", "b", "c"], data if rank % 2 == 0 else {}, torch.int64)
    # by a group that is passed, of other ranks and sizes than the tensor group
    whole = utilities.broadcast_data(
        ["a"], {"a": torch.arange(rank + 5)}, torch.int64, tp_group=ps.get_model_parallel_group()
    )
    across = utilities.broadcast_data(
        ["a"], {"a": torch.arange(rank + 5)}, torch.int64, tp_group=ps.get_data_parallel_group()
    )
    return [
        chunk.tolist(),
        chunk.data_ptr() == x[rank % 2 * 1 :].data_ptr() or rank % 2 == 1,
        copy.data_ptr() != chunk.data_ptr(),
        torch.equal(utilities.gather_split_1d_tensor(chunk), x.view(-1)),
        own["a"].tolist(),
        [own["b"].item(), list(own["c"].shape), own["a"].dtype == torch.int64],
        [whole["a"].numel(), across["a"].numel()],
        utilities.param_is_not_tensor_parallel_duplicate(torch.zeros(1)),
        utilities.param_is_not_tensor_parallel_duplicate(torch.zeros(1), ps.get_data_parallel_group()),
    ]


def broadcasts_that_fail() -> list[tuple[str, str]]:
    """All ranks are told of the first rank's mistake; one with other keys is told alone, and none waits."""
    ps.initialize_model_parallel(2)
    data = {"a": torch.zeros(2, dtype=torch.float64)}
    keys = ["a"] if dist.get_rank() == 0 else ["b"]
    return [
        error_of(utilities.broadcast_data, ["a"], data, torch.float32),
        error_of(utilities.broadcast_data, ["b"], data, torch.float32),
        error_of(utilities.broadcast_data, keys, data, torch.float64),
    ]


def uneven_regions() -> list[float]:
    """Forward and backward of regions whose ranks have 3 and 1 rows; largest differences."""
    ps.initialize_model_parallel(2)
    rank, sizes = dist.get_rank() % 2, [3, 1]
    full = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    start, rows = sum(sizes[:rank]), sizes[rank]
    x = full[start : start + rows].clone().requires_grad_()
    gathered = mappings.gather_from_sequence_parallel_region(x, output_split_sizes=sizes)
    weights = (rank + 1) * torch.linspace(1, 2, 8, dtype=torch.float64).view(4, 2)
    (gathered * weights).sum().backward()
    total = 3 * torch.linspace(1, 2, 8, dtype=torch.float64).view(4, 2)  # the ranks' weights
    assert x.grad is not None
    found = [gathered.detach() - full, x.grad - total[start : start + rows]]

    z = (full * (rank + 1)).requires_grad_()
    scattered = mappings.reduce_scatter_to_sequence_parallel_region(z, input_split_sizes=sizes)
    (scattered * (rank + 1)).sum().backward()
    owner = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64).view(4, 1).expand(4, 2)
    assert z.grad is not None
    found += [scattered.detach() - 3 * full[start : start + rows], z.grad - owner]
    return [float(each.abs().max()) for each in found]


def last_dimension() -> list[float]:
    ps.initialize_model_parallel(2)
    rank = dist.get_rank() % 2
    full = torch.arange(12.0).view(3, 4)
    x = full[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
    gathered = mappings.all_gather_last_dim_from_tensor_parallel_region(x)
    (gathered * (rank + 1)).sum().backward()
    z = (full * (rank + 1)).requires_grad_()
    scattered = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(z)
    (scattered * (rank + 1)).sum().backward()
    owner = torch.tensor([1.0, 1.0, 2.0, 2.0]).expand(3, 4)
    assert x.grad is not None
    assert z.grad is not None
    found = [gathered.detach() - full, x.grad - 3, scattered.detach() - 3 * full[:, 2 * rank : 2 * rank + 2]]
    return [float(each.abs().max()) for each in [*found, z.grad - owner]]


def exchanged() -> list[Any]:
    """Rows by uneven sizes and back again; tokens for features and back again; gradients."""
    ps.initialize_model_parallel(2)
    group, rank = ps.get_tensor_model_parallel_group(), dist.get_rank() % 2
    sent = [[1, 2], [3, 0]]  # rows from rank i to rank j
    received = [sent[other][rank] for other in range(2)]
    x = (torch.arange(6.0).view(3, 2) + 10 * rank).requires_grad_()
    there = mappings.all_to_all(group, x, received, sent[rank])
    back = mappings.all_to_all(group, there, sent[rank], received)
    (back * torch.arange(3.0).view(3, 1)).sum().backward()
    tokens = torch.arange(8.0).view(2, 4) + 100 * rank
    features = mappings.all_to_all_sp2hp(tokens)
    again = mappings.all_to_all_hp2sp(features)
    assert x.grad is not None
    return [
        there.tolist(),
        torch.equal(back, x),
        x.grad.tolist(),
        features.tolist(),
        torch.equal(again, tokens),
    ]
