"""Which candidates a problem has on which GPU."""

import pytest
import torch

from tpkernels.tuning import candidates as module
from tpkernels.tuning.candidates import candidates, least_shared_memory
from tpkernels.tuning.gpus import GPUS, Gpu
from tpkernels.tuning.problem import STEPS, problem_of
from tpkernels.tuning.sample import Layer

BIG = Layer(8192, 4096, 4096)


def names(step, layer, gpu="h100"):
    return [candidate.name for candidate in candidates(problem_of(step, layer.arguments(step)), GPUS[gpu])]


def forms(found):
    return {name.split("/")[1] for name in found if name.startswith("triton/")}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("step", STEPS)
def test_torch_comes_first_and_names_are_unique(step, gpu):
    found = names(step, BIG, gpu)
    assert found[0] == "torch"
    assert len(set(found)) == len(found) > 1


def test_descriptors_are_for_hopper_and_aligned_16_bit_operands():
    assert forms(names("linear", BIG)) == {"descriptor", "pointer"}
    assert forms(names("linear", BIG, "a100")) == {"pointer"}
    assert forms(names("linear", Layer(8192, 4096, 4096, torch.float32))) == {"pointer"}
    assert forms(names("linear", Layer(8192, 4097, 4096))) == {"pointer"}


def test_a_dtype_without_kernels_leaves_torch():
    assert names("linear", Layer(64, 64, 64, torch.float64)) == ["torch"]


def test_an_empty_problem_leaves_torch():
    for sizes in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        assert names("wgrad", Layer(*sizes)) == ["torch"]


def test_without_triton_torch_is_left(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert names("glu", BIG) == ["torch"]


@pytest.mark.parametrize(
    ("layer", "gpu", "offered"),
    [
        (Layer(64, 64, 64, activation="gelu_tanh", training=False), "h100", True),
        (Layer(64, 64, 64, activation="relu", training=False), "h100", True),
        (Layer(64, 64, 64, activation="gelu_tanh", training=False), "mi300x", False),  # the erf form there
        (Layer(64, 64, 64, activation="gelu_tanh"), "h100", False),  # z is wanted
        (Layer(64, 64, 64, activation="gelu_tanh", training=False, bias=False), "h100", False),
        (Layer(64, 64, 64, activation="silu", training=False), "h100", False),
    ],
)
def test_fused_activation_is_offered_where_it_is_the_same(layer, gpu, offered):
    assert ("addmm_activation" in names("linear", layer, gpu)) == offered


def test_fused_accumulation_is_offered_by_dtype():
    assert "addmm_dtype_out" in names("wgrad_accumulate_", BIG)
    assert "addmm_" in names("wgrad_accumulate_", Layer(64, 64, 64, torch.float32))


def test_absent_operators_are_not_offered(monkeypatch):
    monkeypatch.delattr(torch, "_addmm_activation")
    assert "addmm_activation" not in names("linear", Layer(64, 64, 64, activation="relu", training=False))


def test_tiles_that_do_not_fit_the_gpu_are_left_out():
    h100 = GPUS["h100"]
    problem = problem_of("linear", BIG.arguments("linear"))
    small = Gpu("small", h100.target, shared_memory=120_000)
    ours = [c for c in candidates(problem, small) if c.tile]
    assert ours
    for candidate in ours:
        assert least_shared_memory(candidate.tile, candidate.form, problem) <= 120_000
    assert "triton/descriptor/128x256x64-w8-s4" in names("linear", BIG)
    assert "triton/descriptor/128x256x64-w8-s4" not in [c.name for c in ours]


def test_shared_memory_is_what_the_compiler_takes_but_for_barriers():
    """Figures of compiled kernels: 229,920 bytes for the large tile, 114,712 for the next."""
    problem = problem_of("linear", BIG.arguments("linear"))
    tiles = {c.name: c for c in candidates(problem, GPUS["h100"]) if c.tile}
    for name, compiled in (("128x256x64-w8-s4", 229_920), ("128x128x64-w4-s3", 114_712)):
        candidate = tiles[f"triton/descriptor/{name}"]
        assert 0 <= compiled - least_shared_memory(candidate.tile, candidate.form, problem) < 1024


def test_tiles_far_from_the_size_of_the_result_are_left_out():
    for one_row in names("linear", Layer(1, 4096, 4096))[1:]:
        assert not one_row.split("/")[2].startswith("128x")
    for large in names("linear", Layer(65536, 8192, 4096))[1:]:
        assert not large.split("/")[2].startswith("16x")
    assert len(names("linear", Layer(1, 16, 16))) > 1
