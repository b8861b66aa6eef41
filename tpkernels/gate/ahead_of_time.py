"""Compile a catalog entry for a GPU that need not be there, and report what the compiler made of it.

Nothing is launched and no driver is asked: Triton brings its compilers, ptxas and a disassembler along.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tpkernels.gate import machine_code, triton_ir
from tpkernels.gate.entry import Entry, ast_source
from tpkernels.kernels.disk_cache import DiskCache

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

# architecture -> bytes of shared memory a block may have; past it compiling succeeds, and launching fails
SHARED_LIMIT: Mapping[str, int] = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "gfx942": 65_536,
}
ARCHITECTURES = tuple(SHARED_LIMIT)


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
    seconds: float  # that compiling took

    def count(self, instruction: str) -> int:
        return self.instructions.get(instruction, 0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"aligned": sorted(self.aligned), "narrow_offsets": list(self.narrow_offsets)}

    @staticmethod
    def from_json(value: Any) -> Facts:
        """What `as_json` gave; TypeError for anything else."""
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(Facts)}:
            raise TypeError(f"expected the fields of Facts, got {value!r}")
        sets = {"aligned": frozenset(value["aligned"]), "narrow_offsets": tuple(value["narrow_offsets"])}
        return Facts(**value | sets)


class CompileError(RuntimeError):
    """Triton refused an entry, or the compiler behind it did."""


def facts_of(entry: Entry, architecture: str, cache: DiskCache) -> Facts:
    """The facts of one entry on one architecture: from the cache, or compiled and put there."""
    key = compile_key(entry, architecture)
    try:
        return Facts.from_json(cache.get(key))
    except TypeError:  # nothing there
        facts = compile_entry(entry, architecture)
        cache.put(key, facts.as_json())
        return facts


def compile_entry(entry: Entry, architecture: str) -> Facts:
    """The facts of one entry on one architecture, compiled afresh: Triton's own cache is left out."""
    import triton

    target = gpu_target(architecture)
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
    start = time.perf_counter()
    with TemporaryDirectory(prefix="tpkernels-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        try:
            compiled = triton.compile(ast_source(entry), target=target, options=options)
        except Exception as error:  # whatever the compiler raises is a finding about this entry
            raise CompileError(_reason(error)) from error
        seconds = time.perf_counter() - start
        look = _amd if target.backend == "hip" else _nvidia
        return look(compiled, seconds, Path(folder))


def compile_key(entry: Entry, architecture: str) -> str:
    """A hash of what the facts depend on: kernel sources, signature, options, Triton, target, this code."""
    import triton
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

    backend = make_backend(gpu_target(architecture))
    options = backend.parse_options({"num_warps": entry.num_warps, "num_stages": entry.num_stages})
    variables = get_cache_invalidating_env_vars()  # of Triton: TRITON_PTXAS_PATH and the like
    source = ast_source(entry)
    source.attrs = dict(sorted(source.attrs.items()))  # Triton hashes them in the order they come in
    key = get_cache_key(source, backend, options, variables)
    ours = b"".join(
        Path(str(module)).read_bytes() for module in (__file__, machine_code.__file__, triton_ir.__file__)
    )
    return hashlib.sha256(f"{triton.__version__} {architecture} {key}".encode() + ours).hexdigest()


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


def _reason(error: BaseException) -> str:
    """One line: the first cause, where Triton shows the source around it, and the last words of that."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = [line.strip() for line in str(error).splitlines() if re.search(r"\w", line)]
    return f"{type(error).__name__}: {words[-1] if words else 'without a message'}"


def _nvidia(compiled: Any, seconds: float, folder: Path) -> Facts:
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    # one call for both: "REG:200 STACK:0 SHARED:1024 LOCAL:0 ...", then the instructions
    listing = subprocess.run(
        [_cuobjdump(), "-res-usage", "-sass", str(binary)], capture_output=True, text=True, check=True
    ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert usage, "cuobjdump without a line of resource usage"
    mix = machine_code.sass_mix(listing)
    return Facts(
        registers=int(usage[1]),
        stack=int(usage[2]),
        spills=mix.get("STL", 0) + mix.get("LDL", 0),
        shared=compiled.metadata.shared,
        in_flight=machine_code.wgmma_in_flight(listing),
        instructions=mix,
        aligned=triton_ir.aligned_arguments(compiled.asm["ttir"]),
        narrow_offsets=triton_ir.narrow_offsets(compiled.asm["ttir"]),
        seconds=seconds,
    )


def _amd(compiled: Any, seconds: float, folder: Path) -> Facts:
    assembly = compiled.asm["amdgcn"]
    registers, stack, spills = machine_code.amd_resources(assembly)
    return Facts(
        registers=registers,
        stack=stack,
        spills=spills,
        shared=compiled.metadata.shared,
        in_flight=0,
        instructions=machine_code.amd_mix(assembly),
        aligned=triton_ir.aligned_arguments(compiled.asm["ttir"]),
        narrow_offsets=triton_ir.narrow_offsets(compiled.asm["ttir"]),
        seconds=seconds,
    )


def _cuobjdump() -> str:
    import triton

    return str(triton.knobs.nvidia.cuobjdump.path)  # as brought along, or TRITON_CUOBJDUMP_PATH
