"""The gate: what is done more often is found and named; times are judged when that is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import gate
from bench.__main__ import main as bench
from bench.baseline import FILE, baseline_of, read_baseline
from bench.case import Work
from bench.cases.local import Local
from bench.cases.parallel import case_of
from bench.counts import ROOT, Counts, added, counts_of
from bench.record import extra_info
from bench.results import NEEDED, BadFile, Results, for_github_action, read
from bench.verdict import Finding, of_counts, of_times
from tests.programs import ran
from tpkernels import ops
from tpkernels.dispatch import backends
from tpkernels.extension import Extension, ExtensionState
from tpkernels.kernels import launch
from tpkernels.kernels.target import H100

CHECKOUT = Path(__file__).parents[2]
NORM = "bench/test_norm.py::test_norm[rms_norm-256-256]"
TAKEN = extra_info(Work("linear", "3", "forward", "torch.sum"), {"ours": [1.0, 1.0], "naive": [1.0, 1.0]})


def told(was: Counts, now: Counts) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in of_counts({"a": was}, Results({}, {}, "", {"a": now}))]


@pytest.mark.parametrize(
    ("kind", "was", "now", "expected"),
    [
        ("operators", {"aten::mm": 2}, {"aten::mm": 2}, []),
        (
            "operators",
            {"aten::mm": 14},
            {"aten::mm": 14, "aten::clone": 1},
            [("more", "operators 14 -> 15: aten::clone +1")],
        ),
        (
            "operators",
            {"aten::mm": 1, "aten::add": 1},
            {"aten::mm": 1, "aten::clone": 1},
            [("other", "operators 2 -> 2: aten::add -1, aten::clone +1")],
        ),
        ("operators", {"aten::mm": 3}, {"aten::mm": 1}, [("less", "operators 3 -> 1: aten::mm -2")]),
        (
            "Python calls",
            {"comm/calls.py": 24},
            {"comm/calls.py": 31},
            [("more", "Python calls 24 -> 31: comm/calls.py +7")],
        ),
        ("Python calls", {"a.py": 24}, {"b.py": 24}, []),  # a function has moved
        (
            "bytes allocated",
            {"aten::mm": 1024},
            {"aten::empty": 2048},
            [("more", "bytes allocated 1,024 -> 2,048: aten::empty +2,048, aten::mm -1,024")],
        ),
        (
            "launches",
            {},
            {str(n): 1 for n in range(9)},
            [("more", "launches 0 -> 9: 0 +1, 1 +1, 2 +1, 3 +1, 4 +1, 5 +1, 3 more")],
        ),
    ],
    ids=["equal", "more", "other", "less", "calls", "moved", "bytes", "many"],
)  # fmt: skip
def test_what_grew_is_named(kind, was, now, expected):
    assert told({kind: was}, {kind: now}) == expected


def test_absent_and_failed_cases_are_red():
    now = Results({}, {"failed": "story\nE   AssertionError: result 0 of ours is off\nmore"}, "", {"new": {}})
    found = {one.case: one for one in of_counts({"failed": {}, "gone": {}}, now)}
    assert {name: one.kind for name, one in found.items()} == {
        "failed": "wrong",
        "gone": "missing",
        "new": "new",
    }
    assert found["failed"].text == "AssertionError: result 0 of ours is off"
    assert all(one.fails for one in found.values())


def test_update_is_named_where_nothing_is_a_mistake():
    more, wrong, less = (Finding(kind, "a", "text") for kind in ("more", "wrong", "less"))
    assert gate.lines([more])[-1] == "regressions: 1; if they are meant: --update"
    assert gate.lines([more, wrong])[-1] == "regressions: 2"
    assert gate.lines([more], meant=False)[-1] == "regressions: 1"
    assert gate.lines([less])[-1] == "better: --update keeps it"


# Planted faults, each against the same call without it.


def longer(function: Callable[..., Any]) -> Callable[..., Any]:
    """One more Python call, in a file of the package."""
    scope = {"function": function}
    source = "def planted(*given, **options):\n    return function(*given, **options)\n"
    exec(compile(source, f"{ROOT}planted.py", "exec"), scope)
    return scope["planted"]


def cloning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given, **options: function(*given, **options).clone()


def allocating(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A buffer of 4 KiB."""

    def planted(*given: Any, **options: Any) -> Tensor:
        torch.empty(1024)
        return function(*given, **options)

    return planted


