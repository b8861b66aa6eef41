"""Builds the C++ extension at its first use if the install did not.

torch's lock lets one process of a machine build; the others wait for it and load what it built.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from tpkernels.comm.agreement import Problem
from tpkernels.errors import is_first_to_say
from tpkernels.extension import ExtensionState, extension, folder_of_builds, library_of_first_use, sources
from tpkernels.files import make_folder, why_not_ours

BUILD_SECONDS = 600.0  # time limit of a build, or of the wait for another process's
END_SECONDS = 10.0  # for an interrupted build, to release torch's lock
INSTEAD = "until then use torch.nn.parallel.DistributedDataParallel"
# Runs in its own process, which can be killed. Loading the library is its last step.
_BUILD = """
import sys
from torch.utils.cpp_extension import load
source, flags, folder = sys.argv[1:]
load("tpkernels_C", [source], flags.split(), build_directory=folder, is_python_module=False)
"""


class CannotBuild(Exception):
    """The extension cannot be built here; the message has the reason and the remedy."""


def problem_with_extension() -> Problem | None:
    """Load the extension, and build it first if needed; return why it cannot be used, or None."""
    if extension().state is ExtensionState.ABSENT:
        try:
            build(library_of_first_use())
        except CannotBuild as error:
            return (
                "ImportError",
                f"the C++ extension is not built, and cannot be built here: {error}; {INSTEAD}",
            )
        extension.cache_clear()
    found = extension()
    if found.state is not ExtensionState.LOADED:
        return "ImportError", f"tpkernels' C++ extension is unusable: {found.detail}"
    return None


def build(library: Path | None) -> None:
    """Build `library`, or wait for the process of this machine that is building it."""
    if library is None:
        raise CannotBuild("there is no folder for it; set TPKERNELS_CACHE_DIR to one that can be written")
    environment = _with_tools()
    try:
        make_folder(library.parent)
        if why := why_not_ours(library.parent, folder_of_builds(library)):
            raise CannotBuild(why)
        _compile(library.parent, environment)
    except OSError as error:
        raise CannotBuild(f"{error}; set TPKERNELS_CACHE_DIR to a folder that can be written") from error


def _with_tools() -> dict[str, str]:
    """Return the environment for a build; its PATH includes the scripts folder of this Python, for ninja."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    compiler = os.environ.get("CXX", "c++")  # as torch chooses
    if not shutil.which((shlex.split(compiler) or [""])[0], path=path):
        raise CannotBuild(
            f"there is no C++ compiler: '{compiler}' is not on the PATH; install one for C++20 (apt install "
            "g++, say), or name one in CXX"
        )
    if not shutil.which("ninja", path=path):
        raise CannotBuild("ninja is not on the PATH; install it: pip install ninja")
    return os.environ | {"PATH": path}


def _compile(folder: Path, environment: dict[str, str]) -> None:
    """Compile tpkernels_C.so into `folder`; on failure the compiler's output stays there."""
    flags = (sources() / "cxx_flags").read_text()
    command = [sys.executable, "-c", _BUILD, str(sources() / "all.cpp"), flags, str(folder)]
    text = f"tpkernels: building the C++ extension once, into {folder}"
    if is_first_to_say(text, socket.gethostname()):
        print(text, file=sys.stderr, flush=True)
    log = folder / f"log-{os.getpid()}.txt"
    with log.open("w") as output:
        # its own session: it outlives a killed rank, and releases the lock for the others
        builder = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            umask=0o022,  # nobody else may write the library
        )
        try:
            failed = builder.wait(BUILD_SECONDS) != 0
        except subprocess.TimeoutExpired:
            raise CannotBuild(
                f"it took longer than {BUILD_SECONDS:.0f} s; if no process is building, remove {folder}"
            ) from None
        finally:
            _end(builder)
    if failed:
        raise CannotBuild(_reason(log))
    log.unlink()


def _end(builder: subprocess.Popen[bytes]) -> None:
    """End a build that still runs: interrupted, it releases the lock; killed, it would not."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if builder.poll() is None:
            os.killpg(builder.pid, number)
            with suppress(subprocess.TimeoutExpired):
                builder.wait(END_SECONDS)


def _reason(log: Path) -> str:
    """Return the compiler's first error."""
    for line in log.read_text(errors="replace").splitlines():
        if "error:" in line:
            return f"{line.strip()} (the full output is in {log})"
    return f"it failed, here or in the process that was waited for (the output is in {log})"
