"""The gate: planted falls are found, noise is not, and each other thing that can be is told."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main as bench
from bench.baseline import Baseline, made_of, path_for, read_baseline, write_baseline
from bench.case import Work
from bench.gate import judge
from bench.record import extra_info
from bench.results import Results, pooled, read
from bench.verdict import SLOWED, Finding, findings, hides_a_slowdown, tolerated
from tests.programs import ran
from tpkernels.pictures.figure import can_draw

ROOT = Path(__file__).parents[2]
NAMES = [f"bench/test_linear.py::test_linear[{shape}]" for shape in ("qkv", "proj", "fc_up", "fc_down")]
QKV, PROJ, *_ = NAMES


TAKEN = extra_info(Work("linear", "3", "forward", "torch.sum"), {"ours": [1.0, 1.0], "naive": [1.0, 1.0]})


def info(ratio: float, *, spread: float = 0.02, **others: Any) -> dict[str, Any]:
    """spread: how uncertain the ratio is, in parts of it"""
    said: dict[str, Any] = dict(TAKEN)
    said |= {"op": "linear", "world": 1, "dtype": "float32", "device": "cpu", "rounds": 21, "ratio": ratio}
    half = spread * ratio * sqrt(said["rounds"]) / 3
    said |= {"ratio_quartile_low": ratio - half, "ratio_quartile_high": ratio + half}
    return said | {"versions": {"torch": "2.13.0"}, "revision": "abc"} | others


def results(*infos: dict[str, Any], failures: dict[str, str] | None = None) -> Results:
    """Of as many of the cases, in their order; None for one that did not run."""
    return Results(dict(zip(NAMES, infos, strict=False)), failures or {}, "a command")


BEFORE = results(info(1.2), info(1.0), info(0.8), info(2.0))


def baseline(*runs: Results) -> Baseline:
    return made_of(pooled(runs), floor=0.05, note="")


BASELINE = baseline(BEFORE)


def found(now: Results, baseline: Baseline = BASELINE) -> list[tuple[str, str]]:
    return [(finding.kind, finding.case) for finding in findings(baseline, now)]


def never(names: Sequence[str]) -> Results:
    raise AssertionError(f"{names} need no repetition")


def test_a_fifth_lost_on_one_shape_alone_is_found_and_the_rest_is_green():
    assert found(BEFORE) == []
    assert judge(BASELINE, BEFORE, never, 3).failing == []
    now = results(info(1.2), info(0.8), info(0.8), info(2.0))
    (finding,) = findings(BASELINE, now)
    assert (finding.kind, finding.case) == ("fell", PROJ)
    assert "1.00x is 0.80x now: 20% less, tolerance 5%" in finding.text


NOISY = 0.25
APART, ALIKE = (results(info(1.3)), results(info(0.9)), results(info(1.0))), [results(info(1.0))] * 3


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ([BEFORE], results(info(1.15), info(0.96), info(0.9), info(9.0)), []),  # the floor; a gain
        ([results(info(1.0, spread=NOISY))], results(info(0.81)), []),  # within the spread of either run
        ([results(info(1.0, spread=NOISY))], results(info(0.7)), [("fell", QKV)]),
        ([results(info(1.0))], results(info(0.81, spread=NOISY)), []),
        ([results(info(1.0))], results(info(0.7, spread=NOISY)), [("fell", QKV)]),
        (APART, results(info(0.81)), []),  # what runs have been apart
        (ALIKE, results(info(0.8)), [("fell", QKV)]),
        ([results(info(1.0, spread=0.9))], results(info(0.4, spread=0.9)), [("fell", QKV)]),  # however noisy
    ],
)
def test_a_fall_is_told_that_is_neither_noise_nor_below_the_floor(was, now, told):
    assert found(now, baseline(*was)) == told
    assert tolerated(info(1.0, spread=0.9), info(0.4, spread=0.9), 0.05) == 0.2


CPU = read_baseline(path_for("cpu"), "cpu")


@pytest.mark.parametrize("name", CPU.cases)
def test_a_slowdown_by_half_is_told_in_each_case(name):
    """However noisy its baseline is, and with the same noise now."""
    was = CPU.cases[name]
    ratios = ("ratio", "ratio_quartile_low", "ratio_quartile_high")
    slower = {**was, **{key: was[key] / SLOWED for key in ratios}}
    assert ("fell", name) in found(Results({name: slower}, {}, ""), CPU)
    assert ("fell", name) not in found(Results({name: dict(was)}, {}, ""), CPU)
    assert not hides_a_slowdown(was, dict(was), CPU.floor)


def test_a_case_that_became_faster_is_named_for_what_it_hides():
    now = results(info(1.2), info(1.45), info(0.8), info(2.0))
    lines = judge(BASELINE, now, never, 0).lines(BASELINE, Path("b.json"))
    (line,) = (line for line in lines if "hide" in line)
    assert line.endswith(f"baseline: {PROJ}")


def runs(generator: random.Random, ratio: float, count: int) -> list[dict[str, Any]]:
    """Of a noisy case: medians of runs are apart by an eighth."""
    return [info(ratio * math.exp(generator.gauss(0, 1 / 8)), spread=0.4) for _ in range(count)]


def test_noise_is_green_and_a_slowdown_by_half_is_red():
    """With five runs in the baseline, and five repetitions."""
    red = {1.0: 0, 1 / SLOWED: 0}
    for ratio in red:
        for seed in range(200):
            generator = random.Random(seed)
            before = baseline(*(results(one) for one in runs(generator, 1.0, 5)))
            first, *others = runs(generator, ratio, 6)
            red[ratio] += bool(judge(before, results(first), Again(*others), 5).failing)
    assert red[1.0] <= 4, "of 200"
    assert red[1 / SLOWED] >= 190, "of 200"


def test_missing_wrong_new_and_changed_cases_are_each_told():
    now = Results(
        {
            NAMES[1]: info(1.0, dtype="bfloat16"),
            NAMES[2]: info(0.8),
            "bench/test_new.py::test_new": info(3.0),
        },
        {
            NAMES[
                3
            ]: "long story\nE   AssertionError: linear fc_down: result 0 of ours is off by 1.0e+00\nmore"
        },
        "",
    )
    told = {finding.kind: finding for finding in findings(BASELINE, now)}
    assert {kind: finding.case for kind, finding in told.items()} == {
        "missing": QKV,
        "changed": PROJ,
        "wrong": NAMES[3],
        "new": "bench/test_new.py::test_new",
    }
    assert told["wrong"].text == "AssertionError: linear fc_down: result 0 of ours is off by 1.0e+00"
    assert "dtype float32 is bfloat16 now" in told["changed"].text
    assert [kind for kind, finding in told.items() if not finding.fails] == ["new"]


def test_a_promise_holds_without_a_baseline():
    now = results(info(1.2, least_ratio=1.3))
    assert found(now, replace(BASELINE, cases={})) == [("new", QKV), ("broken promise", QKV)]


class Again:
    """Runs of suspects, one after the other."""

    def __init__(self, *runs: dict[str, Any]) -> None:
        self.runs, self.asked = list(runs), []

    def __call__(self, names: Sequence[str]) -> Results:
        self.asked.append(list(names))
        return Results({names[0]: self.runs.pop(0)}, {}, "")


def test_a_fall_that_repetition_does_not_show_is_green():
    again = Again(info(0.98), info(0.98), info(1.01))
    judged = judge(BASELINE, results(info(1.2), info(0.6), info(0.8), info(2.0)), again, 3)
    assert judged.failing == []
    assert again.asked == [[PROJ]] * 3, "the suspect alone"
    assert judged.results.infos[PROJ]["ratio"] == 0.98


def test_a_fall_that_stays_is_red_with_the_median_of_all_runs():
    again = Again(info(0.7), info(0.75), info(0.65))
    judged = judge(BASELINE, results(info(1.2), info(0.6), info(0.8), info(2.0)), again, 3)
    assert [finding.text for finding in judged.failing] == ["1.00x is 0.68x now: 32% less, tolerance 13%"]
    assert judged.repeats == 3


def test_runs_are_pooled_case_by_case():
    wrong = {"other": "E  off"}
    both = pooled([results(info(1.0), info(2.0)), results(info(1.2)), results(info(0.7), failures=wrong)])
    assert (both.infos[QKV]["ratio"], both.infos[QKV]["ratio_of_runs"]) == (1.0, [1.0, 1.2, 0.7])
    assert (both.infos[PROJ]["ratio"], both.infos[PROJ]["ratio_of_runs"]) == (2.0, [2.0])
    assert both.failures == wrong


# The command.


def file_of(path: Path, now: Results) -> str:
    benchmarks = [{"fullname": name, "extra_info": info} for name, info in now.infos.items()]
    report = {"benchmarks": benchmarks, "outcomes": {"failures": now.failures}, "command": now.command}
    path.write_text(json.dumps(report))
    return str(path)


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = bench(["gate", *arguments, "--skip", "kernels"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_update_then_compare(tmp_path, capsys):
    file, path = file_of(tmp_path / "now.json", BEFORE), tmp_path / "cpu.json"
    code, said = main(capsys, file, file, "--update", "--baseline", str(path), "--note", "busy")
    assert (code, "commit it" in said) == (0, True)
    made = read_baseline(path, "cpu").made
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert (made["revision"], made["versions"]["torch"], made["note"]) == ("abc", "2.13.0", "busy")
    assert made["command"] == "a command, 2 times"
    assert main(capsys, file, "--baseline", str(path))[0] == 0
    slower = results(info(1.2), info(0.8), info(0.8), info(2.0, versions={"torch": "2.14.0"}))
    file = file_of(tmp_path / "slower.json", slower)
    report = tmp_path / "findings.json"
    code, said = main(capsys, file, "--baseline", str(path), "--repeat", "0", "--json", str(report))
    assert code == 1
    assert re.search(rf"^fell +{re.escape(PROJ)}  1.00x is 0.80x now", said, re.MULTILINE)
    assert "3 of 4 cases hold" in said
    (finding,) = json.loads(report.read_text())["findings"]
    assert Finding(**finding).case == PROJ


def test_results_of_another_device_are_refused(tmp_path, capsys):
    write_baseline(BASELINE, tmp_path / "cpu.json")
    now = results(info(1.0, device="NVIDIA A100-SXM4-80GB"), info(1.0))
    code, said = main(capsys, file_of(tmp_path / "now.json", now), "--baseline", str(tmp_path / "cpu.json"))
    assert code == 2
    assert "is of 'cpu', these results are of 'NVIDIA A100-SXM4-80GB'" in said


@pytest.mark.sweep
def test_a_small_selection_is_run_compared_and_shown(tmp_path, capsys):
    """The real commands, of one case."""
    file, path = tmp_path / "sub" / "now.json", tmp_path / "cpu.json"
    run = ran("-m", "bench", "run", "--smoke", "-k", "smoke-tp1-64-proj-wgrad_add", "-o", file, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "wgrad_add" in run.stdout
    (said,) = read(file).infos.values()
    assert set(said) - {key for key in said if key.startswith("ratio_to_")} == set(TAKEN)
    assert (said["op"], said["pass"], said["roofline"], said["ratio_to_addmm"] > 0) == (
        "linear",
        "wgrad_add",
        None,
        True,
    )
    page = tmp_path / "report.html"
    assert bench(["report", str(file), "-o", str(page)]) == 0
    assert re.match(r"1 case: ", capsys.readouterr().out)
    assert f": {said['ratio']:.4g}, spread" in page.read_text() or not can_draw()
    now = read(file)
    faster = {name: info | {"ratio": 30 * info["ratio"]} for name, info in now.infos.items()}
    write_baseline(baseline(replace(now, infos=faster)), path)
    options = ("--skip", "kernels", "--repeat", "1", "--baseline", path, file)
    gated = ran("-m", "bench", "gate", *options, cwd=ROOT)
    assert gated.returncode == 1, gated.stdout + gated.stderr
    assert "fell " in gated.stdout
    assert "1 more times" in gated.stdout
