"""What stands in for the asynchronous instructions of `gl.nvidia.hopper`: TMA, mbarriers, wgmma."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tpkernels.gate.machine.events import (
    Arrive,
    CopyIn,
    CopyOut,
    Expect,
    Fence,
    Init,
    Invalidate,
    Load,
    Multiply,
    MultiplyWait,
    Store,
    StoreWait,
    Wait,
)
from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.memory import Descriptor, View, Written, halves
from tpkernels.gate.machine.recorder import current, ready_after, require_like
from tpkernels.gate.machine.values import TensorBlock


def init(mbarrier: View, count: int) -> None:
    if current().acts_on(mbarrier):
        shared_by = current().blocks if current().for_both(mbarrier) else 1
        current().emit(Init, current().barrier(mbarrier), count * shared_by)


def invalidate(mbarrier: View) -> None:
    if current().acts_on(mbarrier):
        current().emit(Invalidate, current().barrier(mbarrier))


def wait(mbarrier: View, phase: int, pred: bool = True, deps: Sequence[View] = ()) -> None:
    if pred and current().acts_on(mbarrier):
        if phase not in (0, 1):
            raise Misuse(f"mbarrier.wait expected a parity of 0 or 1, got {phase} for {mbarrier.name}")
        current().emit(Wait, current().barrier(mbarrier), int(phase))


def expect(mbarrier: View, bytes_per_cta: int, pred: bool = True) -> None:
    if pred:
        current().emit(Expect, current().barrier(mbarrier), bytes_per_cta)


def arrive(mbarrier: View, *, count: int = 1, pred: bool = True) -> None:
    if pred:
        current().emit(Arrive, current().barrier(mbarrier), count)


def async_load(
    tensor_desc: Descriptor,
    coord: Sequence[int],
    barrier: View,
    result: View,
    pred: bool = True,
    multicast: bool = False,
) -> None:
    if not pred:
        return
    require_like(result, tensor_desc.box, tensor_desc.dtype, "a copy in")
    here, blocks = current().block, current().blocks
    corner = tensor_desc.corner(coord, here)
    to: Sequence[int] = (here,)
    if multicast and blocks > 1 and not any(halves(tensor_desc.block_shape, tensor_desc.layout)):
        to = range(blocks) if here == 0 else ()  # the first copies for all
    for block in to:
        view, number = result.in_block(block), current().barrier(barrier.in_block(block))
        current().emit(CopyIn, number, view, tensor_desc.nbytes, partial(_land, view, tensor_desc, corner))


def _land(view: View, tensor_desc: Descriptor, corner: tuple[int, ...]) -> None:
    view.put(tensor_desc.read(corner))


def async_store(tensor_desc: Descriptor, coord: Sequence[int], src: View, accumulate: bool = False) -> None:
    require_like(src, tensor_desc.box, tensor_desc.dtype, "a copy out")
    corner = tensor_desc.corner(coord, current().block)
    box: list[torch.Tensor] = []

    def write(written: Written) -> None:
        tensor_desc.write(corner, box.pop(), written, event.where, accumulate)

    event = current().emit(CopyOut, src, lambda: box.append(src.get()), write)


def store_wait(pendings: int) -> None:
    current().emit(StoreWait, pendings)


def fence_async_shared(cluster: bool = False) -> None:
    current().emit(Fence)


def load_shared(view: View, layout: Any) -> TensorBlock:
    loaded = TensorBlock(torch.empty(view.shape, dtype=view.allocation.data.dtype, device="meta"))
    current().emit(Load, view, lambda: loaded.put(view.get()))
    return loaded


def store_shared(view: View, value: TensorBlock) -> None:
    require_like(view, value.shape, value.dtype, "a store")
    value.require_ready()
    current().emit(Store, view, lambda: view.put(value.value()))


View.load, View.store = load_shared, store_shared  # type: ignore[attr-defined]


class Accumulator:
    """What an asynchronous `warpgroup_mma` returns: registers that are no tensor before a wait."""

    def __init__(self, block: TensorBlock) -> None:
        self.block = block


def warpgroup_mma_init(value: TensorBlock) -> Accumulator:
    value.require_ready()
    return Accumulator(value)


def warpgroup_mma(
    a: View | TensorBlock,
    b: View,
    acc: TensorBlock | Accumulator,
    *,
    use_acc: bool = True,
    precision: str | None = None,
    max_num_imprecise_acc: int | None = None,
    is_async: bool = False,
) -> TensorBlock | Accumulator:
    before = acc.block if isinstance(acc, Accumulator) else acc
    (rows, depth), (other_depth, cols) = a.shape, b.shape
    alike = a.dtype == b.dtype or (a.dtype.is_fp8() and b.dtype.is_fp8())
    if depth != other_depth or list(before.shape) != [rows, cols] or not alike:
        raise Misuse(f"warpgroup_mma of {a.shape} {a.dtype}, {b.shape} {b.dtype} into {before.shape}")
    if isinstance(a, TensorBlock):
        a.require_ready()
    product = TensorBlock(before.meta)
    operands: list[torch.Tensor] = []

    def read() -> None:
        operands[:] = [(a.value() if isinstance(a, TensorBlock) else a.get()).float(), b.get().float()]

    def finish() -> None:
        term = operands[0] @ operands[1]
        product.put(before.value() + term if use_acc else term)

    views = tuple(operand for operand in (a, b) if isinstance(operand, View))
    event = current().emit(Multiply, views, read, finish)
    product.require_ready = ready_after(event)
    if is_async:
        return Accumulator(product)
    current().emit(MultiplyWait, 0)
    return product


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    current().emit(MultiplyWait, num_outstanding)
    waited = tuple(dep.block if isinstance(dep, Accumulator) else dep for dep in deps)
    return waited[0] if len(waited) == 1 else waited


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "mbarrier": {"init": init, "invalidate": invalidate, "wait": wait, "expect": expect, "arrive": arrive},
    "tma": {
        "async_load": async_load,
        "async_store": async_store,
        "async_atomic_add": partial(async_store, accumulate=True),
        "async_copy_global_to_shared": async_load,  # before Triton 3.8
        "async_copy_shared_to_global": async_store,
        "store_wait": store_wait,
    },
    "hopper": {
        "fence_async_shared": fence_async_shared,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_init": warpgroup_mma_init,
        "warpgroup_mma_wait": warpgroup_mma_wait,
    },
}
