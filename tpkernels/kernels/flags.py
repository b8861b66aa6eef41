"""The count of calls on the device.

In a captured graph no host counts calls: `advance` does so on the device, and what raises flags copies the
word that it finds there, so that each replay tells of another call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.waits import require_words


# One compiled form, whatever the arguments: in a capture it is too late to load another.
@triton.jit(do_not_specialize=["step", "code"], do_not_specialize_on_alignment=["word_ptr", "awaited_ptr"])
def _advance_kernel(word_ptr, awaited_ptr, step, code):
    word = tl.load(word_ptr) + step
    tl.store(word_ptr, word)
    tl.store(awaited_ptr, word | code)


@planned
def advance(word: Tensor, awaited: Tensor, step: int, code: int) -> None:
    """word += step, which wraps round; awaited = word | code.

    word, awaited: (1,) int32
    """
    require_words("advance", "word", word, 1, torch.int32, word.device)
    require_words("advance", "awaited", awaited, 1, torch.int32, word.device)
    launch.on(word.device, _advance_kernel, (1,))(word, awaited, step, code, num_warps=1)
