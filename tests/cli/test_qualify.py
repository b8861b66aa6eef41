"""`python -m tpkernels qualify` on this machine's CPU, and with one thing wrong at a time."""

import json
import os
import random
import re
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.cli.living_ranks import told_by
from tests.on_ranks import on_ranks
from tests.patience import patient
from tests.ranks import RankPool
from tests.warm_python import children_of, is_running, ran, started
from tpkernels.cli import main, qualify_calls, qualify_checks
from tpkernels.cli import qualify as qualify_command
from tpkernels.cli.qualify_world import (
    Check,
    Qualification,
    QualifyWorld,
    save_report,
    saved_report,
    versions_here,
)
from tpkernels.comm.schedule import MOST_CHUNKS, even_chunks, parts_of_shard
from tpkernels.comm.transports.host import HostExchange
from tpkernels.dispatch.cache import Versions
from tpkernels.dispatch.numeric_cases import cases
from tpkernels.gate.numerics import Computed
from tpkernels.kernels import linear as linear_kernel

if torch.cuda.is_available():
    pytest.skip("tries the CPU, and there is a GPU", allow_module_level=True)

SEED = "20261122"
VERSIONS = Versions("Test GPU 1", "2.13.0", "3.7.1", "0123456789ab")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Ranks that live already have their own environment: only this process writes here."""
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def qualified_on(ranks, program, tmp_path):
    """What was printed, and checks by part and name: as under torchrun."""
    report = tmp_path / "report.json"
    command = ["qualify", "--quick", "--seed", SEED, "--json", str(report), str(tmp_path / "cache")]
    ran = told_by(ranks, program, command)
    return ran, checks_of(report, ran.returncode)


def checks_of(report, code):
    told = json.loads(report.read_text())
    assert told["right"] == (code == 0)
    return {f"{check['part']} {check['name']}": check for check in told["checks"]}


def qualify(command, *faults):
    """As typed but with a little of each part, and with faults; its report stays in a folder of this test."""
    *arguments, folder = command
    with ExitStack() as planted:
        planted.enter_context(patch.dict(os.environ, {"TPKERNELS_CACHE_DIR": folder}))
        planted.enter_context(patch.object(qualify_checks, "MOST_QUICK", 1))
        planted.enter_context(patch.object(qualify_checks, "CPU_SIZES", (64, 32, 32)))
        planted.enter_context(patch.object(qualify_calls, "SIZES", ("small",)))
        for fault in faults:
            planted.enter_context(fault)
        return main(arguments)


def wrong(checks):
    return {name for name, check in checks.items() if check["status"] == "wrong"}


def test_all_is_right_here_and_the_report_is_kept(tmp_path):
    report = tmp_path / "report.json"
    run = ran("-m", "tpkernels", "qualify", "--quick", "--seed", SEED, "--json", report)
    checks, told = checks_of(report, run.returncode), json.loads(report.read_text())
    assert not wrong(checks), run.stdout + run.stderr
    assert {"transports c10d", "calls c10d", "transports shared", "calls shared"} <= set(checks)
    assert checks["graphs c10d"]["status"] == "left out"
    tried = {name.removeprefix("kernels ") for name in checks if name.startswith("kernels ")} - {"others"}
    left_out = checks["kernels others"]["text"].split(", ")
    assert sorted([*tried, *left_out]) == sorted({case.name.partition("/")[0] for case in cases()})
    assert checks["calls shared"]["numbers"].keys() == {"calls", "of one exchange"}
    assert checks["calls shared"]["numbers"]["calls"] == qualify_calls.CALLS_QUICK
    (times,) = (check["numbers"] for name, check in checks.items() if name.startswith("times"))
    assert set(times) == {"c10d", "shared", "naive"}
    assert told["seed"] == int(SEED)
    assert f"--seed {SEED}" in run.stdout
    auto = [line for line in run.stdout.splitlines() if line.startswith("auto: ")]
    assert auto == [told["auto"]]
    assert re.match(r"auto: (c10d|shared) \(.+\); measured: ", told["auto"])
    assert run.stdout.endswith("qualified\n")
    assert not list((tmp_path / "cache").glob("qualified_*")), "a quick one qualifies nothing"


def with_a_kernel_that_is_off(command):
    """Which leaves one of its tiles out."""
    real = linear_kernel.linear_fwd

    def off(*args, **kwargs):
        results = real(*args, **kwargs)
        results.y[:16, :16] = 0
        return results

    return qualify(
        command,
        patch.object(linear_kernel, "linear_fwd", off),
        patch.object(qualify_checks, "_one_of_each_first", _of_linear),
    )


def _of_linear(cases, draw):
    return [case for case in cases if case.name.startswith("linear_fwd/")]


def test_a_kernel_that_is_off_is_named_with_how_far(ranks2, tmp_path):
    run, checks = qualified_on(ranks2, with_a_kernel_that_is_off, tmp_path)
    assert (run.returncode, wrong(checks)) == (1, {"kernels linear_fwd"}), run.stdout
    text = checks["kernels linear_fwd"]["text"]
    assert re.search(r"rank 1: (descriptor|pointer)/\w+/\w+ y is off by [\d.e+]+ times the bound", text), text
    assert run.stdout.endswith("not qualified: kernels linear_fwd\n")


def test_every_kernel_is_tried_however_little_time_there_is(monkeypatch):
    monkeypatch.setattr(qualify_checks, "examine", lambda case, frames: Computed(case.name, 0.1, ""))
    tried = set()
    for rank in range(2):
        world = QualifyWorld(rank, 2, torch.device("cpu"), 7, 1e-9, quick=False)
        launchers, computed = qualify_checks._computed(world)
        tried |= {name.partition("/")[0] for name, _, _ in computed}
        assert len(computed) <= len(launchers) / 2 + 1
    assert tried == launchers == {case.name.partition("/")[0] for case in cases()}


@pytest.mark.parametrize(("in_a_row", "status"), [(6, "right"), (1, "wrong")])
@on_ranks(2)
def test_an_exchange_is_used_until_its_flags_begin_again(in_a_row, status):
    """Not if each problem has one call in turn: other exchanges close it before."""
    world = QualifyWorld(dist.get_rank(), 2, torch.device("cpu"), seed=1, seconds=patient(60), quick=False)
    sizes = {"IN_TURN": 2, "IN_A_ROW": in_a_row, "LAST_ROW": in_a_row, "EPOCHS": 5, "SIZES": ("small",)}
    with patch.multiple(qualify_calls, **sizes), world.group_over("shared") as group:
        check = qualify_calls._delayed_calls(world, "shared", group, end=1.0)
    assert (check.status, check.numbers["calls"]) == (status, 8 * (2 + in_a_row))
    assert ("its flags begin again after 5" in check.text) == (status == "wrong")


def test_calls_come_in_turn_then_in_rows_that_pass_a_look_and_a_wrap():
    order = qualify_calls._order(16, quick=False)
    assert order[:48] == [*range(16)] * 3
    rows = [(problem, len(list(calls))) for problem, calls in groupby(order[48:])]
    assert rows == [(problem, 72) for problem in range(15)] + [(15, 2056)]


def with_bits_that_differ_once(command):
    """The last bits of what rank 1 pushes once, in one call of many: of one number, a sum may lose it."""
    real, delayed_calls, calls = HostExchange.put, qualify_calls._delayed_calls, []

    def delayed(*args):
        calls.clear()
        return delayed_calls(*args)

    def put(self, peer, there, rows, delivery):
        calls.append(peer)
        if len(calls) == 60 and dist.get_rank() == 1:
            rows = torch.nextafter(rows, torch.tensor(9.0, dtype=rows.dtype))
        real(self, peer, there, rows, delivery)

    return qualify(
        command,
        patch.object(HostExchange, "put", put),
        patch.object(qualify_calls, "_delayed_calls", delayed),
        patch.object(qualify_calls, "AT_ONCE", 1),  # else the other rank waits for calls that do not come
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", qualify_calls.DTYPES, ids=str)
def test_shards_of_its_calls_are_one_chunk_and_four(ranks, dtype):
    moved = {"column_linear": ["x"], "row_linear": ["y"]}
    for name, op in qualify_calls.OPS.items():
        for size, chunks in (("small", 1), ("large", MOST_CHUNKS)):
            for seed in range(2):
                full = qualify_calls.operands_of(name, size, ranks, random.Random(seed), dtype)
                shapes = dict(zip((*op.program.operands, "y"), (x.shape for x in full), strict=True))
                for rows, cols in (shapes[what] for what in moved.get(name, ["x", "y"])):
                    wanted = parts_of_shard(rows // ranks * cols * dtype.itemsize)
                    assert even_chunks(rows // ranks, wanted) == chunks


def test_a_transport_whose_bits_differ_once_is_named_with_call_and_place(ranks2, tmp_path):
    run, checks = qualified_on(ranks2, with_bits_that_differ_once, tmp_path)
    assert (run.returncode, wrong(checks)) == (1, {"calls shared"}), run.stdout
    assert re.search(
        r"rank \d: ArithmeticError: call \d+ of \w+ in torch.\w+: .* differs from call \d+, which was the "
        r"same, in \d+ of \d+ values, by up to \d",
        checks["calls shared"]["text"],
    )
    assert checks["calls c10d"]["status"] == "right"


def with_a_transport_that_fails(command):
    """On one rank; the other must not wait for it."""

    def put(self, peer, *_):
        raise RuntimeError("planted: no memory")

    return qualify(command, *[patch.object(HostExchange, "put", put)] * (os.environ["RANK"] == "1"))


def test_a_transport_that_fails_on_one_rank_is_a_line_and_others_go_on(ranks2, tmp_path):
    with RankPool(2) as own:
        run, checks = qualified_on(own, with_a_transport_that_fails, tmp_path)
    assert run.returncode == 1, run.stdout
    assert "transports shared" in wrong(checks)
    assert "rank 1: " in checks["transports shared"]["text"]
    assert "planted: no memory" in checks["transports shared"]["text"]
    assert checks["calls c10d"]["status"] == "right"
    assert "calls shared" not in checks


def a_rank_dies():
    if os.environ.get("RANK") == "0":
        qualify_checks.cases = lambda sizes: os._exit(7)


def test_a_rank_that_dies_is_named_and_leaves_no_process(tmp_path):
    report = tmp_path / "report.json"
    command = ("-m", "tpkernels", "qualify", "--quick", "--json", report)
    with started(*command, planted=a_rank_dies) as run:
        run.until(lambda: len(children_of(run.pid)) == 2)
        ranks = children_of(run.pid)
        assert run.wait() == 1
    (check,) = checks_of(report, 1).values()
    assert check["status"] == "wrong"
    assert re.fullmatch(
        "rank 0 ended with exit code 7; the other ranks were ended, during (the start|kernels)", check["text"]
    )
    assert run.stdout.endswith("not qualified: ranks 2 ranks\n")
    assert [is_running(rank) for rank in ranks] == [False, False]


def test_a_report_is_kept_by_gpu_and_versions(cache):
    right = Qualification(VERSIONS, 2, 1, [Check("times", "a", "right", "fast")], "auto: c10d")
    save_report(right)
    assert saved_report(VERSIONS)["right"] is True
    assert saved_report(Versions("Test GPU 1", "2.14.0", "3.7.1", "0123456789ab")) is None
    save_report(Qualification(VERSIONS, 2, 1, [Check("times", "a", "wrong", "slow")], "auto: c10d"))
    assert saved_report(VERSIONS)["right"] is False
    (path,) = cache.iterdir()
    for damaged in ("{", "[]", '{"format": 2}', path.read_text().replace("2.13.0", "2.12.0")):
        path.write_text(damaged)
        assert saved_report(VERSIONS) is None


@pytest.mark.parametrize(("arguments", "kept"), [([], True), (["--quick"], False)])
def test_only_a_full_run_is_kept(arguments, kept, monkeypatch, capsys):
    lines = [{"check": asdict(Check("times", "MLP", "right", "fast"))}, {"auto": "auto: c10d (the default)"}]

    def run_ranks(command, ranks):
        Path(os.environ[qualify_command.PROGRESS]).write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        return 0

    monkeypatch.setattr("tpkernels.training.launch.run_ranks", run_ranks)
    assert main(["qualify", *arguments]) == 0
    assert capsys.readouterr().out.endswith("auto: c10d (the default)\nqualified\n")
    assert (saved_report(versions_here()) is not None) == kept


def test_an_interrupted_run_says_nothing_of_the_gpu(monkeypatch, capsys):
    monkeypatch.setattr("tpkernels.training.launch.run_ranks", lambda command, ranks: 130)
    assert main(["qualify"]) == 130
    assert saved_report(versions_here()) is None
    assert "qualified" not in capsys.readouterr().out


class Gpus:
    """What of CUDA is asked for how ranks reach each other."""

    def __init__(self, count, apart=()):
        self.count, self.apart = count, apart

    def device_count(self):
        return self.count

    def can_device_access_peer(self, i, j):
        return {i, j} not in self.apart


@pytest.mark.parametrize(
    ("ranks", "gpus", "symmetric"),
    [
        (8, Gpus(8), ""),
        (8, Gpus(1), ""),
        (4, Gpus(4, [{1, 3}]), "GPUs 3 and 1 do not reach each other's memory"),
        (1, Gpus(1), "a rank alone sends nothing"),
    ],
)
def test_gpus_are_tried_over_what_they_can(ranks, gpus, symmetric, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", gpus.device_count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", gpus.can_device_access_peer)
    world = QualifyWorld(0, ranks, torch.device("cuda"), 1, 1.0, quick=True)
    expected = {
        "c10d": symmetric if ranks == 1 else "",
        "symmetric": symmetric,
        "symmetric-rounds": symmetric,
    }
    assert world.transports() == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if not symmetric:
        assert world.transports() == {**expected, "symmetric-rounds": "ranks are on several machines"}
