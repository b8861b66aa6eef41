"""Kernels with consumers are candidates only where a trial said so: what is tried, remembered and told."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from tests.dispatch.conftest import CPU, VERSIONS, FakeTimer
from tpkernels.dispatch import candidates as candidates_module
from tpkernels.dispatch import products
from tpkernels.dispatch import trial as trial_module
from tpkernels.dispatch import verdicts as module
from tpkernels.dispatch.cache import Cache, Choice, Published
from tpkernels.dispatch.candidates import Candidate
from tpkernels.dispatch.chooser import Chooser
from tpkernels.dispatch.trial import TrialReport, Verdict
from tpkernels.dispatch.verdicts import lack, recorded
from tpkernels.kernels import matmul_tile
from tpkernels.kernels.tiles import MatmulTile

PLAIN = MatmulTile(32, 32, 32, num_warps=4, num_stages=1)
FIRST, SECOND = replace(PLAIN, consumers=1), replace(PLAIN, consumers=2)
NAMES = {tile.consumers: f"triton/pointer/{tile.name}" for tile in (PLAIN, FIRST, SECOND)}
TIMES = {NAMES[2]: 1.0, NAMES[1]: 2.0, NAMES[0]: 3.0, "torch": 4.0}
X, W = torch.randn(16, 32), torch.randn(48, 32)
ARGUMENTS = (X, W, None, "none", False)
KEY = "linear float32 16x48x32 none rows,rows,rows"
VARIANT = "linear float32 none triton/pointer/32x32x32-w4-s1-p1"

PASSED, WRONG, HUNG = Verdict("passed"), Verdict("wrong", "by 3"), Verdict("hung", "for long")


class FakeTrial:
    """Says what it is told to of each number of consumers, and remembers what it was asked to try."""

    def __init__(self, verdicts, obstacle=""):
        self.verdicts, self.obstacle, self.asked = verdicts, obstacle, []

    def __call__(self, variants):
        self.asked.append([variant.candidate.tile.consumers for variant in variants])
        told = {variant: self.verdicts.get(variant.candidate.tile.consumers) for variant in variants}
        return TrialReport({variant: verdict for variant, verdict in told.items() if verdict}, self.obstacle)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Two tiles with consumers are shipped; all that computes in this process is listed."""
    monkeypatch.setattr(matmul_tile, "triton_version", lambda: (3, 7))
    monkeypatch.setattr(candidates_module, "shipped_tiles", lambda *case: (PLAIN, FIRST, SECOND))
    return []


@pytest.fixture
def record(ran):
    def kernel(*args, tile, form):
        ran.append(tile.consumers)
        return products.linear.by_torch(*args)

    return replace(products.linear, by_kernel=kernel)


def test_only_what_passed_runs_here(record, ran, make_chooser, caplog):
    timer, trial = FakeTimer(TIMES), FakeTrial({1: PASSED, 2: WRONG})
    decision = make_chooser(timer, trial=trial).timed(record, ARGUMENTS)
    assert decision.candidate.name == NAMES[1]
    assert timer.asked == [["torch", NAMES[1], NAMES[0]]]
    assert trial.asked == [[1, 2]]
    assert ran == [1, 0]
    said = f"{VARIANT}-c2 is left out on Test GPU 1, tried in a child process: wrong: by 3"
    assert [(told.levelno, told.getMessage()) for told in caplog.records] == [(logging.WARNING, said)]


def test_a_passed_trial_does_not_spare_the_comparison_with_torch(record, ran, make_chooser, caplog):
    def wrong(*args, tile, form):
        y, z = products.linear.by_torch(*args)
        return y * (1 + 0.1 * tile.consumers), z

    timer = FakeTimer(TIMES)
    make_chooser(timer, trial=FakeTrial({1: PASSED, 2: PASSED})).timed(
        replace(record, by_kernel=wrong), ARGUMENTS
    )
    assert timer.asked == [["torch", NAMES[0]]]
    assert caplog.text.count("dropped for") == 2


def test_verdicts_last(record, ran, make_chooser):
    """No variant is tried again for another shape, nor by the next process; other epilogues are."""
    trial = FakeTrial({1: HUNG, 2: PASSED})
    chooser = make_chooser(FakeTimer(TIMES), trial=trial)
    chooser.timed(record, ARGUMENTS)
    chooser.timed(record, (torch.randn(64, 32), *ARGUMENTS[1:]))
    make_chooser(FakeTimer(TIMES), trial=trial).timed(record, ARGUMENTS)
    assert trial.asked == [[1, 2]]
    assert 1 not in ran
    make_chooser(FakeTimer(TIMES), trial=trial).timed(record, (X, W, None, "gelu", False))
    assert trial.asked == [[1, 2], [1, 2]]
    other = replace(VERSIONS, kernels="edited")
    cache = Cache(chooser.cache.path.parent, other)
    assert list(recorded(cache)) == []
    assert list(recorded(Cache(chooser.cache.path.parent, VERSIONS))) == [
        (f"linear float32 gelu {NAMES[1]}", "hung: for long"),
        (f"{VARIANT}-c1", "hung: for long"),
        (f"linear float32 gelu {NAMES[2]}", "passed"),
        (f"{VARIANT}-c2", "passed"),
    ]


