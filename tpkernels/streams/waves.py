"""Products that take all processors while a collective may be in flight: a second wave, or no overlap.

A persistent product has as many programs as it counts on processors. Where a collective holds some of these,
the programs that are left run when the others have ended, and the product takes twice as long. Where the
product comes first, the collective waits until it ends.
"""

from __future__ import annotations

import itertools

from tpkernels.streams.device import MachineError
from tpkernels.streams.program import Program, Task


def require_waves_beside(program: Program) -> None:
    """An error if a product is launched while a collective may be in flight, and they do not fit together."""
    before = _all_before(program)
    products = [task for task in program.tasks if task.leaves is not None]
    collectives = [task for task in program.tasks if task.ends and task.ends[0].rows is not None]
    for product, collective in itertools.product(products, collectives):
        later = product.rank == collective.rank and product.number > collective.number
        ordered = before[product.number] >> collective.number & 1
        if later and not ordered and _too_wide(product, collective):
            raise MachineError(
                f"{product} leaves {product.leaves} processors while {collective} may be in flight, which "
                f"needs {collective.needs_at_once}: one of the two waits for the other"
            )


def _too_wide(product: Task, collective: Task) -> bool:
    assert product.leaves is not None, "it is a product"
    return product.leaves < collective.needs_at_once


def _all_before(program: Program) -> list[int]:
    """Of each task those that have ended when it begins, on its rank, as bits."""
    found: list[int] = []
    for task in program.tasks:
        bits = 0
        for number in task.after:
            bits |= found[number] | 1 << number
        found.append(bits)
    return found
