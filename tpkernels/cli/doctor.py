"""`python -m tpkernels doctor`: checks this installation and environment variables, and reports problems.

A child process, `python -m tpkernels.cli.doctor`, imports packages that may be broken, and prints a JSON line
for each finding, after the name of its probe: a torch that dies on import is a finding, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from difflib import SequenceMatcher
from io import TextIOWrapper
from itertools import combinations
from signal import strsignal
from tempfile import TemporaryFile
from typing import Literal, NamedTuple

from tpkernels import __version__

MODULE = "tpkernels.cli.doctor"
PREFIX = "tpkernels-finding: "  # distinguishes our lines from output of libraries
SECONDS = 240.0  # for all probes
RANKS, RANK = 2, "rank"  # of the self-test; argument of one of its ranks
# Versions that pyproject.toml allows: the oldest and the newest tested, see docs/ci.md.
TESTED_TORCH = ("2.11", "2.15")
TESTED_TRITON = ("3.6", "3.9")
# The Triton that torch for CUDA requires; torch for CPUs requires none, and pip takes the newest.
PAIRS = {"2.11": "3.6.0", "2.12": "3.7.0", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}
PREFIXES = ("TPKERNELS_", "TRITON_", "TORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MASTER_", "SLURM_GPU")
_SWITCH = ("0", "1", "")
_ANYTHING = ()  # a path, or a number that its reader checks
VARIABLES: dict[str, tuple[str, ...]] = {  # allowed values
    "TPKERNELS_BACKEND": ("auto", "torch", "triton"),
    "TPKERNELS_BACKEND_SUMS": (*_SWITCH, "timed"),
    "TPKERNELS_BATCH_INVARIANT": _SWITCH,
    "TPKERNELS_CACHE_DIR": _ANYTHING,
    "TPKERNELS_CHECK_REPLICAS": _ANYTHING,
    "TPKERNELS_CXXFLAGS": _ANYTHING,  # of setup.py
    "TPKERNELS_DEBUG": _SWITCH,
    "TPKERNELS_DUMP": _SWITCH,
    "TPKERNELS_LOG": ("choices", "calls", "choices,calls", "calls,choices", ""),
    "TPKERNELS_NVTX": _SWITCH,
    "TPKERNELS_REQUIRE_EXT": _SWITCH,  # of setup.py
    "TPKERNELS_SAFE": _SWITCH,
    "TPKERNELS_TP_INVARIANT": _ANYTHING,
    "TPKERNELS_TRANSPORT": ("auto", "c10d", "shared", "symmetric", "symmetric-rounds"),
    "TPKERNELS_TUNE": _SWITCH,
}
Health = Literal["ok", "note", "problem"]  # a note costs something, a problem stops work
ALIKE = 0.85  # similarity from which a name without the prefix counts as a misspelling of ours


class Finding(NamedTuple):
    """A checked item, its health, and an explanation."""

    health: Health
    name: str
    text: str


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def main(options: Namespace) -> int:
    version = ".".join(map(str, sys.version_info[:3]))
    python = Finding("ok", "python", f"{version} at {sys.executable}")
    findings = [python, *probed([sys.executable, "-m", MODULE]), _compiler(), *variables()]
    problems = [finding.name for finding in findings if finding.health == "problem"]
    if isinstance(sys.stdout, TextIOWrapper):  # continue on terminals that cannot show a character
        sys.stdout.reconfigure(errors="backslashreplace")
    if options.json:
        found = [finding._asdict() for finding in findings]
        print(json.dumps({"version": __version__, "healthy": not problems, "findings": found}, indent=2))
        return 1 if problems else 0
    print(f"tpkernels {__version__}")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"  {finding.health:<7}  {finding.name:<{width}}  {finding.text}")
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}: {', '.join(problems)}"
    print(count if problems else "healthy")
    return 1 if problems else 0


def probed(command: Sequence[str], seconds: float = SECONDS) -> list[Finding]:
    """Return the findings of a child that runs the probes; its failure is one."""
    findings: list[Finding] = []
    probing = "probe"
    # files: a pipe may stay open in a grandchild
    with TemporaryFile("w+", errors="replace") as told, TemporaryFile("w+", errors="replace") as errors:
        try:
            code = subprocess.run(command, stdout=told, stderr=errors, timeout=seconds).returncode
            failure = f"failed with exit code {code}" * (code > 0)
            if code < 0:
                failure = f"ended by {strsignal(-code)}"
        except subprocess.TimeoutExpired:
            failure = f"took more than {seconds:g} s"
        told.seek(0)
        for line in told:
            if line.startswith(PREFIX):  # other lines are output of libraries
                said = json.loads(line.removeprefix(PREFIX))
                if isinstance(said, str):
                    probing = said
                else:
                    findings.append(Finding(*said))
        if failure:
            errors.seek(0)
            # of the self-test: a rank's, and its launcher's
            words = "; ".join([line.strip() for line in errors if line.strip()][-2:])
            findings.append(
                Finding("problem", probing, f"looking at it {failure}{': ' * bool(words)}{words}")
            )
    return findings


def _compiler() -> Finding:
    name = os.environ.get("CXX", "").strip()
    name = name or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "none")
    if found := shutil.which(name.split()[0]):
        return Finding("ok", "compiler", found)
    return Finding("note", "compiler", f"{name} not found: the C++ extension cannot be built here")


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield a finding for each variable of ours, of libraries below, and for misspelt names of ours."""
    for name, value in sorted(environment.items()):
        said = f"{name}={value}"
        if name in VARIABLES:
            allowed = VARIABLES[name]
            if allowed and value not in allowed:
                alike, nearest = _nearest(value.strip().lower(), allowed)
                meant = f"; did you mean {nearest}?" * bool(alike)
                said += f": expected one of {', '.join(filter(None, allowed))}{meant}"
                yield Finding("problem", "variable", said)
                continue
        else:
            alike, nearest = _nearest(name.upper(), VARIABLES)
            if name.startswith("TPKERNELS_") or alike >= ALIKE:
                yield Finding("problem", "variable", f"{said}: nothing reads it; did you mean {nearest}?")
                continue
        if name.startswith(PREFIXES) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            yield Finding("ok", "variable", said)