def test_of_two_ranks_a_failure_counts_whoever_writes_last(record, make_chooser):
    passing = FakeTrial({1: PASSED, 2: PASSED})
    trials, problem = (passing, FakeTrial({1: PASSED, 2: HUNG}), passing), record.problem(*ARGUMENTS)
    for chooser in [make_chooser(FakeTimer(TIMES), trial=trial) for trial in trials]:
        chooser._verdicts.admitted(problem, chooser.candidates(record, problem))
    later = make_chooser(FakeTimer(TIMES), trial=FakeTrial({}))
    assert later.timed(record, ARGUMENTS).candidate.name == NAMES[1]


@pytest.mark.parametrize("obstacle", [None, "a CUDA graph is being captured"])
def test_what_other_ranks_do_is_no_verdict(record, ran, obstacle, make_chooser, caplog):
    """Nor is a choice in the cache, which may be of a rank that found otherwise."""
    chooser = make_chooser(FakeTimer(TIMES), trial=FakeTrial({1: PASSED, 2: HUNG}), obstacle=obstacle)
    chooser.cache.put(KEY, Choice(NAMES[2], TIMES))
    chooser.agree_through(HashStore())
    assert chooser._published is not None
    for moment in ("", " now"):
        chooser._published.put(KEY + moment, Choice(NAMES[2], TIMES))
    chooser.call(record, *ARGUMENTS)
    assert 2 not in ran
    assert "which is no candidate here" in caplog.text


@pytest.mark.parametrize(
    ("error", "obstacle", "taken"),
    [(0.0, None, True), (0.1, None, False), (0.0, "a CUDA graph is being captured", False)],
    ids=["right", "wrong", "capturing"],
)
def test_what_other_ranks_chose_and_passed_is_compared_with_torch_here(
    error, obstacle, taken, record, make_chooser, caplog
):
    def kernel(*args, tile, form):
        y, z = products.linear.by_torch(*args)
        return y * (1 + error * tile.consumers), z

    store, first = HashStore(), make_chooser(FakeTimer(TIMES))
    first.agree_through(store)
    first.call(record, *ARGUMENTS)
    first.cache.path.unlink()  # as on another machine
    chooser = make_chooser(FakeTimer(TIMES), obstacle=obstacle)
    published = Published(store, chooser.cache.versions.slug)
    decision = chooser._agreed(replace(record, by_kernel=kernel), ARGUMENTS, (), published, "")
    assert (decision.source == "agreed", decision.candidate.name == NAMES[2]) == (taken, taken)
    assert ("no candidate here" in caplog.text) != taken


def test_a_rank_that_cannot_compare_takes_torch_and_goes_on(make_chooser, monkeypatch, caplog):
    def no_memory(*given):
        raise torch.OutOfMemoryError("no memory")

    chooser, made_up = make_chooser(), Candidate("made up", FIRST, "descriptor")
    monkeypatch.setattr(chooser, "_sound_runs", no_memory)
    problem = products.linear.problem(*ARGUMENTS)
    assert not chooser._is_trusted(made_up, products.linear, problem, ARGUMENTS)
    assert "cannot compare made up for linear" in caplog.text


def test_a_choice_on_disk_is_honoured_only_with_its_verdict(record, ran, make_chooser):
    writer = make_chooser()
    writer.cache.put(KEY, Choice(NAMES[2], TIMES))
    trial = FakeTrial({1: PASSED, 2: HUNG})
    chooser = make_chooser(FakeTimer(TIMES), shipped={KEY: Choice(NAMES[2], TIMES)}, trial=trial)
    assert chooser.known(record, ARGUMENTS) is None
    chooser.call(record, *ARGUMENTS)
    assert 2 not in ran
    assert chooser.known(record, ARGUMENTS).candidate.name == NAMES[1]
    assert trial.asked == [[1, 2]]


def test_a_child_that_can_try_nothing_is_told_of_once_and_none_follows(record, ran, make_chooser, caplog):
    trial = FakeTrial({1: PASSED}, obstacle="all devices are busy")
    timer = FakeTimer(TIMES)
    chooser = make_chooser(timer, trial=trial)
    assert chooser.timed(record, ARGUMENTS).candidate.name == NAMES[1]
    chooser.timed(record, (X, W, None, "gelu", False))
    assert timer.asked[1] == ["torch", NAMES[0]]
    assert trial.asked == [[1, 2]]
    said = "no child process can try kernels on Test GPU 1, so they are left out: all devices are busy"
    assert caplog.messages == [said]
    make_chooser(FakeTimer(TIMES), trial=trial).timed(record, ARGUMENTS)
    assert trial.asked == [[1, 2], [2]], "the next process may be luckier, and knows what passed"


