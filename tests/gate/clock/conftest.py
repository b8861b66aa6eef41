from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.compiled import Compiler, assembly_of
from tests.gate.clock.compiled import Kernel
from tpkernels.gate.catalog import recipes


@pytest.fixture(scope="session")
def kernel(compiler: Compiler) -> Callable[[str], Kernel]:
    """A compiled entry of the catalog, by its name."""

    @cache
    def of(name: str) -> Kernel:
        entry = recipes()[name].entry()
        return Kernel.of(compiler.run(assembly_of, entry), entry.arguments)

    return of