def _nearest(word: str, known: Iterable[str]) -> tuple[float, str]:
    """Return the similarity of the most similar known word, 1 for equal, and this word."""
    return max((SequenceMatcher(None, word, one).ratio(), one) for one in known)


# What the child looks at. Each yields the health of what it is named after, and an explanation.


def probe_torch() -> Iterator[tuple[Health, str]]:
    import torch

    yield _version("torch", torch.__version__, TESTED_TORCH)


def _version(name: str, version: str, tested: tuple[str, str]) -> tuple[Health, str]:
    """Return the health of a version: too old, newer than the newest tested, or fine."""
    minor, oldest, newest = (tuple(map(int, text.split(".")[:2])) for text in (version, *tested))
    if minor < oldest:
        return "problem", f"{version} is too old: tpkernels needs {tested[0]} or newer"
    if minor > newest:
        newer = f"{version} is newer than the newest tested, {tested[1]}"
        return "note", f"{newer}: pip install '{_allowed(name, tested)}'"
    return "ok", version


def _allowed(name: str, tested: tuple[str, str]) -> str:
    """Return the requirement for pip: at most the newest version that was tested."""
    major, minor = map(int, tested[1].split("."))
    return f"{name}<{major}.{minor + 1}"


def probe_gpu() -> Iterator[tuple[Health, str]]:
    import torch

    runtime = torch.version.cuda or torch.version.hip
    if runtime is None:
        yield "note", "this torch is built for the CPU only: no GPU kernels, gloo collectives"
    elif not torch.cuda.is_available():
        yield "note", f"torch is built for {runtime}, but sees no GPU: check driver and visible devices"
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            memory, version = f"{gpu.total_memory / 2**30:.0f} GiB", f"sm_{gpu.major}{gpu.minor}"
            yield "ok", f"{i}: {gpu.name}, {memory}, {version}, CUDA {runtime}, NCCL {nccl}"


def probe_peers() -> Iterator[tuple[Health, str]]:
    """Look at what ranks of this machine need from each other's GPUs; nothing without one."""
    import torch

    if not torch.cuda.is_available():
        return
    from tpkernels.comm.transports.rendezvous import why_no_stream_writes

    gpus = range(torch.cuda.device_count())
    found = [hidden_peers(os.environ, len(gpus))]
    apart = [pair for pair in combinations(gpus, 2) if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        first, second = apart[0]
        more = f" ({len(apart)} such pairs)" * (len(apart) > 1)
        found.append(
            f"GPUs {first} and {second} cannot access each other's memory{more}: NCCL sends through memory "
            "of the host, and symmetric does not open; nvidia-smi topo -p2p r says why"
        )
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        found.append("NCCL_P2P_DISABLE is set: NCCL sends through memory of the host; unset it")
    for i in gpus:
        try:
            why = why_no_stream_writes(torch.zeros(4, dtype=torch.uint8, device=f"cuda:{i}"))
        except RuntimeError as error:  # it may be full, or another process's alone
            why = f"nothing can be computed there now ({error})"
        found.append(f"GPU {i}: {why}; symmetric does not open" if why else "")
    yield from (("note", text) for text in found if text)
    if not any(found):
        peers = ", and which access each other's memory" if len(gpus) > 1 else ""
        yield "ok", f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}, which streams write to{peers}"


_RANKS_HERE = "LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"
_ONE_GPU_A_TASK = {  # values of Slurm's options that give each task one GPU
    "SLURM_GPUS_PER_TASK": r"(\w+:)?1$",
    "SLURM_TRES_PER_TASK": r".*gres[/:]gpu([:=]\w+)?[:=]1\b",
    "SLURM_GPU_BIND": r"(verbose,)?(single|per_task):1$|(verbose,)?(map|mask)_gpu:",
}


