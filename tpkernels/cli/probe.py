"""The part of `doctor` that imports packages that may be broken; prints a JSON line for each finding.

Before each probe it prints the probe's name, so that the parent can name the cause of a crash. With
`self-test` it starts two ranks instead, as `train` starts its ranks, and lets them communicate.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

PREFIX = "tpkernels-finding: "  # distinguishes our lines from output of libraries
RANKS = 2  # of the self-test
SELF_TEST, RANK_OF_SELF_TEST = "self-test", "self-test-rank"
# Versions that pyproject.toml allows: the oldest and the newest tested, see docs/ci.md.
TESTED_TORCH = ("2.11", "2.15")
TESTED_TRITON = ("3.6", "3.9")


@dataclass(frozen=True)
class Finding:
    """A checked item, its health, and an explanation."""

    name: str
    health: Literal["ok", "note", "problem"]  # a note costs something, a problem stops work
    text: str


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str) -> Finding:
    return Finding(name, "note", text)


def problem(name: str, text: str) -> Finding:
    return Finding(name, "problem", text)


def probe_torch() -> list[Finding]:
    import torch

    return [_version("torch", torch.__version__, TESTED_TORCH)]


def _version(name: str, version: str, tested: tuple[str, str]) -> Finding:
    """Return the finding for a version: too old, newer than the newest tested, or fine."""
    minor, oldest, newest = (tuple(map(int, text.split(".")[:2])) for text in (version, *tested))
    if minor < oldest:
        return problem(name, f"{version} is too old: tpkernels needs {tested[0]} or newer")
    if minor > newest:
        text = (
            f"{version} is newer than the newest tested, {tested[1]}: pip install '{_allowed(name, tested)}'"
        )
        return note(name, text)
    return ok(name, version)


def _allowed(name: str, tested: tuple[str, str]) -> str:
    """Return the requirement for pip: at most the newest version that was tested."""
    major, minor = map(int, tested[1].split("."))
    return f"{name}<{major}.{minor + 1}"


def probe_gpu() -> list[Finding]:
    import torch

    runtime = torch.version.cuda or torch.version.hip
    if runtime is None:
        return [note("gpu", "this torch is built for the CPU only: no GPU kernels, gloo collectives")]
    if not torch.cuda.is_available():
        return [
            note("gpu", f"torch is built for {runtime}, but sees no GPU: check driver and visible devices")
        ]
    findings = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        text = (
            f"{i}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}, CUDA {runtime}"
        )
        findings.append(ok("gpu", text))
    return findings


def probe_collectives() -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [problem("collectives", "this torch is built without torch.distributed")]
    present = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    names = [name for name, is_present in present.items() if is_present]
    if present["nccl"] and torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        names[names.index("nccl")] = f"nccl {version}"
    if not names:
        return [problem("collectives", "this torch has neither gloo nor NCCL")]
    return [ok("collectives", ", ".join(names))]


def probe_triton() -> list[Finding]:
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        install = f"pip install '{_allowed('triton', TESTED_TRITON)}'"
        return [problem("triton", f"cannot be imported ({error}): no fused kernels; {install}")]
    findings = [_version("triton", triton.__version__, TESTED_TRITON)]
    try:
        numpy = importlib.import_module("numpy").__version__
    except ImportError:
        return [
            *findings,
            note("numpy", "not installed: Triton's interpreter, and so kernel checks, need it"),
        ]
    if triton.__version__.startswith("3.6.") and tuple(map(int, numpy.split(".")[:2])) >= (2, 4):
        text = f"{numpy} breaks the interpreter of Triton {triton.__version__}: use numpy < 2.4 or Triton 3.7"
        findings.append(note("numpy", text))
    return findings


def probe_backend() -> list[Finding]:
    from tpkernels.dispatch import backends

    if backends.backend not in backends.BACKENDS:
        return []  # a finding about the variable
    cpu = {"triton": "Triton's interpreter"}.get(backends.backend, "torch")
    gpu = {"triton": "Triton", "torch": "torch"}.get(backends.backend, "whoever was timed fastest")
    return [ok("backend", f"{backends.backend}: on the CPU {cpu}, on a GPU {gpu}")]


def probe_transport() -> list[Finding]:
    from tpkernels.comm.transports.select import TRANSPORTS, requested_transport

    if requested_transport not in TRANSPORTS:
        return []  # a finding about the variable
    auto = "auto: on the CPU shared memory within a machine, else c10d; on GPUs whatever was timed fastest"
    return [ok("transport", auto if requested_transport == "auto" else requested_transport)]


def probe_extension() -> list[Finding]:
    from tpkernels.extension import ExtensionState, extension

    health = {ExtensionState.LOADED: ok, ExtensionState.ABSENT: note, ExtensionState.UNUSABLE: problem}
    found = extension()
    return [health[found.state]("extension", found.detail)]


def probe_qualified() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return []
    from tpkernels.cli.qualify_world import saved_report, versions_for

    command = "python -m tpkernels qualify"
    findings = []
    for gpu in sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}):
        report = saved_report(versions_for(gpu))
        if report is None:
            text = f"{gpu} has not been tried with these versions: {command} takes two minutes"
            findings.append(note("qualified", text))
        elif report["right"]:
            findings.append(ok("qualified", f"{gpu}, on {report['ranks']} ranks; {report['auto']}"))
        else:
            wrong = [f"{c['part']} {c['name']}" for c in report["checks"] if c["status"] == "wrong"]
            findings.append(problem("qualified", f"{gpu} failed in {', '.join(wrong)}: see {command}"))
    return findings


EXCHANGE = "torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp"  # in torch's headers


def probe_symmetric() -> list[Finding]:
    """Report whether a rendezvous on some ranks makes a later one of more ranks hang, as in torch 2.13.

    Ranks then count rendezvous by process, not by group, and wait under different keys (pytorch issue 196082,
    fixed by pull request 196350). A release with the process's counter in its header has the defect.
    """
    import torch

    from tpkernels.comm.transports.select import requested_transport

    if not torch.cuda.is_available() or requested_transport in ("c10d", "shared"):
        return []
    header = Path(torch.__file__).parent / "include" / EXCHANGE
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        told = "may make"  # a torch without its headers
    else:
        if "size_t seq_id_" not in text:
            return []
        told = "makes"
    advice = (
        f"torch {torch.__version__}: symmetric memory of a group of some ranks {told} that of a larger one, "
        "opened later, hang (pytorch issue 196082). Where a tensor-parallel group is smaller than another "
        "that uses it, open it for the larger one first, or set TPKERNELS_TRANSPORT=c10d"
    )
    return [note("symmetric", advice)]


PROBES: dict[str, Callable[[], list[Finding]]] = {
    "torch": probe_torch,
    "gpu": probe_gpu,
    "collectives": probe_collectives,
    "triton": probe_triton,
    "backend": probe_backend,
    "transport": probe_transport,
    "extension": probe_extension,
    "qualified": probe_qualified,
    "symmetric": probe_symmetric,
}


def main() -> None:
    for name, probe in PROBES.items():
        print(PREFIX + json.dumps(name), flush=True)
        try:
            findings = probe()
        except Exception as error:  # any error of a broken install is a finding
            findings = [problem(name, f"{type(error).__name__}: {error}")]
        for finding in findings:
            print(PREFIX + json.dumps(asdict(finding)), flush=True)
        if name == "torch" and findings[0].health == "problem":
            return  # other probes need torch


def self_test() -> int:
    """Start ranks that form a group, print how long they took, and return the exit code."""
    from tpkernels.training.launch import run_ranks

    start = time.perf_counter()
    code = run_ranks([sys.executable, "-m", "tpkernels.cli.probe", RANK_OF_SELF_TEST], RANKS)
    if not code:
        print(f"{RANKS} gloo processes formed a group and agreed in {time.perf_counter() - start:.1f} s")
    return code


def rank_of_self_test() -> None:
    """Add up a number of each rank; raise if the sum is wrong."""
    import torch
    import torch.distributed as dist

    from tpkernels.groups.initialize import destroy_model_parallel, initialize_model_parallel
    from tpkernels.training.launch import hold_lifeline, join_world

    hold_lifeline()
    torch.set_num_threads(1)
    join_world("gloo", timedelta(seconds=30))
    state = initialize_model_parallel(tensor_model_parallel_size=RANKS)
    rank = dist.get_rank()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=state.process_group("tp"))
    if total.item() != 3:
        raise RuntimeError(f"all-reduce of 1 and 2 gave {total.item()} on rank {rank}")
    destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    if RANK_OF_SELF_TEST in sys.argv:
        rank_of_self_test()
    elif SELF_TEST in sys.argv:
        sys.exit(self_test())
    else:
        main()