@pytest.mark.parametrize("obstacle", ["a CUDA graph is being captured", "torch.compile is tracing"])
def test_nothing_is_tried_where_nothing_can_be_timed(record, ran, obstacle, make_chooser, caplog):
    caplog.set_level(logging.INFO, "tpkernels.choices")
    trial = FakeTrial({1: PASSED, 2: PASSED})
    chooser = make_chooser(FakeTimer(TIMES), obstacle=obstacle, trial=trial)
    chooser.call(record, *ARGUMENTS)
    assert (trial.asked, ran) == ([], [])
    chooser.timed(record, ARGUMENTS)
    assert (trial.asked, ran) == ([], [0])
    assert caplog.messages[-1] == (
        f"no candidate for {KEY}, as it cannot be tried now ({obstacle}): {FIRST.name}, {SECOND.name}"
    )


def test_switched_off_the_family_is_neither_tried_nor_taken(record, ran, make_chooser, monkeypatch):
    make_chooser(FakeTimer(TIMES), trial=FakeTrial({1: PASSED, 2: PASSED})).timed(record, ARGUMENTS)
    untried = FakeTrial({})
    decision = make_chooser(trial=untried).known(record, ARGUMENTS)  # from disk, as the verdict is
    assert (decision.source, decision.candidate.name, untried.asked) == ("cached", NAMES[2], [])
    ran.clear()
    monkeypatch.setenv("TPKERNELS_GLUON", "0")
    trial = FakeTrial({1: PASSED, 2: PASSED})
    chooser = make_chooser(FakeTimer(TIMES), trial=trial)
    chooser.call(record, *ARGUMENTS)
    chooser.call(record, X, W, None, "gelu", False)
    assert trial.asked == []
    assert set(ran) == {0}


def test_what_keeps_a_child_from_trying(monkeypatch):
    cuda = torch.device("cuda", 0)
    free = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 80 * 2**30))
    free.append(module.FREE_BYTES)
    assert lack(cuda) is None
    free.append(module.FREE_BYTES - 1)
    assert lack(cuda) == "less than 2 GiB of GPU memory are free"
    monkeypatch.setenv("TPKERNELS_TUNE", "0")
    assert lack(cuda) == "TPKERNELS_TUNE=0"
    assert lack(CPU) == "cpu is no GPU"


def test_a_chooser_tries_by_real_children_unless_told_otherwise(
    record, ran, make_chooser, tmp_path, monkeypatch
):
    """On its own device, and never on what is no GPU."""
    asked = []

    def trial(variants, device):
        asked.append((variants, device))
        return TrialReport(dict.fromkeys(variants, PASSED))

    assert module.trial is trial_module.trial
    monkeypatch.setattr(module, "trial", trial)
    chooser = Chooser(CPU, make_chooser().gpu, FakeTimer(TIMES), Cache(tmp_path, VERSIONS), {})
    chooser.timed(record, ARGUMENTS)
    assert (asked, ran) == ([], [0])
    monkeypatch.setattr(module, "lack", lambda device: None)
    chooser.timed(record, ARGUMENTS)
    ((variants, device),) = asked
    assert ([str(variant) for variant in variants], device) == ([f"{VARIANT}-c1", f"{VARIANT}-c2"], CPU)
    written = json.loads(chooser.cache.path.read_text())["choices"]
    assert written[f"passed: {VARIANT}-c1"] == {"name": "passed", "milliseconds": {}}


def test_roles_of_triton_are_tried_as_those_of_gluon_are(record, ran, monkeypatch, make_chooser):
    """A wait that never ends would hang this process in either."""
    specialized = replace(PLAIN, specialize=True)
    monkeypatch.setattr(candidates_module, "shipped_tiles", lambda *case: (PLAIN, specialized))
    monkeypatch.setattr(candidates_module, "specializes", lambda *case: True)
    for activation, told, timed in (
        ("none", HUNG, ["torch", NAMES[0]]),
        ("gelu", PASSED, ["torch", f"{NAMES[0]}-ws", NAMES[0]]),
    ):
        timer, trial = FakeTimer(TIMES | {f"{NAMES[0]}-ws": 1.0}), FakeTrial({0: told})
        make_chooser(timer, trial=trial).timed(record, (X, W, None, activation, False))
        assert timer.asked == [timed]
        assert trial.asked == [[0]]
