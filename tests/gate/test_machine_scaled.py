"""Products of fp8 in roles, in the machine: what they compute, all orders of their events, what breaks them.

Two consumers share each buffer of operands. Pairs of blocks are compiled by Triton 3.9 alone; the machine
needs only the names that 3.7 has, too.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.gate.planted import edited, faults_of, named
from tests.gate.test_machine_gluon import CAUGHT_AS
from tests.kernels.test_scaled_linear import assert_scaled_linear, operands
from tpkernels.gate import machine, numerics
from tpkernels.gate.machine.events import Arrive, Init, Role, Trace
from tpkernels.gate.numerics import Frames, NumericCase, RandomOperands, examine
from tpkernels.gate.recording import BARE, primitive
from tpkernels.kernels import matmul_tile
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.matmul_tile import MatmulTile, compiles
from tpkernels.kernels.tiles import serves

TILES = {
    "one block": MatmulTile(128, 64, 64, num_warps=4, num_stages=3, parts=2, consumers=2, halves=True),
    "two turns": MatmulTile(128, 256, 64, num_warps=4, num_stages=2, parts=4, consumers=2, halves=True),
    "pair": MatmulTile(256, 64, 64, num_warps=4, num_stages=3, parts=2, consumers=2, halves=True, blocks=2),
}
SUMS = pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not compiles(TILES["one block"]), reason="tiles with consumers need Triton 3.7 or later"
)


@pytest.fixture(autouse=True)
def pairs_compile(monkeypatch):
    monkeypatch.setattr(matmul_tile, "triton_version", lambda: (3, 9))


def launched(kind, stages, steps, tiles, fast=False):
    """The launch of a product without epilogue: one program, of two processors if a pair, computes it all."""
    parts = 2 if kind == "two turns" else 1
    tile = replace(TILES[kind], num_stages=stages, parts=parts, group=1)
    of = RandomOperands(tiles * tile.block_rows, 64, 64 * steps, torch.bfloat16, form="descriptor", tile=tile)
    with machine.emulating(None, processors=tile.blocks) as launches:
        primitive(of, "scaled_linear", fast=fast, **BARE)
    (one,) = launches
    return one


def aligned(shape, **how):
    """Operands whose rows the copy engine can move."""
    x, w, bias = operands(shape, CPU, **how)
    for one in (x, w):
        words = one.words.shape[1]
        wide = torch.zeros(len(one.words), -(-words // 4) * 4, dtype=torch.int32)
        wide[:, :words] = one.words
        yield one.with_words(wide[:, :words])
    yield bias


@SUMS
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("shape", "schedule"),
    [*zip([(300, 208, 136), (64, 64, 64), (20, 336, 208)], machine.SCHEDULES, strict=False)],
    ids=["ragged", "one half", "few rows"],
)
def test_products_agree_with_float64(shape, schedule, tile, fast):
    x, w, bias = aligned(shape, formats=("e5m2", "e4m3") if shape[0] == 20 else ("e4m3", "e4m3"))
    with machine.emulating(machine.SCHEDULES[schedule], processors=3) as launches:
        assert_scaled_linear(x, w, bias, "relu", tile=TILES[tile], fast_accumulate=fast)
    (one,) = launches
    assert (one.constants["PROMOTE"], one.constants["P"].turns) == (
        not fast,
        0 if fast else 2 if tile == "two turns" else 1,
    )


@SUMS
@pytest.mark.parametrize("stages", [2, 3])
def test_no_order_of_events_is_a_fault(stages, fast):
    for steps in (1, 2, 3, 4):
        for tiles in (1, 2, 3):
            assert launched("one block", stages, steps, tiles, fast).explore() > 5


@pytest.mark.parametrize(("stages", "steps", "tiles"), [(2, 1, 3), (2, 3, 1), (3, 2, 2)])
def test_no_order_of_events_of_two_turns_is_a_fault(stages, steps, tiles):
    one = launched("two turns", stages, steps, tiles)
    assert one.constants["P"].turns == 2
    assert one.explore() > 5


@pytest.mark.parametrize(("stages", "steps", "tiles"), [(2, 1, 1), (2, 3, 1), (2, 1, 2), (3, 2, 1)])
def test_no_order_of_events_of_a_pair_is_a_fault(stages, steps, tiles):
    assert launched("pair", stages, steps, tiles).explore() > 100


@SUMS
def test_every_mutant_is_caught(fast):
    missed, seen = None, set()
    for stages, steps in ((2, 1), (2, 3), (3, 2)):
        (trace,) = launched("one block", stages, steps, 5, fast).traces()
        found = faults_of(trace, named(trace, missed))
        missed = {name for name, fault in found.items() if fault == "none"}
        seen |= {(name.partition(" (")[0], fault) for name, fault in found.items() if fault != "none"}
    assert missed == set()
    assert {(kind, fault) for kind, fault in seen if fault not in CAUGHT_AS[kind]} == set()


def mutants_of_sharing(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """What two consumers of a buffer owe each other, and what those of two blocks do."""
    roles = max(trace.segments, key=len)
    inits = [event for role in _roles(trace) for event in role.events if isinstance(event, Init)]
    released = {event.barrier for role in roles for event in role.events if isinstance(event, Arrive)}
    several = {event.barrier for event in inits if event.count > 1} & released

    def counting(less: int, count: int) -> Trace:
        return _edited(
            trace,
            lambda role, event: (
                replace(event, count=event.count - less)
                if isinstance(event, Init) and event.count == count and event.barrier in several
                else event
            ),
        )

    for count in sorted({event.count for event in inits if event.barrier in several}):
        yield f"one of {count} arrivals not counted", counting(1, count)
        yield f"one more than {count} arrivals counted", counting(-1, count)
    for consumer in ("consume 0", "consume 1"):
        yield (
            f"{consumer} releases nothing",
            _edited(
                trace,
                lambda role, event, consumer=consumer: (
                    None if consumer in role.name and _is(event, Arrive, several) else event
                ),
            ),
        )
        yield (
            f"{consumer} releases for both",
            _edited(
                trace,
                lambda role, event, consumer=consumer: (
                    event
                    if not _is(event, Arrive, several) or "consume" not in role.name
                    else replace(event, count=2)
                    if consumer in role.name
                    else None
                ),
            ),
        )


def _roles(trace: Trace) -> Iterator[Role]:
    return (role for segment in trace.segments for role in segment)


def _is(event, kind, barriers) -> bool:
    return isinstance(event, kind) and event.barrier in barriers


def _edited(trace: Trace, edit) -> Trace:
    def of(role: Role) -> Role:
        edited = (edit(role, event) for event in role.events)
        return Role(role.name, tuple(event for event in edited if event is not None))

    return replace(trace, segments=tuple(tuple(map(of, segment)) for segment in trace.segments))


@pytest.mark.parametrize(
    ("kind", "counts"), [("one block", 1), ("pair", 2)], ids=["one block", "pair: its own and both"]
)
def test_a_buffer_is_free_when_all_have_read_it(kind, counts):
    (trace,) = launched(kind, stages=2, steps=3, tiles=1).traces()
    found = faults_of(trace, mutants_of_sharing(trace))
    assert len(found) == 2 * counts + 4
    assert "none" not in found.values()
    assert {fault for name, fault in found.items() if "for both" in name} == {"Race"}


ORDER = {  # edits of the source which some order of events shows: what stands there, what does not belong
    "sums are added under the product": (
        "products = warpgroup_mma_wait(0, ",
        "products = warpgroup_mma_wait(1, ",
        machine.Misuse,
    ),
    "released before it is read": (
        "        mbarrier.wait(full.index(buffer), phase)\n",
        "        mbarrier.wait(full.index(buffer), phase)\n        release(empty, both, buffer, step < 0)\n"
        "        mbarrier.arrive(empty.index(buffer))\n",
        (machine.Race, machine.Misuse),
    ),
    "freed by one consumer": ("barriers(STAGES, 2)\n    both", "barriers(STAGES)\n    both", machine.Fault),
    "bytes of one half": ("2 * x.nbytes_per_cta", "x.nbytes_per_cta", machine.Fault),
}


@pytest.mark.parametrize("slip", ORDER)
def test_edit_of_the_source_is_caught(slip):
    from tpkernels.kernels.gluon import scaled

    old, new, fault = ORDER[slip]
    with edited(scaled, old, new), pytest.raises(fault):
        launched("one block", stages=2, steps=3, tiles=1).explore()


VALUES = {  # and those which only numbers show
    "scales of the other half": ("tokens = row + ", "tokens = row + (1 - 2 * HALF) * P.half_rows + "),
    "the other's rows of x": ("((lower, weights,", "((upper, weights,"),
    "the same rows for both": ("[row + P.half_rows, k]", "[row, k]"),
    "the other's rows of y": ("+ HALF * P.half_rows", "+ (1 - HALF) * P.half_rows"),
    "one turn's columns for both": ("FIRST + WIDTH)", "FIRST)"),
    "sums begin anew with each step": ("    acc += products\n", "    acc = products\n"),
    "a root left out": ("x_rest * (w_root * x_root)", "x_rest * w_root"),
}


@pytest.mark.parametrize("slip", VALUES)
def test_edit_of_what_is_computed_is_caught(slip):
    from tpkernels.kernels.gluon import scaled

    of = RandomOperands(200, 200, 272, torch.bfloat16, form="descriptor", tile=TILES["two turns"])
    call = partial(primitive, of, "scaled_linear", activation="relu")
    case = NumericCase(slip, partial(numerics._emulated, call, machine.EAGER, explores=False))
    with edited(scaled, *VALUES[slip]):
        assert "is off by" in examine(case, Frames()).failure
    if slip == "one turn's columns for both":
        assert examine(case, Frames()).failure == ""


def test_launch_says_what_it_cannot_serve():
    tile = TILES["one block"]
    x, w, bias = aligned((64, 128, 64))
    with pytest.raises(ValueError, match=rf"scaled_linear: tile {tile.name} expected a GPU of compute"):
        assert_scaled_linear(x, w, bias, tile=tile)
    with machine.emulating():
        for other, said in (
            (replace(tile, halves=False), "expected consumers that share a tile, for a product of fp8"),
            (replace(tile, num_stages=1), "expected at least 2 stages, and consumers of 4 warps"),
            (replace(tile, block_rows=64), "with at least 64 rows"),
            (replace(TILES["two turns"], parts=1), "expected at least 2 parts, for sums of as many turns"),
            (replace(tile, num_stages=20), "expected a tile of at most 232,448 bytes"),
        ):
            with pytest.raises(ValueError, match=said):
                assert_scaled_linear(x, w, bias, tile=other)
        with pytest.raises(ValueError, match="expected one scale a row, got blockwise scales"):
            assert_scaled_linear(*aligned((64, 256, 64), scaling="blocks"), tile=tile)
        with pytest.raises(ValueError, match=r"without consumers for a result in fp32"):
            assert_scaled_linear(x, w, bias, dtype="float32", tile=tile)
        with pytest.raises(ValueError, match=r"linear: tile .*-c2h expected a product of fp8"):
            linear_fwd(torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16(), tile=tile)


def test_tiles_serve_what_their_kernel_computes():
    tile = TILES["pair"]
    assert MatmulTile.named(tile.name) == tile
    assert tile.name == "256x64x64-w4-s3-p2-c2h-b2"
    assert serves("linear", tile, ("gelu_tanh", "bias", "z"))
    assert not serves("linear", tile, ("none", "blocks"))
    assert not serves("linear", tile, ("none", "float32"))
    with pytest.raises(ValueError, match="expected halves for two consumers"):
        replace(tile, consumers=1)
    with pytest.raises(ValueError, match="expected 1 block, or 2 that do one tile at a time"):
        replace(tile, halves=False)
