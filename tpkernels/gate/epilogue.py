"""What PTX proves of the time between products: what is waited for, and what runs meanwhile. Pure text.

Only what the order of instructions proves: nothing here is a time.
"""

from __future__ import annotations

import re

from tpkernels.gate.ptx_flow import (
    BARRIER_OF_ALL,
    COMMIT,
    PRODUCT,
    PRODUCTS_COMMITTED,
    SHARED_STORE,
    STORE_WAIT,
    TENSOR_LOAD,
    TENSOR_STORE,
    WAIT,
    Flow,
    FlowState,
    Role,
)

_PRODUCTS_DONE = re.compile(r"\bwgmma\.wait_group\S*\s+0;")
_STORE = re.compile(rf"{TENSOR_STORE.pattern}|\bst\.global\b")


def multiplying(flow: Flow) -> list[Role]:
    """The roles that multiply."""
    return [role for role in flow.roles if role.any_of(PRODUCT)]


def exposed_waits(flow: Flow) -> int:
    """Waits for a copy that the same warps have started since their last product: nothing runs meanwhile."""
    return sum(len(_exposed(role)) for role in multiplying(flow))


def products_during_stores(flow: Flow) -> bool:
    """Whether a product can be in flight while results are stored: another role's, or one not waited for."""
    roles = multiplying(flow)
    return len(roles) > 1 or any(map(_stores_beside_products, roles))


def loads_during_stores(flow: Flow) -> bool:
    """Whether a role loads that neither multiplies nor stores: it loads the next tile while others store."""
    return bool(multiplying(flow)) and any(
        role.any_of(TENSOR_LOAD) and not role.any_of(PRODUCT) and not role.any_of(_STORE)
        for role in flow.roles
    )


def serial_stores(flow: Flow) -> int:
    """Tensor stores that must have been read before more can be staged, with no product in between."""
    return sum(len(_serial(role)) for role in multiplying(flow))


def role_registers(flow: Flow) -> tuple[int, ...]:
    """The registers a thread of each role, the default one first; (): one role, without `setmaxnreg`."""
    return tuple(count for role in flow.roles for count in _registers(role))


def _exposed(role: Role) -> set[int]:
    lines = role.flow.lines

    def step(at: int, state: FlowState) -> FlowState:
        if load := TENSOR_LOAD.search(lines[at]):
            return state | {("load", role.flow.value(load[1]))}
        if wait := WAIT.search(lines[at]):
            return state - {("load", role.flow.value(wait[1]))}
        return frozenset() if PRODUCT.search(lines[at]) else state

    before, counted = role.before_each(step), role.with_products
    return {
        at
        for at, state in before.items()
        if at in counted and (wait := WAIT.search(lines[at])) and ("load", role.flow.value(wait[1])) in state
    }


def _stores_beside_products(role: Role) -> bool:
    lines = role.flow.lines

    def step(at: int, state: FlowState) -> FlowState:
        if PRODUCTS_COMMITTED.search(lines[at]):
            return frozenset({("in flight", 0)})
        return frozenset() if _PRODUCTS_DONE.search(lines[at]) else state

    before = role.before_each(step)
    return any(before.get(at) for at in role.matching(_STORE))


def _serial(role: Role) -> set[int]:
    """The places of their commits."""
    lines, several = role.flow.lines, len(role.flow.roles) > 1

    def step(at: int, state: FlowState) -> FlowState:
        if COMMIT.search(lines[at]):
            return frozenset({("committed", at)})
        if PRODUCT.search(lines[at]) or (several and BARRIER_OF_ALL.search(lines[at])):
            return frozenset()
        if (wait := STORE_WAIT.search(lines[at])) and wait[1] == "0":
            return frozenset(("read", place) for _, place in state)
        return state

    before, counted = role.before_each(step, without=role.turns), role.with_products
    staging = role.matching(SHARED_STORE) & counted
    return {int(place) for at in staging for how, place in before.get(at, ()) if how == "read"}


def _registers(role: Role) -> set[int]:
    """What `setmaxnreg` has set when the role begins to work."""
    lines = role.flow.lines

    def step(at: int, state: FlowState) -> FlowState:
        found = re.match(r"setmaxnreg\.\S+\s+(\d+);", lines[at])
        return frozenset({("registers", int(found[1]))}) if found else state

    before = role.before_each(step)
    return {int(count) for at in role.matching(WAIT) for _, count in before.get(at, ())}
