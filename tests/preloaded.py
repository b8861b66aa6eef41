"""What the servers have imported from which tests fork ranks and programs: these need not do it again.

The package reads its variables when it is imported: here by their defaults, whatever the test has set that
asks for the first process.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

MODULES = ["torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.checkpoint", "pytest"]
# With all that these import. `tests.imports` would take full names for what each test on ranks needs.
OF_PACKAGE = ["models.gpt", "interop.parallelize", "cli.train"]


@contextmanager
def default_variables() -> Iterator[None]:
    variables = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TPKERNELS_")}
    try:
        yield
    finally:
        os.environ.update(variables)


with default_variables():
    for name in MODULES:
        import_module(name)
    import_module("tests.ranks")
    if not torch.backends.cuda.is_built():  # a GPU that a server has looked at is of no use to its forks
        for name in OF_PACKAGE:
            import_module(f"tpkernels.{name}")
gc.collect()
gc.freeze()  # else each fork would look at all that, and copy it
