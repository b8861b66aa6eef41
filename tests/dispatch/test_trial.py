"""A trial in a child process: what its parent makes of one that passes, lies, crashes, or never ends."""

import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch

from tpkernels.dispatch import trial as module
from tpkernels.dispatch.trial import Limits, trial
from tpkernels.dispatch.variant import Variant
from tpkernels.gate import child

CPU = torch.device("cpu")
LIMITS = Limits(compiling=15, running=12, all=10**9, poll=0.005)

# Does with each variant what its tile is called. Time is what it spends: a byte of a file is a second.
CHILD = r"""
import json, os, signal, sys, time
clock = open(sys.argv[1], "a", buffering=1)
def spend(seconds):
    clock.write("\n" * seconds)
def wait_for_ever():
    while True: spend(1); time.sleep(0.002)
asked = json.load(sys.stdin)
def tell(**fields):
    print(json.dumps(fields), flush=True)
for number, variant in enumerate(asked["variants"]):
    does = variant["tile"]
    if does == "cannot": tell(cannot="all devices are busy")
    if does == "quit at once": sys.exit(0)
    if does == "die at once": sys.exit("ModuleNotFoundError: No module named 'torch'")
    if does == "sleep at once": wait_for_ever()
    tell(number=number, stage="compiling")
    if does == "compile for ever": wait_for_ever()
    if does == "compile often":
        for _ in range(3): spend(6); tell(number=number, stage="compiling"); time.sleep(0.1)
    if does == "raise": raise ValueError("ours")
    if does == "be killed": os.kill(os.getpid(), signal.SIGKILL)
    tell(number=number, stage="running")
    if does == "rubbish":
        print("not JSON\n[]\n7\nnull\n{}\n" + "[" * 99999)
        tell(number=99, stage="running"); tell(number=-1, stage="running"); tell(number=True, stage="running")
        tell(number="0", stage="running"); tell(number=number, stage="flying"); tell(cannot=7)
        tell(number=99, outcome="wrong", said=""); tell(number=number, outcome="great", said="")
        os.write(1, b"\xff\xfe\n")
    if does == "real time": os.kill(os.getpid(), 40)
    if does == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if does == "leave": os._exit(0)
    if does == "hang": wait_for_ever()
    if does == "hang deaf":
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(name, signal.SIG_IGN)
        while True: spend(1)
    if does == "print for ever":
        while True: print("x" * 10000); spend(1)
    if does == "lie":
        tell(number=1, outcome="passed", said=""); os._exit(0)
    if does == "lose its context":
        tell(number=number, outcome="crashed", said="CUDA error"); sys.exit(0)
    if does == "find no memory":
        tell(number=number, outcome="untried", said="out of memory"); continue
    if does == "wrong":
        tell(number=number, outcome="wrong", said="by 3"); continue
    tell(number=number, outcome="passed", said="")
"""


@pytest.fixture
def outcome(tmp_path):
    """Tries variants of these names by the stand-in: verdicts by name, and what ended it."""
    program, spent = tmp_path / "child.py", tmp_path / "spent"
    program.write_text(CHILD)
    spent.write_text("")

    def outcome(*names, limits=LIMITS, clock=lambda: spent.stat().st_size):
        variants = [Variant("linear", "bfloat16", (), "descriptor", name) for name in names]
        report = trial(variants, CPU, limits, (sys.executable, "-S", str(program), str(spent)), clock)
        return {variant.tile: str(verdict) for variant, verdict in report.verdicts.items()}, report.obstacle

    return outcome


def test_each_variant_gets_its_verdict_from_one_child(outcome, monkeypatch):
    started = []
    real = module.started
    monkeypatch.setattr(module, "started", lambda *given: started.append(given) or real(*given))
    verdicts = dict.fromkeys(["pass", "rubbish", "compile often"], "passed") | {"wrong": "wrong: by 3"}
    assert outcome("pass", "wrong", "rubbish", "compile often") == (verdicts, "")
    assert len(started) == 1