def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def planted(*given: Any, **options: Any) -> Tensor:
        function(*given, **options)
        return function(*given, **options)

    return planted


def reducing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def planted(*given: Any, **options: Any) -> Tensor:
        dist.all_reduce(torch.ones(256))
        return function(*given, **options)

    return planted


PLANTED = {
    "calls": (longer, "Python calls", r"\d+ -> \d+: planted.py \+1"),
    "clone": (cloning, "operators", r"\d+ -> \d+: aten::clone \+1"),
    "buffer": (allocating, "bytes allocated", r"[\d,]+ -> [\d,]+: aten::empty \+4,096"),
    "primitive": (twice, "primitives", r"2 -> 3: rms_norm by torch \+1"),
}


def norm_counts() -> Counts:
    return counts_of(Local(torch.float32, "cpu").rms_norm(256, 256).ways["ours"])


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_an_op_is_told(fault):
    plant, kind, text = PLANTED[fault]
    was = norm_counts()
    with patch.object(ops, "rms_norm", plant(ops.rms_norm)):
        found = told(was, norm_counts())
    assert any(one == "more" and re.fullmatch(f"{kind} {text}", said) for one, said in found), found


def test_a_launch_more_is_told():
    def launches() -> list[str]:
        with patch.object(backends, "backend", "triton"), launch.recording(H100) as found:
            Local(torch.bfloat16, "meta").rms_norm(256, 256).ways["ours"]()
        return [one.kernel.__name__ for one in found]

    was = launches()
    with patch.object(ops, "rms_norm", twice(ops.rms_norm)):
        now = launches()
    counts = [{"launches": {name: names.count(name) for name in names}} for names in (was, now)]
    assert told(*counts) == [("more", f"launches {len(was)} -> {len(was) + 1}: _norm_fwd_kernel +1")]


def row_counts(plant: Callable[..., Any] | None) -> Counts:
    """Of a row-parallel layer on this rank."""
    run = case_of("row", False).ways["ours"]
    if plant is None:
        return counts_of(run)
    with patch.object(ops, "row_linear", plant(ops.row_linear)):
        return counts_of(case_of("row", False).ways["ours"])


@pytest.mark.parametrize(
    ("plant", "kind", "text"),
    [
        (reducing, "operators", r"[\d,]+ -> [\d,]+: aten::ones \+2, c10d::allreduce_ \+2"),
        (reducing, "bytes sent", r"[\d,]+ -> [\d,]+: c10d::allreduce_ \+2,048"),
        (twice, "transfers", r"4 -> 8: row_linear \+4"),
    ],
    ids=["collective", "wire", "transfer"],
)
def test_a_fault_between_ranks_is_told(ranks2, plant, kind, text):
    """Counts are of both."""
    was, now = (added(ranks2.run(row_counts, each)) for each in (None, plant))
    found = told(was, now)
    assert any(one == "more" and re.match(f"{kind} {text}", said) for one, said in found), found


def test_counts_are_those_of_the_committed_baseline():
    baseline = read_baseline(FILE)
    if baseline.why_not():
        pytest.skip(baseline.why_not())
    now = Results({}, {}, "", {NORM: norm_counts()})
    assert list(of_counts({NORM: baseline.cases[NORM]}, now)) == []


