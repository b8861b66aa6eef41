"""Builds the C++ extension where torch is at hand; elsewhere its first use does, from sources in the wheel.

Everything else about the package stands in pyproject.toml.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCES = sorted(path for path in Path("csrc").iterdir() if path.is_file())
FLAGS = os.environ.get("TPKERNELS_CXXFLAGS", "").split()  # of compiler and linker, after our own
REQUIRED = os.environ.get("TPKERNELS_REQUIRE_EXT") == "1"
HOW_TO_GET_IT = (
    "tpkernels: the C++ extension is left out (%s). The first GradientBuckets builds it.\n"
    "tpkernels: to get it now, install torch, a C++20 compiler and ninja, then run\n"
    "tpkernels:     pip install --no-build-isolation <what you installed>"
)


class BuildWithSources(build_py):
    """Puts the C++ sources into the wheel; an editable install finds them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "tpkernels", "csrc")
            self.mkpath(str(folder))
            for source in SOURCES:
                shutil.copy(source, folder)


def leave_out(reason: object) -> None:
    if REQUIRED:
        sys.exit(f"tpkernels: TPKERNELS_REQUIRE_EXT=1, but the C++ extension cannot be built: {reason}")
    print(HOW_TO_GET_IT % reason, file=sys.stderr)


def extension() -> dict:
    """The arguments of `setup` that build the extension; without torch, none of them."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except Exception as error:  # a broken torch must not break an install without the extension
        leave_out(f"torch cannot be imported: {error}")
        return {"cmdclass": {"build_py": BuildWithSources}}

    class BuildOrLeaveOut(BuildExtension):
        """A failed build leaves the extension out, unless it is required."""

        def run(self) -> None:
            try:
                super().run()
            except (Exception, SystemExit) as error:  # distutils reports a missing compiler as either
                leave_out(f"{type(error).__name__}: {error}")

    module = CppExtension(
        "tpkernels._C",
        ["csrc/all.cpp"],
        depends=[str(source) for source in SOURCES],
        extra_compile_args=[*Path("csrc/cxx_flags").read_text().split(), *FLAGS],
        extra_link_args=FLAGS,
    )
    return {"ext_modules": [module], "cmdclass": {"build_py": BuildWithSources, "build_ext": BuildOrLeaveOut}}


setup(**extension())
