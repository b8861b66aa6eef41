"""Compile entries for GPUs that need not be there, and report what the compiler made of each.

Nothing is launched and no driver is asked: Triton brings its compilers, ptxas and a disassembler along.
Compiling runs in processes of its own (see `workers`): in parallel, and away from TRITON_INTERPRET (this file
imports no kernel).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tpkernels.gate import (
    compiler_faults,
    disassembly,
    loops,
    occupancy,
    products_in_flight,
    ptx_flow,
    triton_ir,
)
from tpkernels.gate.child import one_line_error
from tpkernels.gate.disassembly import NoDisassembler, disassemble, disassemble_ahead
from tpkernels.gate.disk_cache import DiskCache
from tpkernels.gate.occupancy import SHARED_LIMIT
from tpkernels.gate.workers import results_of

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

Result = TypeVar("Result")


Constant = int | bool | str | float | None  # or a dtype of Triton's
ARCHITECTURES = tuple(SHARED_LIMIT)
DIED = "the compiler died"
TOGETHER = 8  # jobs, whose machine code is disassembled at once


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel with the type of each argument, and the GPUs it is shipped for."""

    name: str  # "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
    module: str  # "tpkernels.kernels.linear"
    function: str
    form: Literal["descriptor", "pointer"]
    arguments: Mapping[str, str]  # run-time argument -> Triton's name of its type
    aligned: frozenset[str]  # arguments that are multiples of 16
    constants: Mapping[str, Constant]
    num_warps: int
    num_stages: int | None  # None: Triton's default
    architectures: tuple[str, ...]  # "sm_90", "gfx942"
    unspecialised: frozenset[str] = frozenset()  # arguments of whose values Triton is told nothing
    folder: str = ""  # in which its module is looked for before all others; "": where ours are
    more_options: Mapping[str, Any] = field(default_factory=dict)  # of Triton
    rules: tuple[str, ...] = ()  # that what is compiled of it must keep, see `gate.rules`
    place: str = ""  # file and line of the kernel, where it is a user's
    sources: str = ""  # a hash of the files that its module comes from; "": not known

    @property
    def options(self) -> dict[str, Any]:
        """What `triton.compile` takes as such."""
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        return {"num_warps": self.num_warps, **stages, **self.more_options}


@dataclass(frozen=True, slots=True)
class CompileJob:
    """An entry to compile for one architecture."""

    entry: Entry
    architecture: str

    def __str__(self) -> str:
        return f"{self.entry.name} on {self.architecture}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a compilation yielded."""

    registers: int  # a thread (a work item on AMD: vector registers)
    stack: int  # bytes a thread
    spills: int  # instructions that store to or load from local memory; on AMD registers spilled
    shared: int  # bytes a block
    in_flight: int  # batches of wgmma that run while others are awaited; 0: none, or serialised
    instructions: Mapping[str, int]  # see `machine_code`; absent is zero
    aligned: frozenset[str]  # arguments that the compiler knows to be multiples of 16
    narrow_offsets: tuple[str, ...]  # 32-bit products in addresses, see `triton_ir`
    unordered_reads: tuple[str, ...]  # why rows may be read before their flag, see `ptx_flow`; () on AMD
    unordered_flags: tuple[str, ...]  # why a flag may be seen before its rows
    seconds: float  # that compiling took
    narrow_sums: tuple[str, ...] = ()  # where numbers are added up in 16 bits, see `triton_ir`
    threads: int = 0  # a block; 0: not known
    blocks: int | None = None  # that an SM holds; None: not known
    pipeline: tuple[int, ...] = ()  # buffers of each operand that is copied ahead of its loop, most first
    # see `loops.Loops`
    loops: int = 0
    loop: Mapping[str, int] = field(default_factory=dict)
    load_bytes: int = 0
    load_waits: int = 0
    rest: Mapping[str, int] = field(default_factory=dict)
    tile_loops: int = 0
    miscompiled: tuple[str, ...] = ()  # what is wrong in machine code, see `compiler_faults`; () on AMD

    def count(self, instruction: str) -> int:
        return self.instructions.get(instruction, 0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"aligned": sorted(self.aligned)}

    @staticmethod
    def from_json(value: Any) -> Facts:
        """What `as_json` gave; TypeError for anything else."""
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(Facts)}:
            raise TypeError(f"expected the fields of Facts, got {value!r}")
        lists = {name: tuple(found) for name, found in value.items() if isinstance(found, list)}
        return Facts(**value | lists | {"aligned": frozenset(value["aligned"])})


