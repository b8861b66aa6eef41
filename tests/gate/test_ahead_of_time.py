"""What the compiler tells of sound kernels, and that each planted fault breaks a rule."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from tests.gate.samples import entry_of
from tpkernels.gate import ahead_of_time
from tpkernels.gate.ahead_of_time import (
    ARCHITECTURES,
    CompileJob,
    Entry,
    Facts,
    compile_all,
    compile_key,
    facts_of,
    facts_or_error,
)
from tpkernels.gate.causes import changes
from tpkernels.gate.occupancy import SHARED_LIMIT
from tpkernels.gate.rules import violations
from tpkernels.kernels.tiles import KERNELS
from tpkernels.registered.entries import entry_specs

LINEAR = entry_of("linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z")
POINTER = entry_of("linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z")
WAITING = entry_of("linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z+wait")
SCATTER_LINEAR = entry_of("scatter_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/two+depth_first")
ELEMENTWISE = entry_of("glu_grad/pointer/bf16/32x128/swiglu")


FP8_TILE = "128x128x128-w8-s4-p2-flat"


def largest(stem: str) -> Entry:
    return next(spec.entry() for name, spec in entry_specs().items() if name.startswith(f"{stem}/bf16"))


SOUND = {
    **{f"{kernel}_descriptor": (largest(f"{kernel}/descriptor"), "sm_90") for kernel in KERNELS},
    "waiting_descriptor": (WAITING, "sm_90"),
    "scatter_linear_descriptor": (SCATTER_LINEAR, "sm_90"),
    **{f"{kernel}_pointer": (largest(f"{kernel}/pointer"), "sm_80") for kernel in KERNELS},
    "pointer_on_hopper": (POINTER, "sm_90"),
    "pointer_on_the_smaller_blackwell": (POINTER, "sm_120"),
    "fp8": (entry_of(f"scaled_linear/descriptor/fp8e4nv/{FP8_TILE}/gelu_tanh+bias+z"), "sm_90"),
    "fp8_on_blackwell": (entry_of(f"sm_100/scaled_linear/descriptor/fp8e4nv/{FP8_TILE}/none"), "sm_100"),
    "fp8_on_ada": (
        entry_of("sm_89/scaled_linear/pointer/fp8e4nv/64x64x128-w4-s3-p1/gelu_tanh+bias+z+wait"),
        "sm_89",
    ),
    "amd": (entry_of("sum_rows/pointer/bf16/512x128"), "gfx942"),
    "elementwise": (ELEMENTWISE, "sm_90"),
    "elementwise_on_amd": (entry_of(f"gfx942/{ELEMENTWISE.name}"), "gfx942"),
}
FLAT = {"FLATTEN": True}
FAULTS = {  # name -> (entry with a fault planted, architecture)
    "lost_alignment": (replace(POINTER, aligned=frozenset()), "sm_90"),
    "elements_one_by_one": (replace(ELEMENTWISE, aligned=frozenset()), "sm_90"),
    "wait_that_loads_ahead": (replace(WAITING, constants=WAITING.constants | FLAT), "sm_90"),
    "scatter_that_loads_ahead": (replace(SCATTER_LINEAR, constants=SCATTER_LINEAR.constants | FLAT), "sm_90"),
    "serialised_wgmma": (replace(LINEAR, num_stages=1), "sm_90"),
    "unknown_constant": (replace(LINEAR, constants=LINEAR.constants | {"ACTIVATION": "elu"}), "sm_90"),
}
JOBS = {name: CompileJob(*job) for name, job in (SOUND | FAULTS).items()}
KEYS = """
from tests.gate.test_ahead_of_time import keys
print(*keys())
"""


def keys() -> list[str]:
    return [compile_key(job.entry, job.architecture) for job in JOBS.values()]


@pytest.fixture(scope="module")
def told(compiler) -> Callable[[str], Facts | str]:
    """What the compiler told of each of JOBS."""
    return cache(lambda name: compiler.run(facts_or_error, JOBS[name]))


def broken(told: Callable[[str], Facts | str], name: str) -> list[str]:
    return [*violations(JOBS[name].entry.rules, JOBS[name].architecture, told(name))]


@pytest.mark.parametrize("name", SOUND)
def test_rules_are_kept_by_what_is_sound(told, name):
    assert broken(told, name) == []


def test_facts_of_a_descriptor_kernel(told):
    facts = told("linear_descriptor")
    assert 0 < facts.registers <= 255
    assert facts.stack == facts.spills == 0
    assert 128 * 256 * 2 < facts.shared <= SHARED_LIMIT["sm_90"]
    assert facts.in_flight == 1
    assert all(facts.count(name) for name in ("HGMMA", "UTMALDG", "UTMASTG", "FFMA", "all"))
    assert facts.count("HMMA") == 0
    assert facts.aligned == LINEAR.aligned
    assert facts.seconds > 0


def test_wgrad_adds_by_the_copy_engine(told):
    assert SOUND["wgrad_descriptor"][0].name.endswith("+=fp32")
    assert told("wgrad_descriptor").count("UTMAREDG") > 0


def test_each_planted_fault_is_seen_by_its_cause(told):
    failures = broken(told, "lost_alignment")
    assert "16-byte alignment lost: K, N, T, b_ptr, stride_wn, stride_xt, w, x, y, z" in failures
    assert "no LDGSTS.128" in failures
    assert {"no LDG.128", "no STG.128"} < {*broken(told, "elements_one_by_one")}
    assert any(failure.startswith("wgmma serialised") for failure in broken(told, "serialised_wgmma"))
    assert "a flattened loop loads rows before they are there" in told("wait_that_loads_ahead")
    assert "a flattened loop waits for each load" in told("scatter_that_loads_ahead")
    assert "unknown activation" in told("unknown_constant")


def test_key_is_the_same_in_every_process_and_differs_between_entries(compiler):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", KEYS],
        env=environment | {"PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert found == compiler.run(keys)
    assert len(set(found)) == len(JOBS)


@pytest.fixture
def batches(monkeypatch):
    """The jobs that go to a process together; where one has number 3, its process dies."""
    started = []

    def here(work, items, processes, report, of_the_dead):
        started.extend(items)
        for item in items:
            report(item)
        together = work is ahead_of_time.facts_together
        return [of_the_dead if 3 in (item if together else [item]) else work(item) for item in items]

    monkeypatch.setattr(ahead_of_time, "results_of", here)
    monkeypatch.setattr(ahead_of_time, "facts_together", lambda jobs: [f"of {job}" for job in jobs])
    monkeypatch.setattr(ahead_of_time, "_remembered", lambda job: None)
    return started


def test_jobs_of_one_gpu_go_together_and_each_is_reported(batches):
    jobs = [CompileJob(LINEAR, gpu) for gpu in ("sm_80", "sm_100") for _ in range(20)]
    told = []
    assert compile_all(jobs, 2, told.append) == [f"of {job}" for job in jobs]
    assert [len(some) for some in batches] == [8, 8, 4, 8, 8, 4]
    assert told == jobs
    batches.clear()
    compile_all(jobs[:12], 2, told.append)
    assert [len(some) for some in batches] == [3] * 4, "two rounds for each process, where there are few"


def test_no_process_starts_where_all_is_known(batches, monkeypatch):
    monkeypatch.setattr(ahead_of_time, "_remembered", lambda job: f"known {job}")
    told = []
    assert compile_all([JOBS["amd"]], 2, told.append) == [f"known {JOBS['amd']}"]
    assert (batches, told) == ([], [JOBS["amd"]])


class Numbered(NamedTuple):
    number: int
    architecture: str = "sm_80"

    def __eq__(self, other):
        return self.number == other

    __hash__ = None


def test_jobs_beside_one_whose_process_died_are_done_alone(batches):
    found = compile_all([Numbered(number) for number in range(32)], 2, lambda job: None)
    assert [number for number, one in enumerate(found) if one == ahead_of_time.DIED] == [3]


CAUSES = {  # planted fault -> what it is of, and the first cause that is named
    "serialised_wgmma": ("linear_descriptor", "severe", "no operand is copied ahead"),
    "lost_alignment": ("pointer_on_hopper", "severe", "no operand is copied ahead"),
    "elements_one_by_one": ("elementwise", "worse", "a load is narrower: 48 x 2 bytes instead of 6 x 16"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_planted_faults_are_told_by_their_cause(told, name):
    sound, severity, text = CAUSES[name]
    first = changes(told(sound), told(name), JOBS[name].architecture)[0]
    assert first.severity == severity
    assert first.text.startswith(text)


LOOPS = {
    "linear_descriptor": {"loops": 1, "pipeline": (4, 4), "products": 4, "copies": 2},
    "linear_pointer": {"loops": 1, "pipeline": (2, 2), "products": 32, "copies": 4},
    "fp8_on_blackwell": {"loops": 1, "pipeline": (4, 4), "products": 4, "copies": 2},
    "amd": {"loops": 1, "pipeline": (), "products": 0, "copies": 0},
    "elementwise": {"loops": 0, "pipeline": (), "products": 0, "copies": 0},
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_turn_of_the_loop_is_read_off_compiled_kernels(told, name):
    facts = told(name)
    found = {"loops": facts.loops, "pipeline": facts.pipeline}
    assert found | {kind: facts.loop.get(kind, 0) for kind in ("products", "copies")} == LOOPS[name]


def test_compiling_is_refused_where_kernels_are_interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles: there is a GPU")
    with pytest.raises(RuntimeError, match="unset it"):
        facts_of(LINEAR, "sm_90")


def test_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match=r"expected an architecture of sm_80, .*; got 'sm_42'"):
        facts_of(LINEAR, "sm_42")


def test_every_architecture_compiles_something():
    assert {gpu for spec in entry_specs().values() for gpu in spec.architectures} == set(ARCHITECTURES)
