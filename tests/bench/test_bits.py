"""`python -m bench bits`: one hash whatever the timing, and faults that it must see."""

import json
import re

import pytest

from bench import bits
from bench.__main__ import main
from bench.bits.programs import OF_TRANSPORTS, PROGRAMS
from bench.bits.schedule import ORDERS, drawn
from tests.patience import patient
from tests.programs import ran

MUTANT_SCHEDULES = 20  # within which it must show


def certified(names, schedules, planted="", ranks=3, patience=60.0):
    """What came of each name such as shared/3/row, each under so many schedules."""
    plan = [chosen for name in names for chosen in bits.planned(schedules, (ranks,), name)]
    fault = f"tests.bench.planted_bits:{planted}" if planted else ""
    return bits.certify(plan, 1, lambda what: None, fault, patient(patience))


def failures(certificates):
    return [failure for certificate in certificates for failure in certificate.failures]


@pytest.mark.parametrize("schedules", [1, pytest.param(4, marks=pytest.mark.sweep)])
def test_each_program_has_one_hash_under_all_schedules(schedules):
    names = [f"c10d/3/{name}" for name in PROGRAMS] + [f"shared/3/{name}" for name in OF_TRANSPORTS]
    found = certified(names, schedules) + certified(["kernels/2/column", "kernels/2/row"], 1, ranks=2)
    assert failures(found) == []
    assert [certificate.schedules for certificate in found] == [*[schedules] * len(names), 1, 1]
    for certificate in found:
        hashes = {name: len(hashes) for name, hashes in certificate.hashes.items()}
        assert hashes == dict.fromkeys(certificate.programs, 1)


@pytest.mark.sweep
def test_a_sum_in_the_order_of_arrival_is_caught():
    names = ["c10d/3/row", "shared/3/mlp"]
    for name, found in zip(names, certified(names, MUTANT_SCHEDULES, "order_of_arrival"), strict=True):
        transport, _, program = name.split("/")
        assert found.schedules == MUTANT_SCHEDULES
        (failure,) = found.failures
        assert re.fullmatch(
            rf"{program} over {transport} on 3 ranks, under the schedule of seed (\d+): \w+, fp32[\w -]*: "
            r"\w+ of rank \d and \d+ other tensors differ from the undisturbed run; "
            rf"again: python -m bench bits --seed \1 --schedules 1 --world-size 3 --only {name}",
            failure,
        )


def test_a_flag_that_comes_before_its_rows_is_caught():
    (found,) = certified(["shared/2/row"], MUTANT_SCHEDULES, "flags_come_before_their_rows", ranks=2)
    assert len(found.failures) == 1
    assert len(found.hashes["row"]) > 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "a_rank_hangs",
            r"(?s).*rank 1: no answer in time.*",
            marks=pytest.mark.sweep,
        ),
        ("a_rank_dies", r"(?s).*rank 1: exited with code 7.*"),
    ],
)
def test_a_rank_that_does_not_answer_is_told_with_the_schedule(fault, said):
    # after a minute, on any machine, a lone transfer is an error itself
    patience = min(5.0, 20.0 / patient(1.0)) if fault == "a_rank_hangs" else 60.0
    found = certified(["c10d/2/row", "c10d/2/column"], 1, fault, ranks=2, patience=patience)
    (failure,) = failures(found)
    what, again = failure.split("; again: ")
    place = "row over c10d on 2 ranks, under the schedule of seed 1: "
    assert what.startswith(place)
    assert re.fullmatch(said, what)
    assert again == "python -m bench bits --seed 1 --schedules 1 --world-size 2 --only c10d/2/row"
    assert [certificate.schedules for certificate in found] == [0, 1]  # the others go on with new ranks


def test_the_command_prints_a_table_and_keeps_a_report(tmp_path, capsys):
    report = tmp_path / "bits.json"
    arguments = ["--schedules", "3", "--seed", "7", "--world-size", "2", "--only", "embedding"]
    assert main(["bits", *arguments, "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:5] for line in out.splitlines()[:-1]] == [
        ["transport", "ranks", "programs", "schedules", "hashes"],
        ["c10d", "2", "1", "1", "1"],
        ["shared", "2", "1", "1", "1"],
        ["kernels", "2", "1", "1", "1"],
    ]
    assert re.fullmatch(r"the same bits under 3 schedules in \d+ s, from seed 7 on", out.splitlines()[-1])
    told = json.loads(report.read_text())
    assert (told["seed"], told["failures"]) == (7, [])
    by_transport = {each["transport"]: each["hashes"]["embedding"] for each in told["certificates"]}
    assert by_transport["c10d"] == by_transport["shared"]  # which torch computes


def test_a_difference_is_exit_code_1(monkeypatch, capsys):
    def differs(plan, *_):
        plan[0][0].failures.append("row over c10d differs")
        return [certificate for certificate, _ in plan]

    monkeypatch.setattr(bits, "certify", differs)
    assert main(["bits", "--world-size", "2"]) == 1
    assert capsys.readouterr().out.endswith("row over c10d differs\n")


def test_kernels_are_left_out_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(bits, "find_spec", lambda name: None)
    monkeypatch.setattr(bits, "certify", lambda plan, *_: [certificate for certificate, _ in plan])
    assert main(["bits", "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("waiting kernels are left out: triton is not installed\n")
    assert [line.split()[0] for line in out.splitlines()[2:-1]] == ["c10d", "shared"]


STOPPED = """
import time
from bench.bits.schedule import Stop, _stopped
gaps, last, end = [0.0], time.monotonic(), time.monotonic() + 30
with _stopped(Stop(0.1, 0, 0.5)):
    while max(gaps) < 0.4 and last < end:
        time.sleep(0.01)
        gaps.append(time.monotonic() - last)
        last += gaps[-1]
print(max(gaps))
"""


def test_a_rank_that_is_stopped_goes_on():
    assert float(ran("-c", STOPPED).stdout) >= 0.4


@pytest.mark.parametrize(("schedules", "ranks"), [(1000, (2, 4)), (1000, (2, 3, 4)), (1, (2,)), (37, (5,))])
def test_at_least_so_many_schedules_are_planned(schedules, ranks):
    plan = bits.planned(schedules, ranks, "")
    assert len(plan) == 3 * len(ranks)
    assert schedules <= sum(count for _, count in plan) <= schedules + 3 * len(ranks)
    assert {count > 0 for _, count in plan} == {True}


def test_ranks_draw_one_schedule_and_seeds_differ():
    assert drawn(5, "row", 4) == drawn(5, "row", 4)
    schedules = [drawn(seed, "row", 4) for seed in range(60)]
    assert len({schedule.name for schedule in schedules}) == 60
    for orders in ({s.sends for s in schedules}, {s.waits for s in schedules}):
        assert orders == set(ORDERS)
    assert {kind for s in schedules for kind in s.busy} == {"", "lock", "product"}
    assert {stop.rank for s in schedules for stop in s.stops} == set(range(4))
    assert any(s.late[3] < s.late[0] for s in schedules)
