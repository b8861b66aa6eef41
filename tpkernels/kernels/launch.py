"""What every launcher does around its kernel: choose, allocate, describe operands, size the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.kernels.invariance import judged_layouts, judged_size, require_one_form
from tpkernels.kernels.operands import Form, MatrixLayout, Named, choose_form, require_form, require_results
from tpkernels.kernels.target import (
    Target,
    emulated_target,
    fast_math,
    input_precision,
    left_free,
    resident_programs,
    target_of,
)
from tpkernels.kernels.tiles import Kernel, MatmulTile, default_tile, sum_tile, waiting_tile
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS
from tpkernels.kernels.waits import HERE, Wait

Out = Tensor | Sequence[Tensor] | None  # of a launcher: what it writes into, one for each result asked for


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel was called with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # up to the first constant
    constants: dict[str, Any]  # with all that follows, and options such as num_warps

    @staticmethod
    def of(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> Launch:
        """arguments: by position, constants may be among them"""
        count = kernel.arg_names.index(compiled_in(kernel)[0]) if compiled_in(kernel) else len(arguments)
        behind = zip(kernel.arg_names[count:], arguments[count:], strict=False)
        return Launch(kernel, grid, arguments[:count], dict(behind) | named)

    @property
    def named(self) -> dict[str, Any]:
        """All of it by its names."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | self.constants


def compiled_in(kernel: Any) -> list[str]:
    """The arguments of a kernel that are compile-time constants."""
    return [name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)]


# kernel and grid -> what takes the arguments
EmulatedStart = Callable[[Any, tuple[int, ...]], Callable[..., object]]


