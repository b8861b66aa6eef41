"""What is known of GPUs that are not here, and how many programs a persistent kernel has on one."""

import pytest
import torch

from tpkernels.gate.occupancy import SHARED_LIMIT
from tpkernels.kernels import launch
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.scatter_linear import scatter_linear
from tpkernels.kernels.target import (
    A100,
    B200,
    H100,
    INTERPRETER,
    L40S,
    MI300,
    RTX_5090,
    Target,
    resident_programs,
)
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, Departures

GPUS = {"sm_80": A100, "sm_89": L40S, "sm_90": H100, "sm_100": B200, "sm_120": RTX_5090, "gfx942": MI300}


def test_gpus_have_the_gates_memory_and_descriptors_where_tiles_fit():
    assert {name: gpu.shared_memory for name, gpu in GPUS.items()} == dict(SHARED_LIMIT)
    assert {name for name, gpu in GPUS.items() if gpu.has_tma} == {"sm_90", "sm_100"}
    assert all(Target("cuda", capability, 100).has_tma for capability in (90, 100, 103))
    assert INTERPRETER.has_tma


@pytest.mark.parametrize("capability", [86, 89, 120, 121, 130])
def test_small_and_unknown_gpus_are_given_99_kb_and_pointers(capability):
    gpu = Target("cuda", capability, 100)
    assert (gpu.shared_memory, gpu.has_tma) == (99 * 1024, False)


@pytest.mark.parametrize(
    ("per_processor", "margin", "programs"),
    [(1, 0, 132), (2, 0, 264), (1, 16, 116), (2, 16, 116), (8, 131, 1)],
)
def test_a_margin_leaves_processors_without_any_program(per_processor, margin, programs):
    """Blocks are placed on all processors in turn: with the margin there is one for each other processor."""
    assert resident_programs("test", H100, per_processor, margin) == programs


@pytest.mark.parametrize("margin", [-1, 132])
def test_a_margin_of_all_processors_is_refused(margin):
    with pytest.raises(ValueError, match=f"test: expected a margin of 0 to 131 processors, got {margin}"):
        resident_programs("test", H100, 1, margin)


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("margin", "programs"), [(0, 2 * 132), (16, 116)])
@pytest.mark.parametrize("kernel", ["linear", "scatter_linear", "reduce_slots"])
def test_kernels_leave_their_margin(kernel, margin, programs):
    x, weight = on_meta(8192, 512), on_meta(4096, 512)
    word, table = on_meta(1, dtype=torch.int32), on_meta(4, dtype=torch.int64)
    chunks = on_meta(4, dtype=torch.int32)
    tile = MatmulTile(128, 128, 64, num_warps=4, num_stages=3, parts=2, per_processor=2)
    with launch.recording(H100) as launches:
        if kernel == "linear":
            linear_fwd(x, weight, arrivals=Arrivals(chunks, word, word), tile=tile, margin=margin)
        elif kernel == "scatter_linear":
            departures = Departures(table, table, chunks, word)
            scatter_linear(((x, weight),), departures=departures, ranks=4, rank=0, tile=tile, margin=margin)
        else:
            reduce_slots(x[None], margin=margin)
            programs *= 4 if not margin else 1
    assert [one.grid for one in launches] == [(programs,)]
