"""`python -m tpkernels qualify` on this machine's CPU, and with one thing wrong at a time."""

import json
import os
import random
import re
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.cli.living_ranks import told_by
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.stand_in_gpu import CUDA, TARGETS, RanksOnStandIn, stand_in
from tpkernels.cli import main, qualify_ranks
from tpkernels.cli.op_programs import OP_PROGRAMS
from tpkernels.cli.qualify_ranks import QualifyWorld, check_kernels, check_transports, problems_of
from tpkernels.comm.schedule import MOST_CHUNKS, even_chunks, parts_of_shard
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.rendezvous import OVERLAPPING
from tpkernels.gate.numerics import Computed, NumericCase
from tpkernels.kernels import linear as linear_kernel
from tpkernels.kernels import triton_versions
from tpkernels.kernels.target import A100, H100, RTX_5090
from tpkernels.registered.numeric_cases import cases

if torch.cuda.is_available():
    pytest.skip("tries the CPU, and there is a GPU", allow_module_level=True)

BF16 = torch.bfloat16
SEED = 20261122


def launcher_of(case):
    return case.name.partition("/")[0]


def test_the_command_finds_all_right_here(tmp_path, ranks2):
    report = tmp_path / "report.json"
    run = told_by(ranks2, main, f"qualify --quick --seed {SEED} --json {report}".split())
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"cpu, torch {torch.__version__}, triton ")
    assert f"2 ranks, --seed {SEED}\n" in run.stdout
    assert run.stdout.endswith("\nqualified\n")
    told = json.loads(report.read_text())
    assert (told["right"], told["ranks"], told["seed"]) == (True, 2, SEED)
    found = {f"{check['part']} {check['name']}": check for check in told["checks"]}
    for name in ("transports c10d", "transports shared", "calls c10d", "calls shared"):
        assert found[name]["status"] == "right"
    assert found["calls shared"]["text"].startswith(f"{qualify_ranks.CALLS_QUICK} delayed calls")
    tried = {name.removeprefix("kernels ") for name in found if name.startswith("kernels ")} - {"others"}
    left_out = found["kernels others"]["text"].split(", ")
    assert sorted([*tried, *left_out]) == sorted(set(map(launcher_of, cases())))


def test_an_interrupted_run_ends_as_its_ranks_did(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("tpkernels.training.launch.run_ranks", lambda command, ranks: 130)
    assert main(["qualify"]) == 130


def world_here(**options):
    return QualifyWorld(torch.device("cpu"), SEED, **{"seconds": 3600.0, "quick": True} | options)


def kernels_with_one_that_is_off():
    """Which leaves one of its tiles out, on rank 1."""
    real = linear_kernel.linear_fwd

    def off(*args, **kwargs):
        results = real(*args, **kwargs)
        if dist.get_rank() == 1:
            results.y[:16, :16] = 0
        return results

    def of_linear(sizes):
        return (case for case in cases(sizes) if launcher_of(case) == "linear_fwd")

    with (
        patch.object(linear_kernel, "linear_fwd", off),
        patch.object(qualify_ranks, "cases", of_linear),
        patch.object(qualify_ranks, "CASES_QUICK", 1),
    ):
        return list(check_kernels(world_here()))


def test_a_kernel_that_is_off_is_named_with_rank_and_how_far(ranks2):
    for (check,) in ranks2.run(kernels_with_one_that_is_off):
        assert (check.part, check.name, check.status) == ("kernels", "linear_fwd", "wrong")
        assert re.search(r"rank 1: [\w/]+ y is off by [\d.e+]+ times the bound", check.text), check.text


@on_ranks(2)
def test_every_kernel_is_tried_however_little_time_there_is():
    def nothing(case, frames):
        return Computed(case.name, 0.1, "")

    with patch.object(qualify_ranks, "examine", nothing):
        checks = list(check_kernels(world_here(seconds=1e-9, quick=False)))
    assert {check.name for check in checks} == set(map(launcher_of, cases()))
    for check in checks:
        assert check.text == "1 case, at most 0.10 of what is allowed against float64"


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("linear_fwd/descriptor/bf16/silu", {"h100"}),
        ("linear_fwd/pointer/fp32/silu", {"a100", "h100", "rtx"}),
        ("scaled_linear_fwd/pointer/fp8/rows/silu", {"h100", "rtx"}),
        ("scaled_linear_fwd/descriptor/fp8/rows/wait", {"h100"}),
        ("quantize/bf16/e4m3", {"h100", "rtx"}),
        ("bias_grad/bf16", {"a100", "h100", "rtx"}),
        ("segment_sum/descriptor/bf16/none/one", {"a100", "h100", "rtx"}),
    ],
)
def test_a_gpu_is_tried_with_what_it_can_run(name, gpus):
    case = NumericCase(name, lambda: {})
    targets = {"a100": A100, "h100": H100, "rtx": RTX_5090}
    assert {gpu for gpu, target in targets.items() if qualify_ranks.runs_on(case, target)} == gpus
    assert qualify_ranks.runs_on(case, None), "the interpreter runs all"


