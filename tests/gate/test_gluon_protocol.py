"""Warp-specialised products in every order of events at small sizes, and with faults in their source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tpkernels.gate.recording import HAS_GLUON
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.tiles import MatmulTile

if not HAS_GLUON:
    pytest.skip("Gluon is of another form before Triton 3.7", allow_module_level=True)

from tpkernels.gate import machine
from tpkernels.kernels.gluon import epilogues, matmul, roles

consumers = pytest.mark.parametrize("consumers", [1, 2], ids=["one consumer", "two consumers"])


def matrix(rows, cols):
    return torch.randn(rows, cols).to(torch.bfloat16)


EPILOGUES = {
    "linear": lambda rows, depth, tile: linear_fwd(
        matrix(rows, depth), matrix(32, depth), matrix(1, 32)[0], activation="silu", keep_z=True, tile=tile
    ),
    "glu": lambda rows, depth, tile: glu_fwd(
        matrix(rows, depth), matrix(32, depth), matrix(32, depth), keep_gu=True, tile=tile
    ),
    "dgrad": lambda rows, depth, tile: dgrad(matrix(rows, depth), matrix(depth, 32), tile=tile),
    "dgrad_pairs": lambda rows, depth, tile: dgrad_pairs(
        matrix(rows, depth), matrix(depth, 32), matrix(rows, 16), matrix(16, 32), tile=tile
    ),
    "dgrad_act": lambda rows, depth, tile: dgrad_act(
        matrix(rows, depth), matrix(depth, 32), matrix(rows, 32), "relu", bias_grad=True, tile=tile
    ),
    "dglu": lambda rows, depth, tile: dglu(
        matrix(rows, depth), matrix(depth, 32), matrix(rows, 32), matrix(rows, 32), emit_h=True, tile=tile
    ),
}


def launched(epilogue: str, consumers: int, stages: int, steps: int, tiles: int) -> machine.Launched:
    """A launch of one program that computes so many tiles, each of so many steps of depth."""
    tile = MatmulTile(16, 32, 16, 8 // consumers, stages, parts=2, consumers=consumers)
    with machine.emulating(processors=1) as found:
        EPILOGUES[epilogue](16 * tiles, 16 * steps, tile)
    return found[0]


@consumers
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_no_order_of_events_goes_wrong(epilogue, consumers):
    states = 0
    for stages in (2, 3):
        for steps in (1, 2, 3, 4):
            for tiles in (1, 2, 3):
                states += launched(epilogue, consumers, stages, steps, tiles).explore()
    assert states > 500


@consumers
def test_every_edit_of_the_protocol_is_caught(consumers):
    """Arrivals, waits, copies, fences and counts that are missing or wrong: see `machine.mutants`."""
    (trace,) = launched("dglu", consumers, stages=2, steps=3, tiles=5).traces()
    expected, missed = machine.expectations(trace), []
    for mutant in machine.mutants(trace):
        try:
            machine.search(mutant.trace, expected)
            missed.append(mutant.name)
        except machine.Fault:
            pass
    assert missed == []


SLIPS = {
    "consumers multiply in no order": (roles, "    await_turn(turns, tile, FIRST, P)\n", ""),
    "consumers take inputs in no order": (matmul, "await_turn(takings, number, FIRST, P)", "pass"),
    "nobody gives the turn": (roles, "    give_turn(turns, FIRST, P)\n", ""),
    "a buffer is released while it is read": (
        roles,
        "mbarrier.arrive(empty.index(before), pred=step > 0)",
        "mbarrier.arrive(empty.index(buffer), pred=step > 0)",
    ),
    "two products in flight": (roles, "warpgroup_mma_wait(1", "warpgroup_mma_wait(2"),
    "the last buffer is not released": (roles, "    mbarrier.arrive(empty.index(last))\n", ""),
    "the loader does not wait for the turn before": (
        roles,
        "phase ^ 1)\n    if P.two",
        "phase)\n    if P.two",
    ),
    "bytes of one operand expected": (
        roles,
        "mbarrier.expect(landed, a.nbytes_per_cta + b.nbytes_per_cta)",
        "mbarrier.expect(landed, b.nbytes_per_cta)",
    ),
    "inputs are not released": (roles, "    mbarrier.arrive(empty.index(buffer))\n    return", "    return"),
    "stores are not awaited": (epilogues, "    tma.store_wait(P.staging - 1)\n", ""),
    "stores are awaited one too late": (epilogues, "P.staging - 1)", "P.staging)"),
    "no fence before a store": (epilogues, "    fence_async_shared()\n", ""),
    "the program ends before its stores": (matmul, "    tma.store_wait(0)\n", ""),
    "consumers count from the same tile": (matmul, "number = FIRST", "number = 0"),
}


def all_explored() -> None:
    for steps in (2, 3):
        for epilogue in ("dglu", "dgrad_act"):
            launched(epilogue, consumers=2, stages=2, steps=steps, tiles=5).explore()


@pytest.mark.parametrize(("module", "old", "new"), SLIPS.values(), ids=SLIPS.keys())
def test_slip_in_the_source_is_caught(module, old, new):
    with machine.edited(module, old, new), pytest.raises(machine.Fault):
        all_explored()


def test_staging_that_is_no_part_of_the_stores_of_a_tile_is_caught(monkeypatch):
    plan_of = matmul.plan_of
    monkeypatch.setattr(matmul, "plan_of", lambda *of, **more: replace(plan_of(*of, **more), staging=4))
    with pytest.raises(machine.Race, match="staging"):  # a tile has six stores
        launched("glu", 1, stages=2, steps=1, tiles=2)
