"""Variations of tiles: which are tried, when the search ends, and that what it finds is found again."""

from dataclasses import replace

import pytest
import torch

from tests.dispatch.conftest import CPU, VERSIONS, need_interpreter
from tests.gate.samples import FACTS
from tpkernels.cli import variations
from tpkernels.cli.variations import CompiledTiles, Variations, fastest_of_each_kind, neighbours
from tpkernels.dispatch import products
from tpkernels.dispatch.cache import Cache
from tpkernels.dispatch.candidates import TARGET_GPUS, TORCH, TargetGpu, of_tile
from tpkernels.dispatch.chooser import Chooser
from tpkernels.dispatch.record import Layer
from tpkernels.dispatch.timing import Times
from tpkernels.gate import ahead_of_time
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import INTERPRETER

TILE = MatmulTile(128, 128, 64, num_warps=4, num_stages=3, parts=4)
ARGUMENTS = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48), "none", False
SHIPPED = "triton/pointer/32x32x32-w4-s1-p2-g2"


def test_neighbours_differ_in_one_number():
    assert [tile.name for tile in neighbours(TILE, "descriptor")] == [
        "128x128x64-w4-s3-p4-g4",
        "128x128x64-w4-s3-p4-g16",
        "128x128x64-w4-s2-p4",
        "128x128x64-w4-s4-p4",
        "128x128x64-w4-s3-p8",
        "128x128x64-w4-s3-p2",
        "128x128x64-w4-s3-p4-flat",
        "128x128x64-w4-s3-p4-x2",
    ]
    # without a persistent loop there is none to flatten, and nothing that is resident
    assert [tile.name for tile in neighbours(replace(TILE, num_stages=6, parts=8), "pointer")] == [
        "128x128x64-w4-s6-p8-g4",
        "128x128x64-w4-s6-p8-g16",
        "128x128x64-w4-s5-p8",
        "128x128x64-w4-s6-p4",
    ]
    for tile in neighbours(TILE, "descriptor"):
        assert MatmulTile.named(tile.name) == tile


def test_every_kind_that_is_near_is_varied():
    descriptor, slower = (of_tile("descriptor", tile) for tile in (TILE, replace(TILE, num_warps=8)))
    pointer = of_tile("pointer", TILE)
    every = [TORCH, descriptor, slower, pointer]

    def kinds(*milliseconds):
        return fastest_of_each_kind(every, dict(zip((one.name for one in every), milliseconds, strict=True)))

    assert kinds(3.0, 1.0, 1.2, 1.24) == [descriptor, pointer]
    assert kinds(3.0, 1.1, 1.0, 1.26) == [slower]
    assert kinds(0.7, 1.0, 1.2, 1.1) == [], "torch is far ahead"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def vary(tmp_path):
    """Search on made-up times, by parts of names; every step takes 50 seconds."""
    need_interpreter()
    asked = []

    def run(times, prune=lambda record, arguments, wanted: list(wanted), seconds=120.0):
        clock = Clock()

        def timer(runs):
            asked.append(list(runs))
            clock.now += 50
            found = {name: next(ms for part, ms in times.items() if part in name) for name in runs}
            return Times(found, found)

        chooser = Chooser(CPU, TargetGpu(VERSIONS.gpu, INTERPRETER), timer, Cache(tmp_path, VERSIONS), {})
        return Variations(chooser, prune, seconds, clock).timed(products.linear, ARGUMENTS), asked

    return run


TIMES = {"s2-p1-g2": 0.8, "p1-g2": 0.9, "s2": 1.0, "triton": 1.0, "torch": 3.0}


def test_steps_are_taken_while_they_gain(vary, tmp_path):
    decision, asked = vary(TIMES)
    winner = "triton/pointer/32x32x32-w4-s2-p1-g2"
    assert asked[0] == ["torch", SHIPPED]
    assert asked[1][0] == SHIPPED
    assert set(asked[1][1:]) == {
        f"triton/pointer/32x32x32-w4-{rest}"
        for rest in ("s1-p2-g4", "s1-p2", "s1-p2-g16", "s2-p2-g2", "s1-p1-g2")
    }
    assert asked[2][0] == "triton/pointer/32x32x32-w4-s1-p1-g2"
    assert winner in asked[2]
    assert SHIPPED not in asked[2], "nothing is timed twice"
    assert asked[3][0] == winner
    assert asked[-1] == ["torch", SHIPPED, winner], "in the end, side by side"
    assert (decision.candidate.name, decision.source) == (winner, "timed")

    chooser = Chooser(CPU, TargetGpu(VERSIONS.gpu, INTERPRETER), None, Cache(tmp_path, VERSIONS), {})
    known = chooser.known(products.linear, ARGUMENTS)
    assert (known.candidate.name, known.source) == (winner, "cached")
    y, _ = chooser.call(products.linear, *ARGUMENTS)
    torch.testing.assert_close(y, products.linear.by_torch(*ARGUMENTS)[0])


