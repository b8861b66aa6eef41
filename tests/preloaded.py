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

MODULES = [
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "pytest",
    "tests.ranks",
]
PACKAGE = ["tpkernels.models.gpt", "tpkernels.interop.parallelize", "tpkernels.cli.train"]


@contextmanager
def _defaults() -> Iterator[None]:
    variables = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TPKERNELS_")}
    yield
    os.environ.update(variables)


with _defaults():
    # a GPU that the package has looked at could not be used by who is forked
    for module in MODULES if torch.backends.cuda.is_built() else MODULES + PACKAGE:
        import_module(module)
gc.collect()
gc.freeze()  # else each fork would look at all that, and copy it
