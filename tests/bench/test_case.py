"""What a benchmark says: right before quick, ways in turn, the slowest rank; what its cases compute."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import record
from bench.baseline import FILE, read_baseline
from bench.case import Case, Measured, Work, measured_on_ranks
from bench.cases import rivals
from bench.cases.bucket_overlap import efficiency, listed
from bench.cases.buckets import low, with_better_ddp
from bench.cases.overlap import Times, problem, rows_to_copy
from bench.cases.scaled import OFF_BY, PASSES, case_of
from bench.measure import WARM_UPS, interleave, seconds_of_processor, slowest
from bench.record import extra_info
from bench.shapes import RATED_GPUS, SMOKE, Shape, all_shapes, shapes_of
from tests.programs import ran
from tpkernels.dispatch.products import PRODUCTS

ROOT = Path(__file__).parents[2]
WORK = Work("sum", "3", "forward", "torch.sum", flops=2 * 10**12, bytes=8)


def case(ours: Tensor, naive: Tensor) -> Case:
    return Case(WORK, {"ours": lambda: (ours,), "naive": lambda: (naive,)})


@pytest.mark.parametrize(
    ("ours", "naive", "told"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), "result 0 of ours is off by 4"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "off by nan"),
        (torch.ones(2), torch.ones(2, 1), r"the shape \(2,\), expected \(2, 1\)"),
        (torch.ones(2), torch.zeros(2), "off by inf"),
    ],
    ids=["slightly", "nan", "shape", "zero"],
)
def test_wrong_result_is_an_error_before_anything_is_timed(ours, naive, told):
    with pytest.raises(AssertionError, match=told):
        case(ours, naive).time(5)


def test_results_agree_as_well_as_their_dtype_allows():
    half, other = torch.ones(4), torch.full((4,), 1.001)
    replace(case(half, other), work=replace(WORK, dtype=torch.bfloat16)).check()
    with pytest.raises(AssertionError, match="off by"):
        case(half, other).check()


def test_an_accumulating_way_is_checked_after_as_many_calls_as_naive():
    sums = {name: torch.zeros(2) for name in ("ours", "naive", "other")}
    ways = {name: lambda name=name: (sums[name].add_(1.0),) for name in sums}
    Case(WORK, ways).check()


def test_order_turns_and_first_rounds_are_not_told():
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleave(ways, 6, seconds_of_processor(1))
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys("abc", 6)
    assert ["".join(order[i : i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]
    assert len(order) == 3 * (6 + WARM_UPS)


def test_waiting_is_no_work_of_a_single_process():
    assert seconds_of_processor(2)(lambda: time.sleep(0.2)) < 0.1


def test_a_round_takes_as_long_as_on_the_slowest_rank():
    assert slowest([{"a": [1.0, 5.0]}, {"a": [3.0, 2.0]}]) == {"a": [3.0, 5.0]}


def late_on_rank_1(wrong_rank: int) -> Case:
    rank = dist.get_rank()

    def late() -> list[Tensor]:
        time.sleep(0.03 * rank)
        return [torch.full((2,), 2.0 if rank == wrong_rank else 1.0)]

    work = replace(WORK, world=dist.get_world_size())
    return Case(work, {"ours": late, "naive": lambda: [torch.ones(2)]})


def test_ranks_check_and_time_and_the_slowest_counts(ranks2):
    work, seconds, _ = measured_on_ranks(ranks2, late_on_rank_1, -1, rounds=3)
    assert work.world == 2
    assert min(seconds["ours"]) >= 0.03
    with pytest.raises(RuntimeError, match="rank 1: AssertionError: sum 3 forward: result 0 of ours is off"):
        measured_on_ranks(ranks2, late_on_rank_1, 1, rounds=3)


SECONDS = {"ours": [1.0, 2.0, 4.0], "naive": [2.0, 2.0, 2.0], "compiled": [3.0, 6.0, 12.0]}


def test_every_result_has_the_same_keys_and_one_for_each_further_way():
    info = extra_info(WORK, SECONDS)
    assert (info["ratio"], info["ratio_quartile_low"], info["ratio_quartile_high"]) == (1.0, 0.75, 1.5)
    assert (info["ours_ms"], info["naive_ms"], info["rounds"]) == (2000.0, 2000.0, 3)
    assert (info["ratio_to_compiled"], info["roofline"], info["device"]) == (3.0, None, "cpu")
    assert (info["dtype"], info["backend"] in ("torch", "triton")) == ("float32", True)
    assert info["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(info)) == info


def test_roofline_is_the_data_sheets_time_by_the_best_of_ours(monkeypatch):
    gpu = RATED_GPUS["h100"]
    monkeypatch.setattr(record, "this_gpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.name)
    on_gpu = replace(WORK, device="cuda")
    assert extra_info(on_gpu, SECONDS)["roofline"] == pytest.approx(2e12 / 989e12, abs=1e-4)
    assert extra_info(on_gpu, SECONDS)["device"] == "NVIDIA H100 80GB HBM3"
    backends = [extra_info(replace(work, backend="auto"), SECONDS)["backend"] for work in (on_gpu, WORK)]
    assert backends == ["auto", "torch"]
    assert extra_info(replace(on_gpu, flops=None), SECONDS)["roofline"] is None
    assert extra_info(WORK, SECONDS)["roofline"] is None, "beside a GPU, but on the CPU"


def test_page_explains_each_key():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    keys = {key for key in extra_info(WORK, SECONDS) if not key.startswith("ratio_to_")}
    explained = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    named = {key for cell in explained for key in re.findall(r"\w+", cell)}
    assert keys <= named, keys - named


def test_small_set_is_that_of_the_committed_baseline():
    run = ran("-m", "pytest", "bench", "-m", "smoke", "--collect-only", "-q", cwd=ROOT)
    collected = {line for line in run.stdout.splitlines() if "::" in line}
    assert collected == set(read_baseline(FILE).cases), run.stdout + run.stderr


def test_efficiency_is_of_what_could_be_hidden_and_a_control_hides_nothing():
    times = Times(product=10.0, transfer=4.0, sequential=14.0, overlapped=10.0, control=14.0)
    assert times.efficiency == 1.0
    assert times.control_efficiency == 0.0
    slow_link = Times(product=10.0, transfer=20.0, sequential=30.0, overlapped=25.0, control=30.0)
    assert slow_link.efficiency == 0.5
    assert rows_to_copy(512, 1.0, 4.0) == 128
    assert rows_to_copy(512, 9.0, 4.0) == 512
    assert rows_to_copy(512, 1e-9, 4.0) == 1
    sound = {"efficiency": 0.9, "control_efficiency": 0.05}
    assert problem(sound) == ""
    assert "hid 0.40" in problem(sound | {"control_efficiency": 0.4})
    assert problem({"error": "copies do not proceed"}) == "copies do not proceed"


ROUNDS = 20


def better(seconds):
    return with_better_ddp(Measured(WORK, seconds)).seconds


def seconds(**milliseconds):
    """Rounds of which a tenth take less than this, and the others much more."""
    return {
        way: [1e-3 * of, 1e-3 * of, *[1.0 + of] * (ROUNDS - 3), 1e-3 * of] for way, of in milliseconds.items()
    }


def test_hidden_and_floor_are_told_of_the_fastest_tenth():
    assert low([float(round_) for round_ in reversed(range(30))]) == 3.0
    assert low([5.0]) == 5.0
    for copies, views in ((30, 20), (20, 30)):
        told = better(seconds(ours=10, naive=copies, ddp_views=views))
        assert low(told["naive"]) == 20e-3
        assert low(told["ddp_copies"]) == 1e-3 * copies
        assert low(told["ddp_views"]) == 1e-3 * views
    assert low(better(seconds(ours=10, naive=30))["naive"]) == 30e-3
    told = seconds(naive=200, ours=110, alike=120, floor=100, products=90, transfers=95)
    assert efficiency(told, "ours") == pytest.approx(0.9)
    assert listed(told).startswith("ours: efficiency 0.900; alike: efficiency 0.800; ms, ")


@pytest.mark.parametrize("pass_", PASSES)
def test_all_ways_agree_as_far_as_fp8_does(pass_):
    torch.manual_seed(0)
    for shape in shapes_of(SMOKE, tensor=1, tokens=64):
        case = case_of(shape, pass_, torch.bfloat16, "cpu")
        assert set(case.ways) == {"ours", "blockwise", "naive"}
        case.check()
        ours, exact = case.ways["ours"]()[0].double(), case.ways["naive"]()[0].double()
        assert (ours - exact).norm() / exact.norm() > OFF_BY / 10  # it is fp8, and not the naive way


SMALL = {
    f"{model.name}-{layer}": Shape(model, 1, 21, layer, 24, 40)
    for model in (SMOKE, replace(SMOKE, name="ungated", gated=False))
    for layer in ("fc_up", "fc_down")
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU `pytest bench` does so")
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_each_rival_of_a_fused_kernel_computes_the_same(shape):
    """In the interpreter; a step of which no rival is known is none of the benchmark."""
    case = rivals.case_of(shape, torch.bfloat16, "cpu")
    case.check()
    step = case.work.op.removeprefix("fused_")
    libraries = {one.name for one in PRODUCTS[step].library} - {"torch", "addmm_activation"}
    assert case.ways.keys() == {"ours", "naive", "fused"} | libraries


def test_shapes_are_what_the_models_ask_for_and_bounds_follow_from_the_data_sheet():
    shapes = {(one.model.name, one.tensor, one.tokens, one.layer): one for one in all_shapes()}
    assert len(shapes) == 96
    proj = shapes["gpt3-175b", 8, 4096, "proj"]
    assert (proj.out_features, proj.in_features) == (12288, 1536)
    assert proj.flops == 2 * 4096 * 12288 * 1536
    assert RATED_GPUS["h100"].floor(1.0, 3.35e12) == 1.0  # little work, much memory
    for (name, tensor, tokens, layer), one in shapes.items():
        assert one.flops * tensor == shapes[name, 1, tokens, layer].flops


FAULTS = """
import resource, bench.conftest, torch
def faults(calls):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        torch.ones(2**19).exp()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(5)
print(faults(20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_calls_that_are_timed_take_memory_that_is_there():
    """By default each call may be given 1,000 pages that the kernel clears."""
    assert int(ran("-c", FAULTS).stdout) < 1000, "of 20 calls"