def compile_all(
    jobs: Sequence[CompileJob], processes: int, report: Callable[[CompileJob], None]
) -> list[Facts | str]:
    """The facts of each job, or in words why there are none; `report` hears of each as it is done.

    Without any to do, no process starts. Where there are many, some at a time are disassembled at once; those
    of a process that died are done one by one.
    """
    results: dict[int, Facts | str] = {}
    for number, job in enumerate(jobs):
        if (known := _remembered(job)) is not None:
            results[number] = known
            report(job)
    todo = [number for number in range(len(jobs)) if number not in results]
    size = max(1, min(TOGETHER, len(todo) // (2 * processes)))
    runs = [[*run] for _, run in groupby(todo, lambda number: jobs[number].architecture)]
    together = [run[at : at + size] for run in runs for at in range(0, len(run), size)]

    def done(some: Sequence[CompileJob]) -> None:
        for job in some:
            report(job)

    if todo:
        importlib.import_module("torch")  # once for all forks
    batches = [[jobs[number] for number in batch] for batch in together]
    found: list[list[Facts | str] | None] = results_of(facts_together, batches, processes, done, None)
    lost = [number for batch, facts in zip(together, found, strict=True) if facts is None for number in batch]
    one_by_one = [jobs[number] for number in lost]
    alone: list[Facts | str] = results_of(facts_or_error, one_by_one, processes, lambda job: None, DIED)
    for batch, facts in zip(together, found, strict=True):
        results |= zip(batch, facts or [], strict=False)
    results |= zip(lost, alone, strict=True)
    return [results[number] for number in range(len(jobs))]


def _remembered(job: CompileJob) -> Facts | None:
    """What the user's cache has of a job, if that can be told here."""
    entry = job.entry
    if entry.folder or entry.module not in sys.modules:  # one that is not ours may do anything on import
        return facts_of_sources(entry, job.architecture)
    try:
        return facts_kept(entry, job.architecture)
    except Exception:  # kernels are interpreted here, or it cannot be compiled: `facts_or_error` says why
        return None


def facts_or_error(job: CompileJob) -> Facts | str:
    """Work for one of the processes."""
    return facts_together([job])[0]


def facts_together(jobs: Sequence[CompileJob]) -> list[Facts | str]:
    """Of jobs on one architecture: compiled one by one, and disassembled at once."""
    begun = [_or_error(partial(_kept_or_made, job), job.entry) for job in jobs]
    with suppress(NoDisassembler):  # of which each hears below
        disassemble_ahead([one.code for one in begun if isinstance(one, _Made) and not one.is_amd])
    pairs = zip(begun, jobs, strict=True)
    return [_or_error(one.kept, job.entry) if isinstance(one, _Made) else one for one, job in pairs]


def _kept_or_made(job: CompileJob) -> Facts | _Made:
    return facts_kept(job.entry, job.architecture) or _made(job)


def facts_of(entry: Entry, architecture: str) -> Facts:
    """The facts of one entry on one architecture: from the user's cache, or compiled and put there."""
    return facts_kept(entry, architecture) or _made(CompileJob(entry, architecture)).kept()


def facts_kept(entry: Entry, architecture: str) -> Facts | None:
    """The facts of one entry on one architecture, if they are in the user's cache."""
    found = facts_of_sources(entry, architecture)
    if found is None and (found := _facts_at(compile_key(entry, architecture))) and entry.sources:
        DiskCache.of_user("facts").put(_sources_key(entry, architecture), found.as_json())
    return found


def facts_of_sources(entry: Entry, architecture: str) -> Facts | None:
    """The same for an entry of a user whose files are as they were: its module is not imported."""
    return _facts_at(_sources_key(entry, architecture)) if entry.sources else None


def _facts_at(key: str) -> Facts | None:
    try:
        return Facts.from_json(DiskCache.of_user("facts").get(key))
    except TypeError:  # nothing there
        return None


def _sources_key(entry: Entry, architecture: str) -> str:
    said = {**asdict(entry), "aligned": sorted(entry.aligned), "unspecialised": sorted(entry.unspecialised)}
    return f"{_versions()} {architecture} {json.dumps(said, sort_keys=True, default=str)}"


@dataclass(frozen=True, slots=True)
class _Made:
    """What Triton compiled."""

    job: CompileJob
    compiled: Any
    seconds: float

    @property
    def is_amd(self) -> bool:
        return self.job.architecture.startswith("gfx")

    @property
    def code(self) -> bytes:
        code: bytes = self.compiled.asm["hsaco" if self.is_amd else "cubin"]
        return code

    def facts(self) -> Facts:
        if self.is_amd:
            return _amd(self.compiled, self.seconds)
        return nvidia_facts(self.compiled, self.seconds, self.job.architecture)

    def kept(self) -> Facts:
        """The facts, put into the user's cache."""
        facts = self.facts()
        DiskCache.of_user("facts").put(compile_key(self.job.entry, self.job.architecture), facts.as_json())
        if self.job.entry.sources:
            by_sources = _sources_key(self.job.entry, self.job.architecture)
            DiskCache.of_user("facts").put(by_sources, facts.as_json())
        return facts


def _made(job: CompileJob) -> _Made:
    import triton

    entry, target = job.entry, gpu_target(job.architecture)
    start = time.perf_counter()
    with TemporaryDirectory(prefix="tpkernels-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = triton.compile(ast_source(entry), target=target, options=entry.options)
    return _Made(job, compiled, time.perf_counter() - start)


def _or_error(work: Callable[[], Result], entry: Entry) -> Result | str:
    try:
        return work()
    except Exception as error:  # whatever the compiler raises, or an import, is a finding about this entry
        return f"{_line_of(error, entry)}{one_line_error(error)}"


def _line_of(error: BaseException | None, entry: Entry) -> str:
    """Return where the compiler found an error, in a kernel or what it calls: "kernels.py:12: ", or ""."""
    functions = {function.src: function for function in _called_by(jit_function(entry), {})}
    place = ""
    while error is not None:  # the innermost that is no function of Triton's own
        function, node = functions.get(getattr(error, "src", "")), getattr(error, "node", None)
        if function is not None and node is not None and hasattr(node, "lineno"):
            above = next(i for i, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
            line = function.starting_line_number + above + node.lineno - 1
            place = f"{Path(inspect.getfile(function.fn)).name}:{line}: "
        error = error.__cause__
    return place


def _called_by(kernel: Any, seen: dict[int, Any]) -> Iterable[Any]:
    """Yield a kernel and the functions under `triton.jit` that it, or one of these, names."""
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction) and not kernel.module.startswith("triton.") and id(kernel) not in seen:
        seen[id(kernel)] = kernel
        yield kernel
        for name in kernel.fn.__code__.co_names:
            yield from _called_by(kernel.fn.__globals__.get(name), seen)


def compile_key(entry: Entry, architecture: str) -> str:
    """A hash of what the facts depend on: kernel sources, signature, options, Triton, target, this code."""
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

    backend = make_backend(gpu_target(architecture))
    options = backend.parse_options(entry.options)
    variables = get_cache_invalidating_env_vars()  # of Triton: TRITON_PTXAS_PATH and the like
    source = ast_source(entry)
    source.attrs = dict(sorted(source.attrs.items()))  # Triton hashes them in the order they come in
    key = get_cache_key(source, backend, options, variables)
    return hashlib.sha256(f"{_versions()} {architecture} {key}".encode()).hexdigest()


@cache
def _versions() -> str:
    """Triton's version, and a hash of what reads its results."""
    readers = (
        compiler_faults,
        disassembly,
        loops,
        occupancy,
        products_in_flight,
        ptx_flow,
        triton_ir,
    )
    files = (__file__, *(reader.__file__ for reader in readers))
    ours = b"".join(Path(str(file)).read_bytes() for file in files)
    return f"{version('triton')} {hashlib.sha256(ours).hexdigest()}"


def ast_source(entry: Entry) -> ASTSource:
    """What `triton.compile(..., target=..., options=entry.options)` takes."""
    from triton.compiler import ASTSource

    kernel = jit_function(entry)
    names = list(kernel.arg_names)
    return ASTSource(
        fn=kernel,
        signature={name: entry.arguments.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in entry.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in entry.aligned},
    )


def jit_function(entry: Entry) -> Any:
    """The kernel as Triton compiles it. Of a module that is not ours, call it in a process to spare."""
    if entry.folder and entry.folder not in sys.path:
        sys.path.insert(0, entry.folder)
    if entry.folder and entry.module not in sys.modules:
        from tpkernels.gate.user_kernels.pretended_gpu import pretended_gpu

        with pretended_gpu():
            importlib.import_module(entry.module)
    return undecorated(getattr(importlib.import_module(entry.module), entry.function))


def undecorated(kernel: Any) -> Any:
    """What `triton.autotune` and `triton.heuristics` were put around."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    return undecorated(kernel.fn) if isinstance(kernel, Autotuner | Heuristics) else kernel


def gpu_target(architecture: str) -> GPUTarget:
    """What Triton calls an architecture. Refuses in a process whose kernels are interpreted."""
    import triton
    from triton.backends.compiler import GPUTarget

    if architecture not in SHARED_LIMIT:
        raise ValueError(f"expected an architecture of {', '.join(ARCHITECTURES)}; got {architecture!r}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 leaves nothing to compile: unset it for this process")
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def nvidia_facts(compiled: Any, seconds: float, architecture: str) -> Facts:
    """What Triton's `CompiledKernel` for a GPU of NVIDIA takes of it. seconds: that compiling took"""
    code = compiled.asm["cubin"]
    listing = disassemble(code)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert usage, "cuobjdump without a line of resource usage"
    mix = disassembly.sass_mix(listing)
    registers, threads, shared = int(usage[1]), _threads(compiled), compiled.metadata.shared
    turns = loops.nvidia_loops(listing)
    return Facts(
        registers=registers,
        stack=int(usage[2]),
        spills=mix.get("STL", 0) + mix.get("LDL", 0),
        shared=shared,
        in_flight=disassembly.wgmma_in_flight(listing),
        instructions=mix,
        aligned=triton_ir.aligned_arguments(compiled.asm["ttir"]),
        narrow_offsets=triton_ir.narrow_offsets(compiled.asm["ttir"]),
        narrow_sums=triton_ir.narrow_sums(compiled.asm["ttir"]),
        unordered_reads=ptx_flow.unordered_reads(compiled.asm["ptx"]),
        unordered_flags=ptx_flow.unordered_flags(compiled.asm["ptx"]),
        seconds=seconds,
        threads=threads,
        blocks=min(
            occupancy.blocks_by_limit(architecture, registers, threads, shared).values(), default=None
        ),
        pipeline=loops.copied_ahead(compiled.asm["ttgir"]),
        loops=turns.loops,
        loop=turns.mix,
        load_bytes=turns.load_bytes,
        load_waits=turns.load_waits,
        rest=turns.rest,
        tile_loops=turns.tile_loops,
        miscompiled=compiler_faults.miscompiled(
            compiled.asm["ptx"], listing, architecture, compiler_faults.ptxas_of(architecture)
        ),
    )


def _amd(compiled: Any, seconds: float) -> Facts:
    assembly = compiled.asm["amdgcn"]
    registers, stack, spills = disassembly.amd_resources(assembly)
    turns = loops.amd_loops(assembly)
    return Facts(
        registers=registers,
        stack=stack,
        spills=spills,
        shared=compiled.metadata.shared,
        in_flight=0,
        instructions=disassembly.amd_mix(assembly),
        aligned=triton_ir.aligned_arguments(compiled.asm["ttir"]),
        narrow_offsets=triton_ir.narrow_offsets(compiled.asm["ttir"]),
        narrow_sums=triton_ir.narrow_sums(compiled.asm["ttir"]),
        unordered_reads=(),
        unordered_flags=(),
        seconds=seconds,
        threads=_threads(compiled),
        pipeline=loops.copied_ahead(compiled.asm["ttgir"]),
        loops=turns.loops,
        loop=turns.mix,
        rest=turns.rest,
        tile_loops=turns.tile_loops,
    )


def _threads(compiled: Any) -> int:
    return int(compiled.metadata.num_warps * compiled.metadata.warp_size)
