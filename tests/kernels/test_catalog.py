"""The catalog says what launches really do; a few entries are compiled here, all of them by the gate."""

import importlib
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.kernels.checks import normal
from tpkernels.kernels import linear
from tpkernels.kernels.catalog import Entry, catalog
from tpkernels.kernels.tiles import KERNELS, MatmulTile

ENTRIES = catalog()
SHARED_LIMIT = 232448  # bytes a block may have on sm_90


def jit_function(entry: Entry):
    return getattr(importlib.import_module(f"tpkernels.kernels.{entry.module}"), entry.function)


def test_catalog_names_are_unique():
    assert [name for name, times in Counter(entry.name for entry in ENTRIES).items() if times > 1] == []


def test_catalog_holds_every_kernel_and_form():
    held = {
        (entry.name.removeprefix("gfx942/").removeprefix("sm_100/").split("/")[0], entry.form)
        for entry in ENTRIES
    }
    assert held >= {(k, form) for k in (*KERNELS, "gather_linear") for form in ("descriptor", "pointer")}
    assert held >= {(kernel, "pointer") for kernel in ("norm_fwd", "norm_bwd", "sum_rows", "reduce_slots")}
    vocabulary = ("embedding_fwd", "embedding_bwd", "softmax_statistics", "cross_entropy_grad")
    assert held >= {(kernel, "pointer") for kernel in vocabulary}


@pytest.mark.parametrize("entry", {(e.module, e.form): e for e in ENTRIES}.values(), ids=lambda e: e.name)
def test_catalog_entry_names_every_argument_once(entry):
    assert sorted([*entry.arguments, *entry.constants]) == sorted(jit_function(entry).arg_names)
    assert entry.aligned <= set(entry.arguments)


@pytest.mark.parametrize(("form", "aligned"), [("descriptor", True), ("pointer", False)])
def test_catalog_constants_are_those_of_a_launch(form, aligned, device, monkeypatch):
    """What reaches Triton from the launcher, against the entry of the same name."""
    seen = {}

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **constants: seen.update(constants)

    monkeypatch.setattr(linear, "_linear_fwd_kernel", Recorder())
    entry = next(
        e for e in ENTRIES if e.name.startswith(f"linear/{form}/bf16") and e.name.endswith("gelu_tanh+bias+z")
    )
    c = entry.constants
    tile = MatmulTile(
        c["BLOCK_ROWS"], c["BLOCK_COLS"], c["BLOCK_DEPTH"], entry.num_warps, entry.num_stages, c["PARTS"],
        flatten=c["FLATTEN"], group=c["GROUP"],
    )  # fmt: skip
    x, w, b = (normal(16, 16, torch.bfloat16, device) for _ in range(3))
    linear.linear_fwd(x, w, b[0], activation="gelu_tanh", keep_z=True, tile=tile, form=form)
    assert (seen.pop("num_warps"), seen.pop("num_stages")) == (entry.num_warps, entry.num_stages)
    strides = {name for name in c if name.startswith("stride_")}
    assert seen.pop("FAST") is (device.type == "cuda")  # never in the interpreter
    assert seen == {name: value for name, value in c.items() if name not in strides | {"FAST"}}


def compile_for(architecture: str, *names: str) -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_entries", architecture, *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def hopper() -> dict[str, dict]:
    largest = {
        kernel: next(e.name for e in ENTRIES if e.name.startswith(f"{kernel}/descriptor/bf16"))
        for kernel in KERNELS
    }
    return compile_for("sm_90", *largest.values())


def test_descriptor_kernels_compile_to_wgmma_and_tma(hopper):
    for name, facts in hopper.items():
        assert facts["wgmma"] > 0, name
        assert facts["serial_wgmma"] == 0, name
        assert facts["tma_loads"] > 0, name
        assert facts["shared"] <= SHARED_LIMIT, name


def test_wgrad_accumulates_by_the_copy_engine(hopper):
    (name,) = (name for name in hopper if name.startswith("wgrad"))
    assert name.endswith("+=fp32")
    assert hopper[name]["tma_reductions"] > 0


def test_pointer_kernels_pipeline_and_address_in_64_bits():
    """32-bit offsets would wrap in tensors past 2**31 elements."""
    names = [
        next(e.name for e in ENTRIES if e.name.startswith(f"{kernel}/pointer/bf16")) for kernel in KERNELS
    ]
    for name, facts in compile_for("sm_80", *names).items():
        assert facts["async_copies"] > 0, name
        if name.startswith("wgrad"):
            assert facts["offset_types"] == ["i64"], name
        else:  # beside matrices, vectors of bias or of partial sums
            assert set(facts["offset_types"]) <= {"i32", "i64"}, name
