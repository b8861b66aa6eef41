"""What fell is timed beside the baseline's code: red where the code is slower, green where the machine is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import former, gate
from bench.baseline import made_of
from bench.former import MOST_PAIRS, Change, changes
from bench.gate import Judged, beside_former, judge
from bench.results import Results, pooled
from tests.bench.test_gate import info

FLOOR = 0.1
CASE, OTHER = "bench/test_linear.py::test_linear[one]", "bench/test_linear.py::test_linear[other]"


def measure(ratio: Callable[[], float]) -> former.Measure:
    def measured(names: Sequence[str]) -> Results:
        return Results({name: info(ratio()) for name in names}, {}, "")

    return measured


def change(now: Callable[[], float], then: Callable[[], float]) -> Change:
    return changes([CASE], measure(now), measure(then), FLOOR, lambda what: None)[CASE]


class Machine:
    """Ratios of two codes under a load that drifts: runs near each other in time see the same."""

    def __init__(self, seed: int, *, noise: float, slower: float = 1.0) -> None:
        self.draw, self.noise, self.slower = random.Random(seed), noise, slower
        self.load, self.runs = 1.0, 0

    def ratio(self, code: float) -> float:
        self.runs += 1
        self.load = 0.8 * self.load + 0.2 * self.draw.uniform(0.6, 1.0)
        return code * self.load * self.draw.gauss(1, self.noise)

    def verdict(self) -> str:
        return change(lambda: self.ratio(self.slower), lambda: self.ratio(1.0)).verdict(FLOOR)


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.08])
def test_the_same_code_holds_under_any_load_and_a_fall_of_a_fifth_does_not(noise):
    """Of 200 machines; a fall in the middle between floor and fifth would be told apart by its median."""
    same = [Machine(seed, noise=noise).verdict() for seed in range(200)]
    slower = [Machine(seed, noise=noise, slower=0.75).verdict() for seed in range(200)]
    assert same.count("holds") >= 198
    assert slower.count("fell") >= 196


def test_what_is_still_open_after_all_pairs_is_told_by_the_median():
    pairs = [0.5, 1.5, 0.5, 1.5, 0.5, 1.5, 0.86]
    assert Change([*pairs, 0.87]).verdict(FLOOR) == "fell"
    assert Change([*pairs, 1.2]).verdict(FLOOR) == "holds"
    assert Change(pairs).verdict(FLOOR) == "open"


def test_codes_take_turns_in_being_first_and_told_cases_are_left_out():
    asked: list[tuple[str, list[str]]] = []
    apart = iter([1.0, 0.7, 1.2] * MOST_PAIRS)

    def run(code: str) -> former.Measure:
        def measured(names: Sequence[str]) -> Results:
            asked.append((code, list(names)))
            ratios = {CASE: 1.0, OTHER: next(apart) if code == "now" else 1.0}
            return Results({name: info(ratios[name]) for name in names}, {}, "")

        return measured

    found = changes([CASE, OTHER], run("now"), run("then"), FLOOR, lambda what: None)
    assert [code for code, _ in asked[:4]] == ["now", "then", "then", "now"]
    assert [len(names) for _, names in asked] == [2] * 6 + [1] * (2 * MOST_PAIRS - 6)
    assert [len(found[name].pairs) for name in (CASE, OTHER)] == [3, MOST_PAIRS]


# Within the gate.

WAS = Results({CASE: info(1.0), OTHER: info(1.0)}, {}, "a command")
BASELINE = made_of(pooled([WAS]), floor=FLOOR, note="")


def judged(monkeypatch: pytest.MonkeyPatch, *, now: float, then: float) -> Judged:
    """One case came out at 0.7 of the baseline; `now` and `then` is what codes reach in turns."""

    @contextmanager
    def checkout(revision: str | None):
        assert revision == "abc"
        yield Path("/former")

    def again(names: Sequence[str], root: Path) -> Results:
        assert root == Path("/former")
        return measure(lambda: then)(names)

    monkeypatch.setattr(gate, "_again", again)
    fallen = judge(BASELINE, Results({CASE: info(0.7), OTHER: info(1.0)}, {}, ""), measure(lambda: 0.7), 1)
    assert [one.kind for one in fallen.findings] == ["fell"]
    return beside_former(fallen, BASELINE, measure(lambda: now), checkout)


def test_slower_code_is_red_and_a_slower_machine_is_told(monkeypatch, tmp_path):
    red = judged(monkeypatch, now=0.7, then=0.99)
    assert [(one.kind, one.case, one.fails) for one in red.findings] == [("fell", CASE, True)]
    assert "ours is 0.71 (0.71 to 0.71) of it in 3 pairs of runs" in red.findings[0].text
    green = judged(monkeypatch, now=0.7, then=0.7)
    assert [(one.kind, one.case, one.fails) for one in green.findings] == [("moved", CASE, False)]
    lines = "\n".join(green.lines(BASELINE, tmp_path / "cpu.json"))
    assert "2 of 2 cases hold" in lines
    assert "moved: the baseline's own code falls as far here" in lines
    assert "regressions" not in lines


def test_without_the_baselines_code_a_fall_stays_one_and_the_reason_is_told(tmp_path):
    fallen = judge(BASELINE, Results({CASE: info(0.7), OTHER: info(1.0)}, {}, ""), measure(lambda: 0.7), 0)
    still = beside_former(fallen, BASELINE)
    assert still.failing == fallen.failing
    lines = "\n".join(still.lines(BASELINE, tmp_path / "cpu.json"))
    assert "what fell was not timed beside the baseline's code: " in lines
    assert "no commit holds (revision abc)" in lines