HANGS = {
    "hang": "hung: no result after its launch within 12 seconds",
    "hang deaf": "hung: no result after its launch within 12 seconds",
    "print for ever": "hung: no result after its launch within 12 seconds",
    "compile for ever": "hung: not compiled within 15 seconds",
}
CRASHES = {
    "segfault": "crashed: SIGSEGV",
    "real time": "crashed: signal 40",
    "raise": "crashed: exit code 1: ValueError: ours",
    "leave": "crashed: exit code 0",
    "lose its context": "crashed: CUDA error",
}


def test_who_hangs_or_crashes_is_known_and_the_rest_is_tried(outcome):
    expected = {"pass": "passed", **HANGS, "wrong": "wrong: by 3", **CRASHES, "other": "passed"}
    assert outcome(*expected) == (expected, "")


def test_a_verdict_on_what_was_never_begun_counts_for_nothing(outcome):
    """Nor does the one who wrote it get away."""
    assert outcome("lie", "wrong") == ({"lie": "crashed: exit code 0", "wrong": "wrong: by 3"}, "")


OBSTACLES = {
    "cannot": "all devices are busy",
    "quit at once": "the child process ended: exit code 0",
    "die at once": "the child process ended: exit code 1: ModuleNotFoundError: No module named 'torch'",
    "be killed": "the child process was ended: SIGKILL",
    "find no memory": "out of memory",
    "sleep at once": "5 seconds are over",
}


@pytest.mark.parametrize(("name", "why"), OBSTACLES.items(), ids=str)
def test_what_cannot_be_tried_has_no_verdict_and_what_passed_before_has_its_own(outcome, name, why):
    limits = replace(LIMITS, all=5)
    assert outcome(name, "pass", limits=limits) == ({}, why)
    verdicts, obstacle = outcome("pass", name, "wrong", limits=limits)
    assert (verdicts["pass"], obstacle) == ("passed", why)
    assert name not in verdicts


def test_all_of_it_ends_in_time_whatever_hangs(outcome):
    verdicts, obstacle = outcome(*HANGS, limits=replace(LIMITS, all=14))
    assert len(verdicts) < len(HANGS)
    assert obstacle == "14 seconds are over"


def test_no_process_and_no_file_is_an_obstacle(monkeypatch):
    variants = [Variant("linear", "bfloat16", (), "descriptor", "pass")]
    report = trial(variants, CPU, LIMITS, ("/nowhere/python",))
    assert report.verdicts == {}
    assert "/nowhere/python" in report.obstacle

    def full():
        raise OSError("no space left on device")

    monkeypatch.setattr(child, "TemporaryFile", full)
    assert trial(variants, CPU, LIMITS, ("true",)).obstacle == "no space left on device"


def test_an_interrupted_parent_takes_its_child_along(monkeypatch):
    children, sleep = [], time.sleep

    def interrupted(seconds):
        monkeypatch.setattr(module.time, "sleep", sleep)
        raise KeyboardInterrupt

    real = child.subprocess.Popen
    monkeypatch.setattr(
        child.subprocess, "Popen", lambda *a, **k: children.append(real(*a, **k)) or children[-1]
    )
    monkeypatch.setattr(module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial([Variant("linear", "bfloat16", (), "descriptor", "x")], CPU, LIMITS, ("sleep", "60"))
    assert children[0].returncode == -signal.SIGKILL


def test_a_child_that_cannot_be_killed_is_left_and_none_follows(monkeypatch):
    """As where the driver does not let go of it."""
    monkeypatch.setattr(child, "GONE_SECONDS", 0.05)
    spared, kill = [], os.killpg
    monkeypatch.setattr(child.os, "killpg", lambda group, signal: spared.append(group))
    program = 'import time; print(\'{"number": 0, "stage": "running"}\', flush=True); time.sleep(600)'
    variants = [Variant("linear", "bfloat16", (), "descriptor", tile) for tile in ("a", "b")]
    try:
        report = trial(variants, CPU, replace(LIMITS, running=0), (sys.executable, "-S", "-c", program))
    finally:
        kill(spared[0], signal.SIGKILL)
    assert report.verdicts[variants[0]].outcome == "hung"
    assert report.obstacle == "a child process that was killed does not end"


def test_a_child_has_the_parents_world_but_for_what_would_hide_a_hang(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    environment = module._environment()
    assert "CUDA_LAUNCH_BLOCKING" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == os.devnull
