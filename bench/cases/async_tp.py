"""torch's eager async tensor parallelism and ours, counted and timed on the host without a GPU.

    python -m bench.cases.async_tp      in the venv of `make check-torchtitan`

torch's `symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` are Python over streams and
symmetric memory. Their CUDA form runs here on tensors without memory, as one rank of a group that moves
nothing, called by the autograd functions of torchtitan's `dist_gemm`. Ours runs as in `launches`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases.launches import CASES, COUNTED, FEATURES, counted, group_of, standing_in_for
from bench.measure import interleave, seconds_on_clock
from tpkernels.kernels.target import H100
from tpkernels.ops import column_linear, row_linear
from tpkernels.planning.calls import Sizes

TOKENS, WIDTH, RANKS, CALLS = 8192, 4096, (2, 8), 400
ASYNC_TP = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
KERNELS = {"mm": "products", "copy_": "copies"}
OTHER_KERNELS = {"clone", "cat", "sum", "add", "_to_copy"}
NO_KERNELS = {"t", "view", "_unsafe_view", "transpose", "permute", "split", "slice", "detach", "select"}
NO_KERNELS |= {"new_empty", "empty", "alias", "as_strided"}
NO_KERNELS |= {"_record_function_enter_new", "_record_function_exit"}
Apply = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]


class Noted(TorchDispatchMode):
    """Counts kernels, copies and the bytes that are read from other ranks."""

    def __init__(self, noted: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        with self:
            if name in ASYNC_TP:
                return getattr(_symmetric_memory(), f"_{name}")(*args, **kwargs)
            of_others = func.decompose(*args, **kwargs)  # into the operators of which it is composed
        if of_others is not NotImplemented:
            return of_others
        if name in OTHER_KERNELS:
            self._noted["other_kernels"] += 1
        elif name not in NO_KERNELS:
            self._noted[KERNELS[name]] += 1  # another one is an error: nobody has said what it is
        if name == "copy_" and getattr(args[1], "of_another_rank", False):
            self._noted["bytes"] += args[1].nbytes
        return func(*args, **kwargs)


class _Memory:
    """Stands for torch's `_SymmetricMemory`."""

    def __init__(self, group: dist.ProcessGroup, noted: Counter[str]) -> None:
        self.rank, self.world_size, self._noted = group.rank(), group.size(), noted

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        buffer = torch.empty(sizes, dtype=dtype, device="meta")
        buffer.of_another_rank = rank != self.rank  # type: ignore[attr-defined]
        return buffer

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._noted["barriers"] += 1  # one kernel each


class _Stream:
    def __init__(self, noted: Counter[str]) -> None:
        self._noted = noted

    def wait_stream(self, other: object) -> None:
        self._noted["waits"] += 1

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def async_tp_without_memory(group: dist.ProcessGroup, noted: Counter[str]) -> Iterator[None]:
    """torch's operators take tensors without memory in the way in which they take a GPU's."""
    memory, computing, side = _Memory(group, noted), _Stream(noted), _Stream(noted)

    def sleep(cycles: int) -> None:
        noted["other_kernels"] += 1

    with (
        torch.library._scoped_library("symm_mem", "IMPL") as library,
        patch.multiple(
            _symmetric_memory(),
            get_symm_mem_workspace=lambda *_, **__: memory,
            _get_backend_stream=lambda *_, **__: side,
        ),
        patch.object(distributed_c10d, "_resolve_process_group", lambda *_: group),
        patch.object(distributed_c10d, "_get_group_size_by_name", lambda *_: group.size()),
        patch.multiple(torch.cuda, current_stream=lambda *_: computing, _sleep=sleep),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch's own form for tensors without memory is replaced
        for name in ASYNC_TP:
            library.impl(name, getattr(_symmetric_memory(), f"_{name}"), "Meta")
        yield


def calls_of(case: str, apply: Apply, tokens: int, width: int, group: dist.ProcessGroup) -> Callable[[], Any]:
    """What runs one call of a layer of `width` in bf16, as in `launches`."""
    kind, direction = case.split()
    ranks, features = group.size(), FEATURES[width] // group.size()
    meta: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    shapes = ((tokens // ranks, width), (features, width)), ((tokens, features), (width, features))
    leaf, weight = (torch.empty(*shape, **meta) for shape in shapes[kind == "row"])
    y = apply(leaf, weight, group)
    dy = torch.empty_like(y)
    if direction == "forward":
        return lambda: apply(leaf, weight, group)
    return lambda: torch.autograd.grad(y, [leaf, weight], dy, retain_graph=True)


def theirs(kind: str) -> Apply:
    linear = import_module("torchtitan.distributed.linear")
    function = linear.AllGatherLinear if kind == "column" else linear.LinearReduceScatter
    return lambda x, weight, group: function.apply(x, weight, None, group, group.group_name)


def ours(kind: str) -> Apply:
    op = column_linear if kind == "column" else row_linear
    return lambda x, weight, group: op(x, weight, None, group, sequence_parallel=True)


def enqueued_by_torch(case: str, tokens: int, width: int, ranks: int) -> Counter[str]:
    """What one call of torchtitan's function enqueues; bytes: read from other ranks."""
    noted: Counter[str] = Counter()
    with group_of(ranks) as group, async_tp_without_memory(group, noted):
        run = calls_of(case, theirs(case.split()[0]), tokens, width, group)
        noted.clear()
        with Noted(noted):
            run()
    return noted


def host_times(
    case: str, tokens: int, width: int, ranks: int, transport: str, *, calls: int = CALLS
) -> dict[str, float]:
    """Microseconds of a call, ours and theirs interleaved: the second lowest, as in `launches`."""
    kind, noted = case.split()[0], Counter[str]()
    with (
        group_of(ranks) as group,
        standing_in_for(H100, transport, noted),
        async_tp_without_memory(group, noted),
    ):
        ways = {
            name: calls_of(case, apply, tokens, width, group)
            for name, apply in (("ours", ours(kind)), ("theirs", theirs(kind)))
        }
        seconds = interleave(ways, calls, seconds_on_clock)
    return {name: 1e6 * sorted(taken)[1] for name, taken in seconds.items()}


def _symmetric_memory() -> Any:
    return import_module("torch.distributed._symmetric_memory")


def _listed(counts: Counter[str]) -> str:
    names = (*COUNTED, "barriers", "bytes")
    return ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in names if counts[name])


def main() -> None:
    for ranks in RANKS:
        for case in CASES:
            kind, direction = case.split()
            wide = (WIDTH, FEATURES[WIDTH])
            sizes = Sizes(TOKENS, *(wide if kind == "column" else wide[::-1]), ranks)
            print(f"{case}, R {ranks}: torch's {_listed(enqueued_by_torch(case, TOKENS, WIDTH, ranks))}")
            for transport in ("symmetric", "c10d"):
                enqueued = counted(f"{kind}_linear", direction, transport, sizes, True)
                took = host_times(case, TOKENS, WIDTH, ranks, transport)
                times = f"host {took['ours']:.0f} us, torch's {took['theirs']:.0f} us"
                print(f"    ours over {transport}: {_listed(enqueued)}; {times}")


if __name__ == "__main__":
    main()
