"""Matrices in fp8 with their scales, packed into one matrix of 32-bit words.

T rows of K elements, S scales a row (one, or one for each 128 elements):

    words   (T, W)   int32: of each row first K bytes of fp8, then S scales, then padding
    data    (T, K)   e4m3 or e5m2, a view of words
    scale   (T, S)   fp32, a view of words

    value[t, k] = data[t, k] * scale[t, k // (K / S)]      as `dequantize` gives it

One matrix, because what ranks send each other are rows: a row brings its scales along. A weight with one
scale for each 128 x 128 repeats it in each of its rows.

What is no number is not hidden: a row (or block) that holds NaN or infinity has the scale NaN. And a number
of a block stays one: with a scale that is a power of two fp8 would round those next to fp32's largest to
2**128, and they become the number of fp8 below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpkernels.kernels.recipe import BLOCK, Format, Scaling

DTYPE_OF = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
LARGEST_BACK = {"e4m3": 1.875 * 2.0**127, "e5m2": 1.75 * 2.0**127}  # of fp8 times a power of two, in fp32
LEAST_SCALE = 2.0**-126  # of fp32's normal numbers: smaller ones lose bits, or all of them on a GPU
SECTOR = 32  # bytes that memory moves at a time
LINE = 128  # bytes of a cache's line: 128 features of a row that starts at one lie in it, not across two
STARTS = ((4096, LINE), (1024, SECTOR))  # features from which rows start so, at a cost of 3 % at most


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix of `features` columns."""

    words: Tensor
    features: int
    format: Format
    scaling: Scaling

    @property
    def data(self) -> Tensor:
        return self.words.view(torch.uint8)[:, : self.features].view(DTYPE_OF[self.format])

    @property
    def scale(self) -> Tensor:
        first = -(-self.features // 4)
        count = scales_of(self.features, self.scaling)
        return self.words[:, first : first + count].view(torch.float32)

    @property
    def scale_of_squares(self) -> Tensor:
        """Of a weight, as products take it: with several scales a row, one row of them for each 128 rows."""
        return self.scale[::BLOCK] if self.scaling == "blocks" and self.features > BLOCK else self.scale

    def rows(self, rows: slice) -> Scaled:
        return self.with_words(self.words[rows])

    def with_words(self, words: Tensor) -> Scaled:
        """Other rows of the same kind."""
        return replace(self, words=words)


def scales_of(features: int, scaling: Scaling) -> int:
    """How many a row has."""
    return 1 if scaling == "rows" else -(-features // BLOCK)


def words_of(features: int, scaling: Scaling) -> int:
    """How many a row takes.

    >>> words_of(64, "rows"), words_of(1024, "rows"), words_of(4096, "rows"), words_of(4096, "blocks")
    (17, 264, 1056, 1056)
    """
    words = -(-features // 4) + scales_of(features, scaling)
    start = next((size for least, size in STARTS if features >= least), 4)
    return -(-4 * words // start) * start // 4


def empty_words(rows: int, features: int, scaling: Scaling, device: torch.device) -> Tensor:
    return torch.empty(rows, words_of(features, scaling), dtype=torch.int32, device=device)


def quantize_ref(
    x: Tensor, format: Format, scaling: Scaling, power_of_two: bool = False, square: bool = False
) -> Tensor:
    """The rows of x (T, K) in fp8, each with its scales, as words.

    square: one scale for each 128 x 128, not for each 128 of a row
    """
    rows, features = x.shape
    words = empty_words(rows, features, scaling, x.device)
    made = Scaled(words, features, format, scaling)
    wide = x.to(torch.float32)
    amax = _largest(wide, scaling, square)
    scale = scale_ref(amax, format, power_of_two)
    made.scale.copy_(scale)
    by_element = spread(scale, features)
    if power_of_two and scaling == "blocks":
        wide = wide.clamp(-LARGEST_BACK[format], LARGEST_BACK[format])
    # a row that has no scale holds zeros: the bits of NaN differ from one machine to the next
    made.data.copy_(torch.where(by_element.isnan(), 0.0, wide / by_element).to(made.data.dtype))
    pad_words(words, features, scaling)
    return words


def scale_ref(amax: Tensor, format: Format, power_of_two: bool) -> Tensor:
    """amax / the format's largest number; 1 for zeros, NaN for what is not finite."""
    scale = (amax / LARGEST[format]).clamp(min=LEAST_SCALE)
    if power_of_two:  # the next one above
        bits = (scale.view(torch.int32) + 0x007F_FFFF) & 0x7F80_0000
        scale = bits.view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def halves_of(scale: Tensor) -> tuple[Tensor, Tensor]:
    """(rest, root), whose product the scale is; root is a power of two near its square root.

    A sum times both rests, then times the product of both roots, is out of fp32's range on its way only where
    the result is: times a huge scale and then a tiny one it could be there in between. Roots round nothing.
    """
    root = ((((scale.view(torch.int32) >> 23) + 127) >> 1) << 23).view(torch.float32)
    return scale / root, root


def _largest(wide: Tensor, scaling: Scaling, square: bool) -> Tensor:
    """(T, S)"""
    rows, features = wide.shape
    size = wide.abs()
    if scaling != "rows":
        padded = torch.nn.functional.pad(size, (0, -features % BLOCK))
        count = padded.shape[1] // BLOCK
        largest = padded.view(rows, count, BLOCK).amax(2)
        if square:
            tall = torch.nn.functional.pad(largest, (0, 0, 0, -rows % BLOCK))
            blocks = tall.view(tall.shape[0] // BLOCK, BLOCK, count).amax(1)
            largest = blocks.repeat_interleave(BLOCK, 0)[:rows]
        return largest
    return size.amax(1, keepdim=True) if features else size.new_zeros(rows, 1)


def spread(scale: Tensor, features: int) -> Tensor:
    """A scale for each element, from (T, S); one that all elements share stays (T, 1)."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, :features]


def dequantize_ref(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """data * scale, computed in fp32 (float64, if that is asked for) and rounded to dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (data.to(wide) * spread(scale, data.shape[1])).to(dtype)


def pad_words(words: Tensor, features: int, scaling: Scaling) -> None:
    """Zero what is neither data nor scale, so that equal matrices have equal words."""
    first = -(-features // 4)
    words[:, first + scales_of(features, scaling) :] = 0
    if features % 4:
        words.view(torch.uint8)[:, features : 4 * first] = 0