def test_a_search_ends_in_time(vary):
    decision, asked = vary(TIMES, seconds=50.0)
    assert len(asked) == 3, "what is shipped, one step, and the last comparison"
    assert decision.candidate.name == "triton/pointer/32x32x32-w4-s1-p1-g2"


def test_less_than_noise_is_no_gain_and_what_is_shipped_stays(vary):
    decision, asked = vary({"p1-g2": 0.995, "triton": 1.0, "torch": 3.0})
    assert decision.candidate.name == SHIPPED
    assert len(asked) == 2


def test_what_does_not_compile_well_is_not_timed(vary):
    def prune(record, arguments, wanted):
        return [one for one in wanted if "-p1-" not in one.name]

    decision, asked = vary(TIMES, prune)
    assert not any("-p1-" in name for names in asked for name in names)
    assert decision.candidate.name == SHIPPED


def test_a_search_that_fails_leaves_what_is_shipped(vary, caplog):
    def broken(*given):
        raise RuntimeError("no compiler")

    decision, _ = vary(TIMES, broken)
    assert decision.candidate.name == SHIPPED
    assert (
        "cannot vary the tiles of linear float32 16x48x32 none+bias rows,rows,rows: no compiler"
        in caplog.text
    )


def test_variations_are_compiled_as_they_would_be_launched(monkeypatch):
    """What breaks a rule of the check, or takes its neighbour's registers, is left out."""
    sharing = replace(TILE, per_processor=2)
    good, spilling, broken, large, serial = (
        of_tile("descriptor", tile)
        for tile in (
            TILE,
            replace(TILE, parts=2),
            replace(TILE, num_stages=2),
            sharing,
            replace(TILE, parts=8),
        )
    )
    mix = {"HGMMA": 8, "UTMALDG": 4, "UTMASTG": 2}
    facts = replace(FACTS, registers=255, shared=106_520, instructions=mix, narrow_offsets=())
    compiled = []

    def compile_all(jobs, processes, report):
        compiled.extend(job.entry for job in jobs)
        made = [facts, replace(facts, spills=4), "does not compile", replace(facts, registers=264)]
        made.append(replace(facts, in_flight=0))
        return [
            one if isinstance(one, str) else replace(one, aligned=job.entry.aligned)
            for one, job in zip(made, jobs, strict=True)
        ]

    monkeypatch.setattr(ahead_of_time, "compile_all", compile_all)
    record = products.dgrad_act
    arguments = record.sample(Layer(4096, 2048, 1024, activation="gelu"))
    kept = CompiledTiles(TARGET_GPUS["h100"])(record, arguments, [good, spilling, broken, large, serial])
    assert kept == [good]
    entry = compiled[0]
    assert (entry.module, entry.form, entry.num_warps, entry.num_stages) == (
        "tpkernels.kernels.dgrad",
        "descriptor",
        4,
        3,
    )
    assert (entry.constants["ACTIVATION"], entry.constants["PARTS"]) == ("gelu", 4)
    assert [one.constants["PARTS"] for one in compiled] == [4, 2, 4, 4, 8]

    def refusing(*arguments, tile, form):
        raise ValueError("dgrad: no such tile")

    assert CompiledTiles(TARGET_GPUS["h100"])(replace(record, by_kernel=refusing), arguments, [good]) == []
    monkeypatch.setattr(ahead_of_time, "ARCHITECTURES", ())
    assert CompiledTiles(TARGET_GPUS["h100"])(record, arguments, [broken]) == [broken], (
        "its rules are not known"
    )


def test_what_cannot_be_launched_is_not_compiled(monkeypatch):
    record = products.dgrad
    arguments = record.sample(Layer(8192, 4096, 4096))
    asked = []
    chooser = Chooser(CPU, TARGET_GPUS["h100"], lambda runs: Times({}, {}), Cache(None, VERSIONS), {})
    search = Variations(chooser, lambda record, arguments, wanted: asked.extend(wanted) or [])
    start = of_tile("descriptor", MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4, flatten=True))
    ends = variations.perf_counter() + 1e9
    assert search._descend(start, ends, record, record.problem(*arguments), arguments) == start
    names = [one.name.removeprefix("triton/descriptor/128x256x64-w8-") for one in asked]
    # neither 5 stages, which take 262,144 bytes, nor a second block beside this one
    assert names == ["s4-p4-flat-g4", "s4-p4-flat-g16", "s3-p4-flat", "s4-p8-flat", "s4-p2-flat", "s4-p4"]
