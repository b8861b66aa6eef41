"""Finds products that take all processors while a collective may be in flight.

A persistent product has a program for each processor that it counts on. If a collective holds some of these,
the remaining programs run in a second wave, and the product takes twice as long. If the product comes first,
the collective waits until it ends.
"""

from __future__ import annotations

import itertools

from tpkernels.streams.device import MachineError
from tpkernels.streams.program import Program, Task


def require_waves_beside(program: Program) -> None:
    """Raise if a product and a collective that may be in flight together need too many processors."""
    before = _all_before(program)
    products = [task for task in program.tasks if task.leaves is not None]
    collectives = [task for task in program.tasks if task.ends and task.ends[0].rows is not None]
    for product, collective in itertools.product(products, collectives):
        later = product.rank == collective.rank and product.number > collective.number
        ordered = before[product.number] >> collective.number & 1
        if later and not ordered and _too_wide(product, collective):
            raise MachineError(
                f"{product} leaves {product.leaves} processors while {collective} may be in flight, which "
                f"needs {collective.needs_at_once}: one of them waits for the other"
            )


def _too_wide(product: Task, collective: Task) -> bool:
    assert product.leaves is not None, "it is a product"
    return product.leaves < collective.needs_at_once


def _all_before(program: Program) -> list[int]:
    """Return for each task the tasks of its rank that have ended when it begins, as bits."""
    found: list[int] = []
    for task in program.tasks:
        bits = 0
        for number in task.after:
            bits |= found[number] | 1 << number
        found.append(bits)
    return found
