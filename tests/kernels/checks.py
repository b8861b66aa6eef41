"""What every kernel test shares: random operands in awkward layouts, and what is asserted of results."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpkernels.gate.numerics import BOUND, Frames, relative_error
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, kernel_and_chunk

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

TILE = MatmulTile(32, 32, 32, num_warps=4, num_stages=1, parts=2, group=2)
# (tokens, in_features, out_features), straddling the edges of TILE
SHAPES = {"one_tile": (32, 32, 32), "ragged": (71, 45, 51), "aligned": (72, 64, 40), "one_row": (1, 136, 144)}
EMPTY_SHAPES = {"no_tokens": (0, 8, 16), "no_in_features": (5, 0, 16), "no_out_features": (5, 8, 0)}


def normal(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, cols, device=device).to(dtype)


def _within(t: Tensor, cols: int, step: int = 1) -> Tensor:
    """Columns of a wider matrix."""
    wide = torch.full((t.shape[0], cols), float("nan"), dtype=t.dtype, device=t.device)
    return wide[:, : step * t.shape[1] : step].copy_(t)


def _misaligned(t: Tensor) -> Tensor:
    """One element past an aligned address."""
    flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
    return flat[1:].view(t.shape).copy_(t)


# what surrounds a view is NaN, so that reading it shows
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.T.contiguous().T,
    "every_other_column": lambda t: _within(t, 2 * t.shape[1], step=2),
    "misaligned": _misaligned,
    "odd_pitch": lambda t: _within(t, t.shape[1] + 3),
    "padded_rows": lambda t: _within(t, t.shape[1] + 16 - t.shape[1] % 8),  # descriptors can describe it
    "expanded": lambda t: t[:1].expand(t.shape),
}


def dense(t: Tensor) -> Tensor:
    """For torch's own product, which on some CPUs adds 0 times what lies past odd rows of bfloat16."""
    return t.contiguous()


def assert_accurate(actual: Tensor, exact: Tensor, torchs: Tensor | None = None, what="result") -> None:
    """Within the bound of the dtype, and at most twice torch's own error in that dtype."""
    error = relative_error(actual, exact)
    bound = BOUND[actual.dtype]
    assert error < bound, f"{what}: error {error:.2e} against float64, allowed {bound:.1e}"
    if torchs is not None:
        theirs = relative_error(torchs, exact)
        # 1e-7: at tiny sizes torch's error can be zero by luck
        assert error <= 2 * theirs + 1e-7, f"{what}: error {error:.2e}, torch's own {theirs:.2e}"


def assert_framed(frames: Frames) -> None:
    faults = frames.take_faults()
    assert not faults, faults[0]


def rows_for(results: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of larger matrices, or of a matrix, for what a call gives; for what it gives twice only once."""
    around = [
        torch.full((3, *one.shape), 7, dtype=one.dtype, device=one.device) for one in _distinct(results)
    ]
    return [matrices[1] for matrices in around], around


def assert_written(out: Sequence[Tensor], around: Sequence[Tensor], results: Sequence[Tensor | None]) -> None:
    """The same bits in the rows that were given, and nothing beside them."""
    for ours, matrices, expected in zip(out, around, _distinct(results), strict=True):
        assert torch.equal(ours, expected)
        assert (matrices[::2] == 7).all()


def _distinct(results: Sequence[Tensor | None]) -> list[Tensor]:
    return list({id(result): result for result in results if result is not None}.values())


def raise_if_late(arrivals: Arrivals, rank: int) -> None:
    """What ops do after a kernel that waits."""
    if word := int(arrivals.status):
        kernel, chunk = kernel_and_chunk(word)
        raise RuntimeError(f"{kernel} on rank {rank}: chunk {chunk} had not arrived")