class LaunchObserver(Protocol):
    """Is told what a launcher does, see `launch_plans`."""

    def allocated(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate, and note it."""

    def started(
        self,
        start: Callable[..., object],
        device: torch.device,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        **constants: Any,
    ) -> None:
        """Call `start` with the arguments, and note what it starts."""


_emulated: ContextVar[EmulatedStart | None] = ContextVar("emulated", default=None)
_observer: ContextVar[LaunchObserver | None] = ContextVar("observer", default=None)
observing = _observer.get


@contextmanager
def recording(target: Target, launches: list[Launch] | None = None) -> Iterator[list[Launch]]:
    """Launchers on the meta device launch nothing: what they would launch on `target` is listed."""
    listed = [] if launches is None else launches

    def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *arguments, **named: listed.append(Launch.of(kernel, grid, arguments, named))

    with emulation(target, start):
        yield listed


@contextmanager
def emulation(target: Target, start: EmulatedStart) -> Iterator[None]:
    """Launchers on the CPU or the meta device launch what they would on `target`, by `start`."""
    tokens = _emulated.set(start), emulated_target.set(target)
    try:
        yield
    finally:
        _emulated.reset(tokens[0])
        emulated_target.reset(tokens[1])


def on(device: torch.device, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """The kernel, to be called with its arguments: launched on the device of the tensors, or recorded."""
    start = unobserved(device, kernel, grid)
    if observer := observing():
        return partial(observer.started, start, device, kernel, grid)
    return start


def unobserved(device: torch.device, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`on`, as plans repeat it."""
    kind = device.type
    if kind in ("cpu", "meta") and (start := _emulated.get()):
        return start(kernel, grid)
    started: Callable[..., object] = kernel[grid]
    if not isinstance(kernel, CompiledKernel):  # which was compiled with them
        started = partial(started, **LAUNCH_OPTIONS)
    if kind == "cuda" and device.index != torch.cuda.current_device():
        return partial(_launch_elsewhere, device, started)  # Triton takes the current device
    return started


def _launch_elsewhere(
    device: torch.device, started: Callable[..., object], *arguments: Any, **constants: Any
) -> object:
    with torch.cuda.device(device):
        return started(*arguments, **constants)


@contextmanager
def observed_by(observer: LaunchObserver) -> Iterator[None]:
    """Tell `observer` of what launchers do."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `empty` and plans return; tests put a frame of canaries around it."""
    return torch.empty(shape, dtype=dtype, device=device)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where launchers allocate what they are not given as `out`."""
    observer = observing()
    return observer.allocated(shape, dtype, device) if observer else allocate(shape, dtype, device)


def results(
    launcher: str,
    out: Out,
    wanted: Mapping[str, tuple[int, ...]],
    inputs: Sequence[Named],
    *,
    sums: bool = False,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """Where a kernel writes: into `out`, if that has what `require_results` says, else into new tensors.

    sums: a matrix may be in fp32, too: what is added to others before it is rounded
    dtype: of matrices; None: that of the first input
    in_place: an input may be given as `out`: the kernel has read an element before it writes it
    """
    if out is not None:
        given = (out,) if isinstance(out, Tensor) else tuple(out)
        require_results(launcher, wanted, given, inputs, sums, dtype, in_place)
        return given
    like = inputs[0][1]
    assert like is not None, "the first input is always there"
    return tuple(
        empty(shape, (dtype or like.dtype) if len(shape) == 2 else torch.float32, like.device)
        for shape in wanted.values()
    )


def choose(
    launcher: str,
    kernel: Kernel,
    target: Target,
    matrices: tuple[tuple[str, Tensor], ...],
    result: tuple[int, int],
    tile: MatmulTile | None,
    form: Form | None,
) -> tuple[Form, MatmulTile]:
    """The form and tile of a launch: what the caller asked for, or what fits.

    matrices: all that the kernel reads or writes, the first being one that is multiplied, the last a result
    result: (rows, cols) of the product
    """
    if tile is not None and tile.splits > 1 and kernel != "wgrad":
        raise ValueError(
            f"{launcher}: expected a tile with splits=1, got {tile.splits}: only wgrad adds them"
        )
    dtype = matrices[0][1].dtype
    if 0 in result:
        return "pointer", tile or default_tile(kernel, "pointer", dtype, target, *result)  # unused
    layouts = judged_layouts(kernel, tuple(MatrixLayout.of(name, tensor) for name, tensor in matrices))
    require_one_form(launcher, target, dtype, layouts)
    if form is None:
        form = choose_form(target, dtype, layouts)
    else:
        require_form(launcher, form, target, dtype, layouts)
    ragged = any(layout.tma_obstacle() for layout in layouts)
    if kernel != "wgrad" and matrices[-1][1].dtype == torch.float32 != dtype:
        tile = tile or sum_tile(form, dtype, target, ragged)
    return form, tile or default_tile(kernel, form, dtype, target, *judged_size(kernel, *result), ragged)


Extent = Literal["rows", "cols", "depth", "part"]  # of a tile; its epilogue works on a part at a time


class ProductLaunch(NamedTuple):
    """A matrix product that is about to be launched: what it multiplies, where, and how it is cut."""

    device: torch.device
    dtype: torch.dtype  # of what is multiplied
    target: Target
    form: Form
    tile: MatmulTile
    rows: int  # of the result
    cols: int
    wait: Wait = HERE
    chunk_rows: int = 0  # that are waited for together
    programs: int = 0  # that are launched; 0: as `grid` says

    @property
    def fast(self) -> bool:
        """What kernels take as FAST, if their results have the dtype of what they multiply."""
        return fast_math(self.dtype, self.target)

    @property
    def precision(self) -> str:
        """What kernels take as PRECISION."""
        return input_precision(self.dtype, self.target)

    def block(self, matrix: Tensor, rows: Extent, cols: Extent) -> Tensor | TensorDescriptor:
        """A matrix as the kernel of this form takes it, which moves a block of rows x cols at a time."""
        if self.form == "pointer":
            return matrix
        tile, strides = self.tile, [MatrixLayout.of("", matrix).row_pitch, 1]
        sizes = {"rows": tile.block_rows, "cols": tile.block_cols, "depth": tile.block_depth}
        sizes["part"] = tile.block_cols // tile.parts
        return TensorDescriptor(matrix, list(matrix.shape), strides, [sizes[rows], sizes[cols]])

    def columns_cut(self, count: int) -> ProductLaunch:
        """The same, for blocks of as many columns as one of `count` cuts of a tile has."""
        cols = self.tile.block_cols // count
        return self._replace(tile=replace(self.tile, block_cols=cols, parts=1)) if count > 1 else self

    def waiting(
        self, launcher: str, kernel: Kernel, wait: Wait, chunk_rows: int, asked: MatmulTile | None
    ) -> ProductLaunch:
        """The same for rows that arrive in chunks. asked: the tile, by the caller"""
        if asked is not None and asked.flatten:
            raise ValueError(f"{launcher}: expected a tile with flatten=False: it loads before it waits")
        tile = asked or waiting_tile(kernel, self.tile, chunk_rows)
        free = left_free(self.target, wait.margin)
        # persistent in either form: a program that waits must not keep out one whose rows are here
        resident = resident_programs(launcher, self.target, tile.per_processor, free)
        programs = min(tile.tiles(self.rows, self.cols), resident)
        return self._replace(tile=tile, wait=wait, chunk_rows=chunk_rows, programs=programs)

    def _waits(self) -> dict[str, Any]:
        """What kernels take as `waits.arrived` does."""
        arrivals, size = self.wait.arrivals, self.tile.block_rows
        if arrivals is None:
            return {}
        return {
            "flags_ptr": arrivals.flags,
            "awaited_ptr": arrivals.awaited,
            "status_ptr": arrivals.status,
            "first_tile": ceil_div(self.wait.first_row, size) % ceil_div(self.rows, size),
            "chunk_rows": self.chunk_rows,
            "spin_limit": arrivals.limit(self.target),
            # TMA reads rows past the caches that a flag orders
            "ASYNC_PROXY": self.form == "descriptor" and self.target.backend == "cuda",
        }

    def start(self, kernel: Any) -> Callable[..., None]:
        """The kernel, to be called with its arguments and with the constants that are not the tile's.

        Arguments that it may do without, None by default, are called by their names.
        """
        programs = self.programs or grid(self.target, self.form, self.tile, self.rows, self.cols)[0]
        started = on(self.device, kernel, (programs,))

        def launch(*arguments: Any, **others: Any) -> None:
            named = {**others, **constants(self.tile, self.form), **self._waits()}
            if any(isinstance(value, (Tensor, TensorDescriptor)) for value in named.values()):
                # all by position, as plans repeat tensors by theirs
                names = kernel.arg_names[len(arguments) :]
                arguments += tuple(named.pop(name, None) for name in names)
            started(*arguments, **named)

        return launch


def product(
    launcher: str,
    kernel: Kernel,
    matrices: tuple[tuple[str, Tensor], ...],
    result: tuple[int, int],
    tile: MatmulTile | None,
    form: Form | None,
    wait: Wait = HERE,
) -> ProductLaunch:
    """The product that a launcher is called for, with the form and tile of `choose`; arguments as there.

    wait: for the rows of the matrices that are multiplied
    """
    first = matrices[0][1]
    target, chunk_rows = target_of(first.device), wait.chunk_rows(launcher, result[0], first.device)
    form, chosen = choose(launcher, kernel, target, matrices, result, tile, form)
    made = ProductLaunch(first.device, first.dtype, target, form, chosen, *result)
    return made if wait.arrivals is None else made.waiting(launcher, kernel, wait, chunk_rows, tile)


def grid(target: Target, form: Form, tile: MatmulTile, rows: int, cols: int) -> tuple[int]:
    """Descriptor kernels are persistent: as many programs as stay resident. Others get a program a tile."""
    tiles = tile.tiles(rows, cols) * tile.splits
    persistent = form == "descriptor" or target.backend == "interpreter"
    resident = resident_programs("a product", target, tile.per_processor, left_free(target))
    return (min(tiles, resident) if persistent else tiles,)


def constants(tile: MatmulTile, form: Form) -> dict[str, Any]:
    """The compile-time constants and options that a tile stands for, the same in every matmul kernel."""
    return {
        "BLOCK_ROWS": tile.block_rows,
        "BLOCK_COLS": tile.block_cols,
        "BLOCK_DEPTH": tile.block_depth,
        "PARTS": tile.parts,
        "GROUP": tile.group,
        "FLATTEN": tile.flatten,
        "TMA": form == "descriptor",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def ceil_div(a: int, b: int) -> int:
    return int(triton.cdiv(a, b))