def few_problems():
    """Small ones of a row-parallel layer and an MLP, whose terms travel."""
    kinds = "row_linear", "parallel_mlp"
    return [one for one in problems_of(SEED, 2) if one.name in kinds and len(one.full[0]) < 100]


def transports_with(*faults):
    """The checks of all transports, on few problems; where a put fails, its rank says so."""
    world = world_here()
    with (
        patch.object(qualify_ranks, "problems_of", lambda seed, ranks: few_problems()),
        patch.object(qualify_ranks, "AT_ONCE", 1),  # else the other rank waits for calls that do not come
        patch.object(HostExchange, "put", put_with(*faults)),
    ):
        return {f"{check.part} {check.name}": check for check in check_transports(world)}


def put_with(fault="", at=0):
    real, calls = HostExchange.put, []

    def put(self, peer, there, rows, delivery):
        calls.append(peer)
        if fault == "fails" and dist.get_rank() == 1:
            raise RuntimeError("planted: no memory")
        if fault == "bits" and len(calls) == at and dist.get_rank() == 1:
            rows = torch.nextafter(rows, torch.tensor(9.0, dtype=rows.dtype))
        if fault == "sum" and dist.get_rank() == 1:
            rows = rows * 1.5
        real(self, peer, there, rows, delivery)

    return put


PLANTED = {  # in what rank 1 pushes over shared memory: the check that finds it, and what it says
    "nothing": ((), "", ""),
    "sum": (("sum",), "transports shared", "row_linear in torch.float32: the result, .* is off by .* times"),
    "last_bits_of_one_call": (  # after the comparison with float64
        ("bits", 60),
        "calls shared",
        r"rank \d: ArithmeticError: call \d+ of \w+ in torch.\w+: .* differs from that of its first call "
        r"in \d+ of \d+ values, by up to \d",
    ),
}


@pytest.mark.parametrize(("fault", "wrong", "said"), PLANTED.values(), ids=PLANTED)
def test_a_transport_that_is_off_is_named(fault, wrong, said, ranks2):
    names = ["transports c10d", "calls c10d", "transports shared", "calls shared"]
    for checks in ranks2.run(transports_with, *fault):
        found = {name: check.status for name, check in checks.items()}
        # a transport that is wrong makes no calls
        tried = names[:3] if wrong == "transports shared" else names
        assert found == {name: "wrong" if name == wrong else "right" for name in tried}
        assert not wrong or re.search(said, checks[wrong].text)


def test_a_transport_that_fails_on_one_rank_is_a_line_and_others_go_on():
    with RankPool(2) as own:
        for checks in own.run(transports_with, "fails"):
            assert checks["transports shared"].status == "wrong"
            assert "rank 1: " in checks["transports shared"].text
            assert "planted: no memory" in checks["transports shared"].text
            assert checks["calls c10d"].status == "right"


@on_ranks(2)
def test_calls_end_when_their_time_is_over():
    with patch.object(qualify_ranks, "problems_of", lambda seed, ranks: few_problems()):
        checks = {check.part: check for check in check_transports(world_here(seconds=1e-9, quick=False))}
    said = r"8 delayed calls \(of \d+: the time was over; --seconds gives more\)"
    assert re.match(said, checks["calls"].text)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("number", range(2))
