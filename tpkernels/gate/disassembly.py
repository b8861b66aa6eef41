"""Machine code of NVIDIA's GPUs as text, by the disassembler that Triton brings along."""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile


class NoDisassembler(RuntimeError):
    """cuobjdump is not where Triton says, or does not run."""


@lru_cache(maxsize=1)  # what was compiled is clocked next, and disassembling takes as long as ptxas
def disassemble(cubin: bytes) -> str:
    """The listing that Triton's cuobjdump prints, with control fields and a line of resource usage:

    Function _linear_fwd_kernel:
      REG:200 STACK:0 SHARED:1024 LOCAL:0 ...
    """
    try:
        tool = _cuobjdump()
        with NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            command = [tool, "-res-usage", "-sass", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise NoDisassembler(f"{tool} failed: {error.stderr.strip()}") from error
    except (OSError, RuntimeError) as error:
        raise NoDisassembler(f"cuobjdump, which Triton brings along, is missing: {error}") from error


def _cuobjdump() -> str:
    import triton

    return str(triton.knobs.nvidia.cuobjdump.path)  # as brought along, or TRITON_CUOBJDUMP_PATH
