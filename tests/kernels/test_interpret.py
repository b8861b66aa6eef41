"""The interpreter's faults with bf16 exist upstream, and are mended here."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tpkernels.kernels.interpret import INTERPRETING, bf16_from_fp32, fp32_from_bf16

# Prints a line before the mend, and one after it: what comes of a product of ones, of a cast that must round
# up, and of a subnormal number that is cast to fp32.
PROBE = """
import torch, triton, triton.language as tl
from tpkernels.kernels.interpret import mend

@triton.jit
def product(x_ptr, y_ptr, S: tl.constexpr):
    i = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    tl.store(y_ptr + i, tl.dot(tl.load(x_ptr + i), tl.load(x_ptr + i)))

@triton.jit
def cast(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr).to(y_ptr.dtype.element_ty))

for mending in (False, True):
    if mending:
        mend(); mend()
    y, z, tiny = torch.zeros(16, 16), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    product[(1,)](torch.ones(16, 16, dtype=torch.bfloat16), y, S=16)
    cast[(1,)](torch.tensor([1 + 3 / 512]), z)
    cast[(1,)](torch.tensor([3 * 2.0**-130], dtype=torch.bfloat16), tiny)
    print(y[0, 0].item(), z.item(), tiny.item())
"""


def test_interpreter_is_wrong_about_bf16_until_it_is_mended(tmp_path):
    """If the first lines fail, upstream has mended its interpreter, and `interpret.mend` can shrink."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    upstream, mended = ([float(word) for word in line.split()] for line in run.stdout.splitlines())
    product, rounded, tiny = upstream
    assert product != 16
    assert rounded == 1.0
    assert tiny != 3 * 2.0**-130
    assert mended == [16, 1 + 1 / 128, 3 * 2.0**-130]


def test_bf16_from_fp32_rounds_as_torch_does():
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, 1e-45, 1 + 1 / 256, 1 + 3 / 256])
    values = torch.cat([bits.view(torch.float32), special])
    numbers = ~values.isnan()
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ours = bf16_from_fp32(values.numpy())
    np.testing.assert_array_equal(ours[numbers], expected[numbers])
    assert np.isnan(fp32_from_bf16(ours[~numbers])).all()


def test_fp32_from_bf16_is_exact():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    expected = every.view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(fp32_from_bf16(every.numpy()), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these tests do not interpret")
def test_this_process_interprets():
    assert INTERPRETING