def test_shards_of_its_problems_are_one_chunk_and_four(ranks, number):
    moved = {"column_linear": ["x"], "row_linear": ["y"], "parallel_mlp": ["x", "y"]}
    found = {name: set() for name in moved}
    for name, _, full in problems_of(random.Random(number).randrange(2**31), ranks):
        shapes = dict(zip((*OP_PROGRAMS[name].operands, "y"), (x.shape for x in full), strict=True))
        for rows, cols in (shapes[what] for what in moved.get(name, [])):
            wanted = parts_of_shard(rows // ranks * cols * full[0].dtype.itemsize)
            found[name].add(even_chunks(rows // ranks, wanted))
    assert found == {name: {1, MOST_CHUNKS} for name in moved}


@pytest.mark.parametrize(
    ("ranks", "gpus", "apart", "symmetric"),
    [
        (8, 8, {}, ""),
        (8, 1, {}, ""),
        (4, 4, {1, 3}, "GPUs 3 and 1 do not reach each other's memory"),
        (1, 1, {}, "a rank alone sends nothing"),
    ],
)
def test_gpus_are_tried_over_what_they_can(ranks, gpus, apart, symmetric, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: {i, j} != apart)
    world = object.__new__(QualifyWorld)
    world.ranks, world.on_gpu = ranks, True
    expected = dict.fromkeys(("symmetric", "symmetric-rounds"), symmetric)
    expected["c10d"] = symmetric if ranks == 1 else ""
    assert world.transports() == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if not symmetric:
        assert world.transports() == {**expected, "symmetric-rounds": "ranks are on several machines"}


def cases_on_gpu(of=""):
    """All cases of a GPU, or those of a launcher, of the first of the two sizes that are drawn."""
    drawn = iter([cases])

    def of_one_size(sizes):
        return (case for case in next(drawn, lambda _: ())(sizes) if case.name.startswith(of))

    world = object.__new__(QualifyWorld)
    world.device, world.seed, world.seconds, world.quick = CUDA, SEED, 3600.0, False
    world.rank, world.ranks, world.on_gpu, world.began = 0, 1, True, time.monotonic()
    with patch.object(qualify_ranks, "cases", of_one_size):
        return qualify_ranks.computed_cases(world)


def sweeping(values, few):
    """As parameters, of which `make test` runs a few."""
    return [pytest.param(value, marks=[pytest.mark.sweep] * (value not in few)) for value in values]


@pytest.mark.parametrize("gpu", TARGETS)
def test_kernels_of_a_gpu_are_called_with_what_it_can_run(gpu):
    with stand_in(gpu) as here:
        launchers, computed = cases_on_gpu()
    assert [(name, failure) for name, _, failure in computed if failure] == []
    assert launchers == {launcher_of(case) for case in cases() if qualify_ranks.runs_on(case, here.target)}
    assert {case.partition("/")[0] for case, _, _ in computed} == launchers


@pytest.mark.parametrize("version", sweeping([(3, 6), (3, 8), (3, 9)], {(3, 9)}), ids=str)
def test_kernels_are_called_with_the_tiles_of_each_triton(version, monkeypatch):
    monkeypatch.setattr(triton_versions, "triton_version", lambda: version)
    with stand_in("sm_90"):
        _, computed = cases_on_gpu()
    assert [(name, failure) for name, _, failure in computed if failure] == []


def checks_on_gpu():
    few = [one for one in problems_of(SEED, 2) if len(one.full[0]) < 100 and one.full[-1].dtype == BF16]
    few = [one for one in few if not one.name.endswith("none")]  # the same but for its last line
    with (
        patch.dict(os.environ, {OVERLAPPING: "1"}),
        patch.object(qualify_ranks, "problems_of", lambda seed, ranks: few),
        patch.multiple(qualify_ranks, DELAYS=(0.0,), CALLS_QUICK=4, GPU_CALL_SECONDS=30.0),
    ):
        world = QualifyWorld(CUDA, SEED, 3600.0, quick=True)
        return [*qualify_ranks.check_reserved_sms(world), *check_kernels(world), *check_transports(world)]


@pytest.mark.parametrize("gpu", sweeping(TARGETS, {"sm_80", "sm_90", "gfx942"}))
def test_every_check_of_a_gpu_is_called(gpu, ranks2):
    for checks in RanksOnStandIn(ranks2, gpu).run(checks_on_gpu):
        assert [check for check in checks if check.status == "wrong"] == []
        tried = {f"{check.part} {check.name}" for check in checks}
        transports = ("c10d", "symmetric", "symmetric-rounds")
        assert tried >= {f"{part} {name}" for part in ("transports", "calls") for name in transports}
        assert tried >= {"SMs cublas", "SMs cublaslt", "SMs ours"}