def hidden_peers(environment: Mapping[str, str], visible: int) -> str:
    """Return what hides the GPUs of the other ranks of this machine, and the cure; an empty text if nothing.

    visible: how many GPUs this process sees
    """
    counts = [re.match(r"\d+", environment.get(name, "")) for name in _RANKS_HERE]
    ranks = next((int(count[0]) for count in counts if count), 1)
    causes = [
        f"{name}={value}"
        for name, pattern in _ONE_GPU_A_TASK.items()
        if re.match(pattern, value := environment.get(name, ""))
    ]
    if ranks < 2 or (visible > 1 and not causes):
        return ""
    cure = "leave CUDA_VISIBLE_DEVICES alike on all ranks, and call torch.cuda.set_device(LOCAL_RANK)"
    if any(name.startswith("SLURM_") for name in environment):
        cure = (
            f"srun --ntasks-per-node={ranks} --gpus-per-node={ranks} --gpu-bind=none without --gpus-per-task"
            ", and torch.cuda.set_device(SLURM_LOCALID)"
        )
    devices = f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', '')}"
    return (
        f"each of {ranks} ranks here sees one GPU ({', '.join(causes) or devices}): memory of the others' "
        "mostly cannot be mapped, so NCCL sends through memory of the host, and symmetric does not open; "
        f"{cure}"
    )


def probe_triton() -> Iterator[tuple[Health, str]]:
    try:
        import numpy
        import triton
    except ImportError as error:
        install = f"pip install '{_allowed('triton', TESTED_TRITON)}' numpy"
        yield "problem", f"cannot be imported ({error}): no fused kernels; {install}"
        return
    yield _version("triton", triton.__version__, TESTED_TRITON)
    with suppress(ImportError):
        import torch

        if why := _why_not_paired(torch.__version__, triton.__version__):
            yield "note", why
    if triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        breaks = f"numpy {numpy.__version__} breaks the interpreter of Triton {triton.__version__}"
        yield "note", f"{breaks}: use numpy < 2.4 or Triton 3.7"


def probe_ptxas() -> Iterator[tuple[Health, str]]:
    """What Triton makes machine code with, of whose faults `check` tells."""
    with suppress(ImportError):  # of which the probe of Triton tells
        from tpkernels.gate.compiler_faults import ptxas_in_use

        yield "ok", ptxas_in_use()


def _why_not_paired(torch: str, triton: str) -> str:
    """Say which Triton belongs to a torch, if it is another."""
    paired = PAIRS.get(_minor(torch))
    if paired is None or _minor(triton) == _minor(paired):
        return ""
    return f"torch {torch} was tried with Triton {paired}, not {triton}: pip install triton=={paired}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def probe_extension() -> Iterator[tuple[Health, str]]:
    from tpkernels.extension import ExtensionState, extension

    found = extension()
    unused: Health = "problem" if found.state is ExtensionState.UNUSABLE else "note"
    yield "ok" if found.state is ExtensionState.LOADED else unused, found.detail


def probe_self_test() -> Iterator[tuple[Health, str]]:
    """Let ranks form a group and add up numbers; if one fails, exit after its words on stderr."""
    from tpkernels.training.launch import run_ranks

    if code := run_ranks([sys.executable, "-m", MODULE, RANK], RANKS):
        sys.exit(code)
    yield "ok", f"{RANKS} gloo processes formed a group and agreed"


def rank_of_self_test() -> None:
    """Add up a number of each rank in a row-parallel layer; raise if the sum is wrong."""
    import torch
    import torch.distributed as dist

    from tpkernels import RowParallelLinear, destroy_model_parallel, initialize_model_parallel
    from tpkernels.training.launch import hold_lifeline, join_world

    hold_lifeline()
    torch.set_num_threads(1)
    join_world("gloo", timedelta(seconds=30))
    initialize_model_parallel(tensor_model_parallel_size=RANKS)
    layer = RowParallelLinear(RANKS, 1, bias=False, input_is_parallel=True)
    layer.load_state_dict({"weight": torch.ones(1, 1)})
    total, _ = layer(torch.tensor([[float(dist.get_rank() + 1)]]))
    if total.item() != 3:
        raise RuntimeError(f"the sum of 1 and 2 is {total.item()} on rank {dist.get_rank()}")
    destroy_model_parallel()
    dist.destroy_process_group()


PROBES: dict[str, Callable[[], Iterator[tuple[Health, str]]]] = {
    "torch": probe_torch,
    "gpu": probe_gpu,
    "peers": probe_peers,
    "triton": probe_triton,
    "ptxas": probe_ptxas,
    "extension": probe_extension,
    "self-test": probe_self_test,
}


def print_findings() -> None:
    """Run the probes; print the name of each before it, and each finding as a JSON line."""
    for name, probe in PROBES.items():
        print(PREFIX + json.dumps(name), flush=True)
        try:
            findings = list(probe())
        except Exception as error:  # any error of a broken install is a finding
            findings = [("problem", f"{type(error).__name__}: {error}")]
        for health, text in findings:
            print(PREFIX + json.dumps([health, name, text]), flush=True)
        if name == "torch" and findings[0][0] == "problem":
            return  # other probes need torch


if __name__ == "__main__":
    rank_of_self_test() if RANK in sys.argv[1:] else print_findings()