# The command.


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = bench(["gate", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.fixture
def counted(monkeypatch):
    """What is counted now, without running anything."""
    found: dict[str, Counts] = {"a": {"operators": {"aten::mm": 1}}}
    results = Results({}, {}, "a command", found)
    monkeypatch.setattr(gate, "_counted", lambda: results)
    return found


def test_update_then_compare(counted, tmp_path, capsys):
    path, report = tmp_path / "counts.json", tmp_path / "found.json"
    code, said = main(capsys, "--update", "--baseline", str(path))
    assert (code, "commit it" in said) == (0, True)
    assert main(capsys, "--baseline", str(path))[0] == 0
    counted["a"] = {"operators": {"aten::mm": 1, "aten::clone": 1}}
    code, said = main(capsys, "--baseline", str(path), "--json", str(report))
    assert (code, "operators 1 -> 2: aten::clone +1" in said) == (1, True)
    assert "0 of 1 cases do what" in said
    (finding,) = json.loads(report.read_text())["findings"]
    assert Finding(**finding).kind == "more"
    counted["a"] = {"operators": {}}
    code, said = main(capsys, "--baseline", str(path))
    assert (code, "better: --update" in said) == (0, True)


@pytest.mark.parametrize("version", ["1.2.3", None], ids=["other_torch", "no_file"])
def test_no_baseline_is_red_or_said(counted, tmp_path, capsys, version):
    path = tmp_path / "counts.json"
    if version:
        replace(baseline_of({}), torch=version).write(path)
    code, said = main(capsys, "--baseline", str(path))
    assert (code, "--allow-no-baseline" in said) == (1, True)
    code, said = main(capsys, "--baseline", str(path), "--allow-no-baseline")
    assert (code, "**none was compared**" in said) == (0, True)


def test_another_patch_of_torch_is_a_note():
    patched = replace(baseline_of({}), torch=".".join([*torch.__version__.split(".")[:2], "99"]))
    assert patched.why_not() == ""
    assert patched.note() == f"; torch {patched.torch} is {torch.__version__} now"


def test_variables_of_a_ci_are_left_out(monkeypatch):
    monkeypatch.setenv("TPKERNELS_TRANSPORT", "c10d")
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", "here")
    environment = gate.environment()
    assert "TPKERNELS_TRANSPORT" not in environment
    assert environment["TPKERNELS_CACHE_DIR"] == "here"


def test_an_extension_that_is_absent_is_bad_use(monkeypatch, tmp_path, capsys):
    absent = Extension(ExtensionState.ABSENT, "not built")
    monkeypatch.setattr(gate, "extension", lambda: absent)
    code, said = main(capsys, "--update", "--baseline", str(tmp_path / "counts.json"))
    assert (code, "the extension is not built" in said) == (2, True)


# Times.


def info(ratio: float, *, spread: float = 0.02, **others: Any) -> dict[str, Any]:
    """spread: from the ratio to either quartile, in parts of it"""
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    return TAKEN | {"ratio": ratio, "ratio_quartile_low": low, "ratio_quartile_high": high} | others


def timed(**infos: dict[str, Any]) -> Results:
    return Results(infos, {}, "a command")


@pytest.mark.parametrize(
    ("now", "kind"),
    [
        (info(0.67), "slower"),
        (info(0.85), None),
        (info(0.7, spread=0.5), None),  # within the noise
        (info(9.0), None),
        (info(1.0, dtype="bfloat16"), "changed"),
        (info(1.0, least_ratio=1.3), "broken promise"),
    ],
    ids=["slower", "a_little", "noise", "faster", "changed", "promise"],
)
def test_a_ratio_that_fell_is_told(now, kind):
    assert [one.kind for one in of_times(timed(a=info(1.0)), timed(a=now))] == [kind] * (kind is not None)


def test_a_case_that_did_not_run_is_told():
    (finding,) = of_times(timed(a=info(1.0)), timed())
    assert (finding.kind, finding.text) == ("missing", "was 1.00x, and did not run")


def file_of(path: Path, now: Results) -> str:
    benchmarks = [{"fullname": name, "extra_info": info} for name, info in now.infos.items()]
    path.write_text(json.dumps({"benchmarks": benchmarks, "outcomes": {"failures": now.failures}}))
    return str(path)


def test_times_of_two_runs_are_compared(tmp_path, capsys):
    before, now, other = (
        file_of(tmp_path / name, timed(a=given))
        for name, given in (("a", info(1.0)), ("b", info(0.5)), ("c", info(1.0, device="NVIDIA A100")))
    )
    assert main(capsys, "--times", before, before)[0] == 0
    code, said = main(capsys, "--times", before, now)
    assert (code, "slower          a  1.00x is 0.50x now: 50% less" in said) == (1, True)
    code, said = main(capsys, "--times", before, other)
    assert (code, "is of 'NVIDIA A100': ratios of one device say nothing" in said) == (2, True)


CASE = (
    {key: 1.0 for key in NEEDED}
    | {"device": "cpu"}
    | {key: info(1.0)[key] for key in info(1.0) if "ratio" in key}
)
EXPECTED = "expected results of benchmarks"


def of_one(info: dict[str, Any]) -> str:
    return json.dumps({"benchmarks": [{"fullname": "a", "extra_info": info}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON, got"),
        ("[" * 100_000, "expected JSON, got it is nested too deeply"),
        ("[]", EXPECTED),
        ('{"benchmarks": 3}', EXPECTED),
        ('{"benchmarks": [{"fullname": "a", "extra_info": {"ratio": 1.5}}]}', EXPECTED),
        (of_one(CASE | {"ratio": float("nan")}), EXPECTED),
        (of_one(CASE | {"ratio_quartile_low": "fast"}), EXPECTED),
    ],
)  # fmt: skip
def test_other_files_are_refused(content, message, tmp_path):
    (path := tmp_path / "some.json").write_text(content)
    with pytest.raises(BadFile, match=message):
        read(path)


@pytest.mark.parametrize(
    "content", ["[]", '{"torch": 2}', '{"torch": "2", "python": "3", "cases": {"a": 1}}']
)
def test_another_baseline_is_refused(content, tmp_path):
    (path := tmp_path / "counts.json").write_text(content)
    with pytest.raises(BadFile, match="expected a baseline of counts"):
        read_baseline(path)


def test_entries_have_what_github_action_benchmark_reads():
    found = for_github_action(replace(timed(a=info(1.0)), counted={"a": {"operators": {"aten::mm": 2}}}))
    (ratio,), (count,) = found["customBiggerIsBetter"], found["customSmallerIsBetter"]
    assert ratio == {
        "name": "a",
        "unit": "times as fast as torch.sum",
        "value": 1.0,
        "range": "0.98 to 1.02",
        "extra": "1 s against 1 s, cpu",
    }
    assert count == {"name": "a: operators", "unit": "operators", "value": 2, "extra": "aten::mm: 2"}


@pytest.mark.sweep
def test_a_case_is_run_counted_and_written_for_charts(tmp_path):
    """The real command."""
    file, case = tmp_path / "sub" / "now.json", "smoke-tp1-64-proj-wgrad_add"
    ended = ran(
        "-m", "bench", "run", "--smoke", "--count", "-k", case, "-o", file, "--github-action", tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    now = read(file)
    ((name, said),) = now.infos.items()
    assert said.keys() == TAKEN.keys()
    assert now.counted[name] == read_baseline(FILE).cases[name]
    for tool, entries in for_github_action(now).items():
        assert json.loads((tmp_path / f"{tool}.json").read_text()) == entries


# pytest-benchmark's own options.

SLOW = """
import time
from tpkernels import ops

norm = ops.rms_norm

def slow(*given):
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    return norm(*given)

ops.rms_norm = slow
"""


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """Runs one case with more options of pytest; the first run wrote before.json."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "slow.py").write_text(SLOW)

    def run(*options: object) -> Any:
        command = (
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            NORM,
            "--benchmark-storage",
            folder / "runs",
        )
        return ran(*command, *options, environment={"PYTHONPATH": f"{CHECKOUT}:{folder}"})

    first = run("--benchmark-json", folder / "before.json")
    assert first.returncode == 0, first.stdout + first.stderr
    return folder, run


def test_times_are_benchmarks_of_stable_names(benched):
    folder, _ = benched
    (case,) = json.loads((folder / "before.json").read_text())["benchmarks"]
    assert (case["fullname"], case["group"]) == (NORM, "rms_norm 256x256")
    assert case["stats"]["rounds"] == case["extra_info"]["rounds"] > 3
    assert 1e3 * case["stats"]["median"] == pytest.approx(case["extra_info"]["ours_ms"], rel=1e-3)


@pytest.mark.parametrize("planted", [False, True], ids=["as_before", "slow"])
def test_compare_fail_of_pytest_benchmark_is_red_if_slow(benched, planted):
    folder, run = benched
    compare = (f"--benchmark-compare={folder / 'before.json'}", "--benchmark-compare-fail=median:500%")
    ended = run(*compare, *(("-p", "slow") if planted else ()))
    assert (ended.returncode, "Performance has regressed" in ended.stdout + ended.stderr) == (
        int(planted),
        planted,
    )


def test_histogram_of_pytest_benchmark_is_drawn(benched):
    pytest.importorskip("pygal", reason="pytest-benchmark[histogram] draws with pygal")
    folder, run = benched
    ended = run(f"--benchmark-histogram={folder / 'drawn'}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert list(folder.glob("drawn*.svg"))
