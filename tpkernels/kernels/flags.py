"""Flags that a stream raises at other ranks, and the count of calls on the device.

In a captured graph no host counts calls: `advance` does so on the device, and `publish` writes the word that
it finds there, so that each replay tells of another call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.waits import require_words


# One compiled form each, whatever the arguments: in a capture it is too late to load another.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["flags_ptr", "word_ptr"])
def _publish_kernel(flags_ptr, word_ptr, count):
    """One program, whose atomics one thread makes: each flag comes after all that the stream did before."""
    word = tl.load(word_ptr)
    for index in tl.range(0, count):
        flag_ptr = tl.load(flags_ptr + index).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag_ptr, word, sem="release", scope="sys")


@triton.jit(do_not_specialize=["step", "code"], do_not_specialize_on_alignment=["word_ptr", "awaited_ptr"])
def _advance_kernel(word_ptr, awaited_ptr, step, code):
    word = tl.load(word_ptr) + step
    tl.store(word_ptr, word)
    tl.store(awaited_ptr, word | code)


def publish(flags: Tensor, word: Tensor) -> None:
    """Write the word into flags anywhere, after all that came before in the stream.

    flags: (n,) int64: addresses of int32
    word: (1,) int32
    """
    require_words("publish", "flags", flags, flags.numel(), torch.int64, flags.device)
    require_words("publish", "word", word, 1, torch.int32, flags.device)
    if flags.numel():
        launch.on(flags.device, _publish_kernel, (1,))(flags, word, flags.numel(), num_warps=1)


def advance(word: Tensor, awaited: Tensor, step: int, code: int) -> None:
    """word += step, which wraps round; awaited = word | code.

    word, awaited: (1,) int32
    """
    require_words("advance", "word", word, 1, torch.int32, word.device)
    require_words("advance", "awaited", awaited, 1, torch.int32, word.device)
    launch.on(word.device, _advance_kernel, (1,))(word, awaited, step, code, num_warps=1)
