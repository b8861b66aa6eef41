"""Builds the C++ extension where torch is at hand, and the pure-Python package where it is not.

Everything else about the package stands in pyproject.toml.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

FLAGS = os.environ.get("TPKERNELS_CXXFLAGS", "").split()  # of compiler and linker, after our own
REQUIRED = os.environ.get("TPKERNELS_REQUIRE_EXT") == "1"
HOW_TO_GET_IT = (
    "tpkernels: the C++ extension is left out (%s). The package works without it, in pure Python.\n"
    "tpkernels: to get it, install torch and a C++20 compiler, then run\n"
    "tpkernels:     pip install --no-build-isolation <what you installed>"
)


def leave_out(reason: object) -> None:
    if REQUIRED:
        sys.exit(f"tpkernels: TPKERNELS_REQUIRE_EXT=1, but the C++ extension cannot be built: {reason}")
    print(HOW_TO_GET_IT % reason, file=sys.stderr)


def extension() -> dict:
    """The arguments of `setup` that build the extension; none without torch."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except Exception as error:  # a broken torch must not break a pure-Python install
        leave_out(f"torch cannot be imported: {error}")
        return {}

    class BuildOrLeaveOut(BuildExtension):
        """A failed build leaves the extension out, unless it is required."""

        def run(self) -> None:
            try:
                super().run()
            except (Exception, SystemExit) as error:  # distutils reports a missing compiler as either
                leave_out(f"{type(error).__name__}: {error}")

    module = CppExtension(
        "tpkernels._C",
        sorted(str(source) for source in Path("csrc").glob("*.cpp")),
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-DAT_PER_OPERATOR_HEADERS", *FLAGS],
        extra_link_args=FLAGS,
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildOrLeaveOut}}


setup(**extension())
