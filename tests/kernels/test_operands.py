"""Which form fits which layout on which GPU: a pure function, so it is tested for GPUs that are not here."""

from dataclasses import replace

import pytest
import torch

from tpkernels.kernels.operands import MatrixLayout, choose_form
from tpkernels.kernels.target import A100, B200, H100, INTERPRETER, MI300, input_precision

GOOD = MatrixLayout("x", rows=64, cols=128, row_stride=128, col_stride=1, itemsize=2, address=4096)


FORMS = {
    "sm_90": (H100, "descriptor"),
    "sm_100": (B200, "descriptor"),
    "interpreter": (INTERPRETER, "descriptor"),
    "sm_80": (A100, "pointer"),
    "gfx942": (MI300, "pointer"),
}


@pytest.mark.parametrize(("target", "form"), FORMS.values(), ids=FORMS)
def test_choose_form_follows_the_hardware(target, form):
    assert choose_form(target, torch.bfloat16, (GOOD, GOOD)) == form


OBSTACLES = {
    "fortran_order": {"row_stride": 1, "col_stride": 64},
    "every_other_column": {"row_stride": 256, "col_stride": 2},
    "odd_pitch": {"row_stride": 131},
    "misaligned": {"address": 4098},
    "expanded": {"row_stride": 0},
    "no_rows": {"rows": 0},
    "no_cols": {"cols": 0},
    "too_many_rows": {"rows": 2**31},
}


@pytest.mark.parametrize("change", OBSTACLES.values(), ids=OBSTACLES.keys())
def test_choose_form_gives_one_awkward_operand_to_pointers(change):
    assert choose_form(H100, torch.float16, (GOOD, replace(GOOD, **change))) == "pointer"


def test_fp32_and_strides_of_single_rows_and_columns():
    wide = replace(GOOD, itemsize=4)
    assert choose_form(H100, torch.float32, (wide, wide)) == "pointer"
    assert choose_form(H100, torch.bfloat16, (GOOD, wide)) == "descriptor"
    assert choose_form(H100, torch.bfloat16, (replace(GOOD, rows=1, row_stride=7),)) == "descriptor"
    assert choose_form(H100, torch.bfloat16, (replace(GOOD, cols=1, col_stride=5),)) == "descriptor"
    assert replace(GOOD, rows=1, cols=13, row_stride=13).row_pitch == 16


@pytest.mark.parametrize("allowed", [False, True], ids=["ieee", "tf32"])
def test_input_precision_follows_torchs_setting(allowed):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        assert input_precision(torch.float32, H100) == ("tf32" if allowed else "ieee")
        assert input_precision(torch.bfloat16, H100) == "ieee"
        assert input_precision(torch.float32, MI300) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
