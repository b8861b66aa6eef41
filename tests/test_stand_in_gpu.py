"""What stand-ins for GPUs find in code that only a GPU runs, each fault planted."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.checks import lacking, needs_of
from tests.cli.test_qualify import cases_on_gpu, sweeping
from tests.kernels import test_quantize
from tests.loopback import open_symmetric_loopback
from tests.ops import test_on_gpu as gpu_tests
from tests.programs import ran
from tests.stand_in_gpu import CUDA, TARGETS, compares_numbers, stand_in
from tpkernels.cli import qualify_ranks
from tpkernels.comm.transports.memory import Layout
from tpkernels.kernels import flags, linear, reference
from tpkernels.ops.matmul import Plain

if torch.cuda.is_available():
    pytest.skip("stands in for a GPU, and there is one", allow_module_level=True)

ROOT = Path(__file__).parents[1]
ROOMS = ("tests/kernels", "tests/ops")
MARKED = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if re.search(r"^(pytestmark = |@)pytest\.mark\.gpu$", path.read_text(), re.MULTILINE)
]


# sm_80 lacks all that tests may need
@pytest.mark.parametrize("gpu", sweeping(TARGETS, {"sm_80"}))
def test_tests_on_a_device_run_on_a_stand_in(gpu):
    options = ("-q", "-p", "tests.stand_in_gpu", "-p", "no:cacheprovider", "-k", "not compile")
    variables = {"TPKERNELS_STAND_IN": gpu, "TPKERNELS_SWEEP": "0"}
    run = ran("-m", "pytest", *options, *ROOMS, environment=variables)
    assert run.returncode == 0, run.stdout[-5000:]


@pytest.mark.parametrize("path", MARKED)
def test_a_file_that_only_a_gpu_runs_is_type_checked(path):
    assert f'    "{path}",\n' in (ROOT / "pyproject.toml").read_text()


def gathered_and_multiplied():
    layout = Layout(gpu_tests.RANKS, (gpu_tests.ROWS, gpu_tests.K), torch.bfloat16, 2)
    gpu_tests.test_virtual_ranks_gather_and_multiply(open_symmetric_loopback("gather", layout, 2.0, CUDA))


def test_what_a_test_launches_is_recorded():
    with stand_in("sm_90") as gpu:
        gathered_and_multiplied()
    assert gpu.launches == {"_linear_fwd_kernel": 6 * (1 + gpu_tests.RANKS)}


def of_kernel(x_ptr, w_ptr): ...


def of_host(self, rows, weights, biases): ...


@pytest.mark.parametrize(
    ("owner", "name", "changed"),
    [(linear._linear_fwd_kernel, "fn", of_kernel), (Plain, "product", of_host)],
    ids=["kernel", "host"],
)
def test_a_changed_signature_is_an_error(owner, name, changed, monkeypatch):
    monkeypatch.setattr(owner, name, changed)
    with stand_in("sm_90"), pytest.raises(TypeError, match=r"too many positional|unexpected keyword"):
        gathered_and_multiplied()


def test_a_case_without_its_filter_is_found(monkeypatch):
    real, left_out = qualify_ranks.runs_on, set()

    def runs_on(case, target):
        if not real(case, target):
            left_out.add(case.name)
        return True

    monkeypatch.setattr(qualify_ranks, "runs_on", runs_on)
    with stand_in("sm_80"):
        _, computed = cases_on_gpu()
    assert len(left_out) > 100
    assert {name for name, _, failure in computed if failure} == left_out


def test_a_missing_skip_is_found():
    with stand_in("sm_80"), pytest.raises(ValueError, match="fp8 expected a GPU of capability") as error:
        test_quantize.test_rows_longer_than_a_program_holds(CUDA)
    assert not compares_numbers(error.value)


def test_a_wrong_shape_is_found(monkeypatch):
    monkeypatch.setattr(reference, "bias_grad_ref", lambda dy: dy.sum(1))
    with stand_in("gfx942"):
        _, computed = cases_on_gpu("bias_grad")
    assert computed
    assert all("db has shape" in failure for _, _, failure in computed)


HERE, THERE = (lambda: torch.zeros(1, dtype=torch.int32)), (lambda: torch.zeros(16, 16, device=CUDA))
REFUSED = {
    "too few": (lambda: ((THERE(),), {}), TypeError, "missing a required argument"),
    "host memory": (lambda: ((THERE(), HERE(), 1, 2), {}), ValueError, "awaited_ptr: a pointer into cpu"),
    "option": (lambda: ((THERE(), THERE(), 1, 2), {"num_wraps": 4}), KeyError, "no options .'num_wraps'"),
    "descriptor": (
        lambda: ((TensorDescriptor.from_tensor(THERE(), [16, 16]), THERE(), 1, 2), {}),
        ValueError,
        "word_ptr is a descriptor",
    ),
    "fp8": (
        lambda: ((THERE().to(torch.float8_e4m3fn), THERE(), 1, 2), {}),
        ValueError,
        "word_ptr: type fp8e4nv is not supported",
    ),
}


@pytest.mark.parametrize(("given", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_launch_is_refused_as_triton_refuses_it(given, error, words):
    with stand_in("sm_80"):
        arguments, options = given()
        with pytest.raises(error, match=words):
            flags._advance_kernel[(1,)](*arguments, **options)


@pytest.mark.parametrize(
    ("needs", "gpus"),
    [
        ((), {*TARGETS}),
        (("fp8",), {"sm_89", "sm_90", "sm_100"}),
        (("descriptors",), {"sm_90", "sm_100"}),
        (("fp8", "descriptors"), {"sm_90", "sm_100"}),
    ],
)
def test_a_test_runs_where_its_needs_are_met(needs, gpus):
    assert {name for name, target in TARGETS.items() if lacking(needs, target) is None} == gpus


IN_FP8 = SimpleNamespace(op=SimpleNamespace(keywords={"quantize": "rowwise"}))


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({"form": "descriptor"}, {"marked", "descriptors"}),
        ({"form": "pointer"}, {"marked"}),
        ({"case": IN_FP8}, {"marked", "fp8"}),
    ],
    ids=["descriptor", "pointer", "fp8"],
)
def test_needs_are_marks_forms_and_ops(params, needs):
    mark = SimpleNamespace(args=("marked",))
    item: Any = SimpleNamespace(iter_markers=lambda _: [mark], callspec=SimpleNamespace(params=params))
    assert needs_of(item) == needs


def test_an_unknown_need_is_refused():
    with pytest.raises(ValueError, match="expected needs of fp8 and descriptors, got 'tma'"):
        lacking(["tma"], TARGETS["sm_90"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AssertionError("assert 0 == 1"), True),
        (AssertionError("Regex pattern did not match."), False),
        (TypeError("missing 1 required positional argument"), False),
    ],
    ids=["number", "message", "signature"],
)
def test_only_comparisons_of_numbers_are_excused(error, expected):
    assert compares_numbers(error) == expected
