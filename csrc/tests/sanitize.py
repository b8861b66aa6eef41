"""Builds the extension with sanitizers, in a folder of its own, and runs its tests there.

python csrc/tests/sanitize.py asan    # reads and writes out of bounds, use after free, undefined behaviour
python csrc/tests/sanitize.py tsan    # data races

First the sanitizers have to see faults that are planted (planted.cpp), or the run fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("tpkernels", "tests", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE")
COMMON = ["-fno-omit-frame-pointer", "-g1", "-D_GLIBCXX_ASSERTIONS"]
# torch hides the type information of its classes, which `vptr` would ask for
UNDEFINED = [
    *("-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"),
    "-fno-wrapv",  # Python's own flags have -fwrapv, under which no overflow is an error
]


@dataclass(frozen=True)
class Sanitizer:
    """How code is compiled and run, and what is run.

    planted: by fault of planted.cpp, its argument and a word of the report that it must lead to
    """

    flags: list[str]
    preloaded: list[str]  # Python itself is not instrumented, so the run-time library has to come first
    variables: dict[str, str]
    planted: dict[str, tuple[int, str]]
    tests: list[str]


SANITIZERS = {
    "asan": Sanitizer(
        flags=["-fsanitize=address", *UNDEFINED, *COMMON],
        preloaded=["libasan.so", "libstdc++.so.6"],  # whose throw is wrapped
        variables={
            # Python frees little of its own at its end; and a request for too much memory is torch's error
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        planted={
            "read_beyond": (3, "heap-buffer-overflow"),
            "read_freed": (1, "heap-use-after-free"),
            "index_beyond": (3, "__n < this->size()"),
            "overflow": (1, "signed integer overflow"),
        },
        tests=[
            "-m",
            "pytest",
            "-q",
            "tests/buckets/test_ext.py",
            "tests/buckets/test_ext_arguments.py",
            "tests/buckets/test_bucket_options.py",
            "tests/buckets/test_gradient_buckets.py",
            "tests/buckets/test_shared_memory.py",
            "tests/buckets/test_shared_timing.py",
            "tests/comm/test_native_pushes.py",
            "tests/comm/test_symmetric.py",
        ],
    ),
    "tsan": Sanitizer(
        flags=["-fsanitize=thread", *COMMON],
        preloaded=["libtsan.so", "libstdc++.so.6"],
        variables={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1"},
        planted={"race": (100_000, "data race")},
        tests=["csrc/tests/races.py"],
    ),
}


def library(name: str) -> str:
    asked = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = asked.stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"{name}: expected g++ to have it, but it has not; install g++ with its sanitizers")
    return path


def copy_sources(folder: Path) -> None:
    """What is built and tested, beside what an earlier build left there: so a second one is short."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, copy = ROOT / name, folder / name
        if source.is_dir():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(source, copy)


def require_planted(name: str, sanitizer: Sanitizer, folder: Path, running: dict[str, str]) -> None:
    """Exit unless every planted fault ends a run with the report that is expected of it."""
    built = folder / "planted.so"
    source = ROOT / "csrc/tests/planted.cpp"
    compiler = ["g++", "-std=c++20", "-fwrapv", "-O2", "-shared", "-fPIC", *sanitizer.flags]
    subprocess.run([*compiler, source, "-o", built], check=True)
    for fault, (argument, word) in sanitizer.planted.items():
        code = f"import ctypes; ctypes.CDLL({str(built)!r}).{fault}({argument})"
        ran = subprocess.run([sys.executable, "-c", code], env=running, capture_output=True, text=True)
        if ran.returncode == 0 or word not in ran.stderr:
            sys.exit(f"make {name} is blind: it does not see the planted {fault!r}\n{ran.stderr}")
        print(f"make {name}: sees the planted {fault!r}", flush=True)


def main(name: str) -> int:
    sanitizer, folder = SANITIZERS[name], ROOT / "build" / name
    building = {
        **os.environ,
        "TPKERNELS_REQUIRE_EXT": "1",
        "TPKERNELS_CXXFLAGS": " ".join(sanitizer.flags),
    }
    running = {
        **os.environ,
        **sanitizer.variables,
        "PYTHONPATH": str(folder),
        "TPKERNELS_REQUIRE_EXT": "1",
        "LD_PRELOAD": " ".join(map(library, sanitizer.preloaded)),
    }
    copy_sources(folder)
    require_planted(name, sanitizer, folder, running)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, env=building, check=True
    )
    return subprocess.run([sys.executable, *sanitizer.tests], cwd=folder, env=running).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
