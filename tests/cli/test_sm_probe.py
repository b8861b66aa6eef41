"""The probe of reserved SMs on models of GPUs, and its code for a GPU on stand-ins for torch's."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpkernels.cli import qualify_ranks, sm_probe
from tpkernels.cli.sm_probe import CudaGpu, answer_of, probe, probe_and_keep
from tpkernels.gate.ahead_of_time import Entry, facts_of
from tpkernels.reserved_sms import LIBRARIES, measured, way_beside_collectives


@dataclass
class ModelGpu:
    """Products that take 100 ms on all SMs, by libraries of known habits."""

    obeys: dict[str, bool]
    sms: int = 132
    persistent: bool = True
    noise: float = 0.0  # of the time beside reserved SMs

    @property
    def libraries(self) -> Any:
        return tuple(self.obeys)

    def milliseconds(self, library, *, busy, reserved):
        counts_on = self.sms - (reserved if self.obeys[library] else 0)
        here = self.sms - busy
        waves = -(-counts_on // here) if self.persistent else counts_on / here
        return 100 * self.sms / counts_on * waves * (1 + self.noise * bool(reserved))


@pytest.mark.parametrize("sms", [20, 108, 132, 148])
@pytest.mark.parametrize("obeys", [False, True])
@pytest.mark.parametrize("noise", [-0.08, 0.0, 0.08])
def test_two_waves_are_told_from_fewer_sms(sms, obeys, noise):
    gpu = ModelGpu({"cublas": obeys}, sms, noise=noise)
    assert answer_of(gpu, "cublas").obeys == obeys


def test_products_that_get_sms_as_they_become_free_need_no_reservation():
    assert answer_of(ModelGpu({"cublas": False}, persistent=False), "cublas").obeys


def test_an_answer_says_how_long_products_took():
    found = probe(ModelGpu({"cublas": False, "cublaslt": True}))
    assert str(found["cublas"]) == (
        "beside busy SMs 2.00x its time alone, 2.00x if they are reserved: takes them"
    )
    assert str(found["cublaslt"]) == (
        "beside busy SMs 2.00x its time alone, 1.33x if they are reserved: leaves them"
    )


class ClockedEvent:
    def __init__(self, **_):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


@pytest.fixture
def gpu_of_cpu(monkeypatch):
    """torch.cuda's functions, on a CPU: the hog runs alone, in the interpreter, and ends as its spins do."""
    named = SimpleNamespace(multi_processor_count=4, name="stand-in")
    settings = SimpleNamespace(sms=None, library=torch._C._BlasBackend.Cublas, seen=[])

    def set_sms(value):
        settings.sms = value
        settings.seen.append((value, settings.library))

    for name, stand_in in {
        "Stream": lambda device: "a stream",
        "Event": ClockedEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device: named,
        "get_device_name": lambda device: named.name,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name, function in {
        "_get_sm_carveout_experimental": lambda: settings.sms,
        "_set_sm_carveout_experimental": set_sms,
        "_get_blas_preferred_backend": lambda: settings.library,
        "_set_blas_preferred_backend": lambda one: setattr(settings, "library", one),
    }.items():
        monkeypatch.setattr(torch._C, name, function)
    for name, value in {"SPINS": 2, "HELD": 16, "SIZE": (16, 16, 16), "ROUNDS": 1}.items():
        monkeypatch.setattr(sm_probe, name, value)
    return settings


def test_code_for_a_gpu_runs_on_stand_ins(gpu_of_cpu):
    gpu = CudaGpu(torch.device("cpu"), (16, 16, 16))
    assert gpu.libraries == tuple(library for library in LIBRARIES if library != "scaled")
    for library in gpu.libraries:
        assert gpu.milliseconds(library, busy=2, reserved=2) > 0
    assert int(gpu._started) == 2  # blocks of the last hog
    assert {sms for sms, _ in gpu_of_cpu.seen} == {2, None}
    assert (gpu_of_cpu.sms, gpu_of_cpu.library) == (None, torch._C._BlasBackend.Cublas)


def test_answers_of_a_gpu_are_kept_for_later_processes(gpu_of_cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    measured.cache_clear()
    habits = ModelGpu({"cublas": False, "cublaslt": False, "ours": True})
    monkeypatch.setattr(sm_probe, "CudaGpu", lambda device: habits)
    assert way_beside_collectives("stand-in") == "cublaslt"  # by the model
    answers = probe_and_keep(torch.device("cpu"))
    assert {name: answer.obeys for name, answer in answers.items()} == measured("stand-in") == habits.obeys
    assert way_beside_collectives("stand-in") == "ours"
    measured.cache_clear()


@pytest.mark.parametrize("ours", [True, False])
def test_qualify_tells_each_library_and_blames_ours_alone(ours, monkeypatch):
    answers = probe(ModelGpu({"cublas": False, "ours": ours}))
    monkeypatch.setattr(sm_probe, "probe_and_keep", lambda device: answers)
    world = SimpleNamespace(
        on_gpu=True, rank=0, device=torch.device("cpu"), all_do=lambda step: ("", [step(), {}])
    )
    checks = {check.name: check for check in qualify_ranks.check_reserved_sms(world)}
    assert checks["cublas"].status == "right"
    assert checks["cublas"].text.endswith("takes them")
    assert checks["ours"].status == ("right" if ours else "wrong")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_a_hog_takes_all_registers_of_an_sm(architecture, compiler):
    pointers = {f"{name}_ptr": "*i32" for name in ("started", "release")}
    hog = Entry(
        **{"name": "hog", "module": sm_probe.__name__, "function": "_hog_kernel", "form": "pointer"},
        arguments={**pointers, "out_ptr": "*fp32", "spin_limit": "i32"},
        aligned=frozenset(),
        constants={"HELD": sm_probe.HELD},
        num_warps=32,
        num_stages=None,
        architectures=(architecture,),
    )
    facts = compiler.run(facts_of, hog, architecture)
    assert facts.registers * facts.threads == 65536


def test_a_hog_that_gets_no_sms_ends_the_probe(gpu_of_cpu, monkeypatch):
    gpu = CudaGpu(torch.device("cpu"), (16, 16, 16))
    monkeypatch.setattr(sm_probe, "STARTED_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "_hog", lambda blocks: None)
    with pytest.raises(RuntimeError, match="has 0 of 2 SMs"):
        gpu.milliseconds("cublas", busy=2, reserved=0)
    assert int(gpu._release) == 1
