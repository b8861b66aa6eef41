"""Every kernel form that is shipped, as plain data: what to compile, for which GPUs, without having one.

An entry holds what Triton derives at launch: the type of each run-time argument, which of them are multiples
of 16 (addresses and sizes; without this the compiler silently drops pipelining), and the constants.
`ast_source` turns one into what `triton.compile` takes. Tests hold the names to those of the kernels.
"""

from __future__ import annotations

from tpkernels.gate.catalog_matmul import matmul_entries
from tpkernels.gate.catalog_rows import row_entries
from tpkernels.gate.catalog_vocabulary import vocabulary_entries
from tpkernels.gate.entry import Entry, ast_source

__all__ = ["Entry", "ast_source", "catalog"]


def catalog() -> tuple[Entry, ...]:
    """All entries, in a fixed order; names are unique."""
    return (*matmul_entries(), *row_entries(), *vocabulary_entries())
