"""The catalog says what launches really do; a few entries are compiled here, all of them by the gate."""

import importlib
from collections import Counter
from itertools import product

import pytest
import torch

from tests.kernels.checks import normal
from tests.kernels.conftest import device as device
from tpkernels.gate.catalog import Entry, catalog
from tpkernels.kernels import linear
from tpkernels.kernels.footprints import stem_of
from tpkernels.kernels.target import A100, B200, H100, MI300, Target
from tpkernels.kernels.tiles import KERNELS, MatmulTile, candidates

ENTRIES = catalog()
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GPUS = {"sm_80": A100, "sm_89": Target("cuda", 89, 142), "sm_90": H100, "sm_100": B200, "gfx942": MI300}
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


def test_catalog_entries_name_every_argument_once():
    for entry in ENTRIES:
        assert sorted([*entry.arguments, *entry.constants]) == sorted(jit_function(entry).arg_names), (
            entry.name
        )
        assert entry.aligned <= set(entry.arguments), entry.name


def test_every_tile_is_compiled_for_every_gpu_that_may_be_given_it():
    compiled = {(gpu, entry.name) for entry in ENTRIES for gpu in entry.architectures}
    for kernel, (gpu, target), dtype, ragged in product(
        KERNELS, GPUS.items(), ("bf16", "fp32"), (False, True)
    ):
        for form in ("descriptor", "pointer") if target.has_tma and dtype == "bf16" else ("pointer",):
            for tile in candidates(kernel, form, DTYPES[dtype], target, ragged and dtype == "bf16"):
                stem = f"/{stem_of(kernel, form, DTYPES[dtype], tile)}/"
                assert any(a == gpu and stem in f"/{name}" for a, name in compiled), f"{stem} on {gpu}"


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


def test_descriptor_kernels_compile_to_wgmma_and_tma(compiled):
    assert len(compiled["sm_90"]) == len(KERNELS) + 1
    for name, facts in compiled["sm_90"].items():
        assert facts["wgmma"] > 0, name
        assert facts["serial_wgmma"] == 0, name
        assert facts["tma_loads"] > 0, name
        assert facts["shared"] <= SHARED_LIMIT, name


def test_wgrad_accumulates_by_the_copy_engine(compiled):
    (name,) = (name for name in compiled["sm_90"] if name.startswith("wgrad"))
    assert name.endswith("+=fp32")
    assert compiled["sm_90"][name]["tma_reductions"] > 0


def test_pointer_kernels_pipeline_and_address_in_64_bits(compiled):
    """32-bit offsets would wrap in tensors past 2**31 elements."""
    assert len(compiled["sm_80"]) == len(KERNELS)
    for name, facts in compiled["sm_80"].items():
        assert facts["async_copies"] > 0, name
        if name.startswith("wgrad"):
            assert facts["offset_types"] == ["i64"], name
        else:  # beside matrices, vectors of bias or of partial sums
            assert set(facts["offset_types"]) <= {"i32", "i64"}, name
