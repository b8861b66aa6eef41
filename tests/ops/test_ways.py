"""Which way moves a shape between GPUs: all ranks decide alike, whatever each of them saw."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import block, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.test_transports import waited
from tests.ops.transport_cases import heard, open_stand_in, using
from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import handshake
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports import c10d, select
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.rows import Gather
from tpkernels.dispatch import autotune, primitives
from tpkernels.dispatch.cache import Cache, Choice, Versions
from tpkernels.kernels import dglu, linear, reduce, scatter_linear, tiles
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.recipe import Recipe
from tpkernels.kernels.waits import Arrivals
from tpkernels.ops import matmul
from tpkernels.ops.tensor_parallel import flag_waits, parallel, ways
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel import split_of
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear
from tpkernels.ops.tensor_parallel.ways import ROUNDS, Tell, Trial, Way, WayChooser, mismatch

KEY = "gathers of this test"
VERSIONS = Versions("no GPU", "torch", "triton", "kernels")
ONE, MANY, MEMORY = (way.name for way in (Way(1), Way(2), Way(0, in_memory=True)))
TIMES = {ONE: (10.0, 10.0), MANY: (5.0, 20.0), MEMORY: (8.0, 8.0)}  # milliseconds on each rank
ROWS, FEATURES = 16, 32
MEMORY_FIRST = {"1 collective": 3.0, "2 collectives": 2.0, "symmetric": 1.0}  # milliseconds


def tell(texts: Sequence[str]) -> list[list[str]]:
    return offers_of_all(KEY, handshake("op", "a test", dist.group.WORLD), "", "", texts)


class Table(Trial):
    """Ways whose runs take what a table says, and who counts them."""

    def __init__(self, times: Mapping[str, tuple[float, ...]], broken: Mapping[str, str]) -> None:
        """broken: how a way fails on the last rank"""
        self.times, self.broken = times, broken if dist.get_rank() == dist.get_world_size() - 1 else {}
        self.runs, self.is_open, self.quiet = dict.fromkeys(times, 0), False, True  # memory, and a GPU

    def open(self, way: Way) -> None:
        if self.broken.get(way.name) == "cannot open":
            raise MemoryError("planted")
        self.is_open |= way.in_memory

    def close(self) -> None:
        self.is_open = False

    def run(self, way: Way) -> list[Tensor]:
        assert self.is_open or not way.in_memory
        self.runs[way.name] += 1
        if self.broken.get(way.name) == "raises":
            raise RuntimeError("planted in a run")
        return [torch.full((3,), 2.0 if self.broken.get(way.name) == "wrong numbers" else 1.0)]

    def clock(self, name: str, run: Callable[[], object]) -> tuple[float, float]:
        run()
        return 0.0, self.times[name][dist.get_rank()]

    def choose(self, tell: Tell, cache: Cache, default: str = ONE, why_not: str = "", step: int = 1) -> Any:
        ways = {way.name: way for way in (Way(1), Way(2), Way(0, in_memory=True))}
        chooser = WayChooser(KEY, self, tell, self.clock, cache, {}, lambda: self.quiet)
        return chooser.choose(list(ways.values())[::step], ways[default], why_not)


Found = tuple[
    str, str, dict[str, int], bool, list[str]
]  # name, source, runs, whether memory is open, warnings


def chosen(folder: Path | None, options: Mapping[str, Any]) -> Found:
    """options: `broken` and `times` as of `Table`; `cached`, `why_not`, `default` and `quiet` of each rank"""
    rank, table = dist.get_rank(), Table(options.get("times", TIMES), options.get("broken", {}))
    cache = Cache(folder and folder / str(rank), VERSIONS)
    if cached := options.get("cached", ("", ""))[rank]:
        cache.put(KEY, Choice(cached, {}, company=options.get("company", "")))
    default, why_not = options.get("default", (ONE, ONE))[rank], options.get("why_not", ("", ""))[rank]
    table.quiet = options.get("quiet", (True, True))[rank]
    with heard("tpkernels.dispatch") as said:
        way, choice = table.choose(tell, cache, default, why_not, step=-1 if rank else 1)
    dist.barrier()
    return way.name, choice.source.partition(":")[0], table.runs, table.is_open, said


@on_ranks(1)
def test_a_way_that_fails_with_messages_under_way_is_an_error():
    """One that sends, and fails half-way on the only rank that runs it."""
    table = Table(TIMES, {MANY: "raises"})
    with pytest.raises(RuntimeError, match="planted in a run"):
        table.choose(lambda texts: [list(texts)], Cache(None, VERSIONS))


def times(of: Mapping[str, float]) -> Callable[[torch.device, Callable[[], None]], Any]:
    """A clock that says so, whatever the device; ranks meet before each run."""

    def clock(meet: Callable[[], None], name: str, run: Callable[[], object]) -> tuple[float, float]:
        meet()
        run()
        return of.get(name, 9.0), 0.0

    return lambda device, meet: partial(clock, meet)


@contextmanager
def as_on_gpus(of: Mapping[str, float], cache: Cache, opener: Any = open_stand_in) -> Iterator[list[str]]:
    """Ways are timed as between GPUs, on memory of the CPU and gloo; says what is logged."""
    with (
        using("auto", "triton"),
        patch.object(parallel, "times_on", lambda like: True),
        patch.object(TensorParallel, "fits_in_message", lambda self, shard: False),  # backward gathers, too
        patch.object(ways, "clock_on", times(of)),
        patch.object(ways, "cache_on", lambda device: cache),
        patch.object(c10d, "processors_of", lambda device: 1),
        patch.object(ways, "ROUNDS", 1),
        patch.object(ways, "_announce"),
        patch.dict(select.openers, {"symmetric": opener}),
        heard("tpkernels.choices") as said,
    ):
        yield said


def gather(x: Tensor, group: dist.ProcessGroup, features: int = FEATURES, op: str = "op") -> Tensor:
    """Gather rows that a product of so many features would take."""
    weights = [torch.ones(features, x.shape[1])]
    product = partial(matmul.PLAIN.product, weights=weights, biases=[None], dtype=x.dtype)
    return split_of(op, group, True).gather(op, "x", x, features, work=("linear", weights, product)).all()


def assert_gathered(rows: int, group: dist.ProcessGroup, op: str = "op") -> None:
    """A gather of so many rows of each of two ranks brings ones, then twos."""
    gathered = gather(torch.full((rows, 16), 1.0 + dist.get_rank()), group, op=op)
    assert gathered.equal(torch.arange(1.0, 3.0).repeat_interleave(rows)[:, None].expand(2 * rows, 16))


def taken_by(group: dist.ProcessGroup) -> list[str]:
    return [type(exchange).__name__ for exchange in select._of_group[id(group)].chosen.values()]


def furthest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


def no_symmetric_memory(opening: Opening) -> Any:
    """On one rank."""
    problem = "torch has none" * (dist.get_rank() == 1)
    offers_of_all(opening.name, opening.begin(), problem)
    raise AssertionError("all have been told")


@on_ranks(2)
def test_a_choice_against_memory_leaves_open_what_another_choice_took():
    """With the group's time-out, and not that of trials."""
    prepare(Setting())
    group, cache = dist.new_group(timeout=timedelta(seconds=40)), Cache(None, VERSIONS)
    for one_collective, op in ((2.0, "one"), (1.0, "another"), (2.0, "one")):
        times_of = {"symmetric": 1.5, "1 collective": one_collective, "2 collectives": 3.0}
        with as_on_gpus(times_of, cache), patch.object(ways, "TRIAL_SECONDS", 30.0):
            assert_gathered(8, group, op)
        assert {exchange.timeout for exchange in select._of_group[id(group)]._open.values()} == {40.0}
    assert taken_by(group) == ["Mailboxes", "Collectives"]


@on_ranks(2)
def test_a_group_times_so_many_shapes_and_remembers_no_more():
    prepare(Setting())
    group = dist.new_group()
    times_of = MEMORY_FIRST | {"symmetric": 9.0}
    with as_on_gpus(times_of, Cache(None, VERSIONS)), patch.object(ways, "MOST_TIMED", 2):
        for rows in (*range(8, 12), 8):
            assert_gathered(rows, group)
    assert [moved.rows for moved in select._of_group[id(group)].chosen] == [16, 18]


@on_ranks(2)
def test_products_of_other_widths_decide_nothing_for_one_rank_alone():
    """Rows are right where a rank's products have other widths, at times those of the call before."""
    prepare(Setting())
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.full((8, 16), float(rank))
    with as_on_gpus(MEMORY_FIRST | {"symmetric": 9.0}, Cache(None, VERSIONS)):
        for features in (32, 32 - rank, 32, 0 if rank else 32):
            assert float(gather(x, group, features)[-1, 0]) == 1.0


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="clocks and memory are stand-ins")
RUNS = ROUNDS + 1  # and a trial
DROPPED = f"{MEMORY} dropped for {KEY}: rank 1: "
OFF = "its result is off by 1.7e+00 of 1.7e+00"
BROKEN = {"broken": {MEMORY: "cannot open"}}
TWO_BROKEN = {"broken": {MEMORY: "cannot open", MANY: "wrong numbers"}}
CHOSEN: dict[str, tuple[dict[str, Any], str, int, list[str]]] = {
    # options; way and source; runs of ONE and of MANY; the beginnings of what one rank says
    "the slowest rank decides": ({}, MEMORY + " timed", RUNS, []),  # MANY takes 5 ms here, 20 there
    "cannot open": (BROKEN, ONE + " timed", RUNS, [DROPPED + "MemoryError: planted"]),
    "raises": (
        {"broken": {MEMORY: "raises"}},
        ONE + " timed",
        RUNS,
        [DROPPED + "RuntimeError: planted in a"],
    ),
    "wrong numbers": ({"broken": {MEMORY: "wrong numbers"}}, ONE + " timed", RUNS, [DROPPED + OFF]),
    "no other way works": (TWO_BROKEN, ONE + " only one", 1, ["", ""]),
    "no memory for scratch": ({"broken": {ONE: "cannot open"}}, ONE + " not timed", 0, [ONE + " dropped"]),
    "one may not time": ({"why_not": ("", "TPKERNELS_TUNE=0")}, ONE + " not timed", 0, []),
    "other defaults": ({"default": (MANY, ONE), "why_not": ("no", "")}, MANY + " not timed", 0, []),
    "one cache": ({"cached": (MANY, MANY)}, MANY + " cached", 0, []),
    "a cache made in company": ({"cached": (MANY, MANY), "company": "work"}, MEMORY + " timed", RUNS, []),
    "five in a hundred are too few": ({"times": TIMES | {MEMORY: (9.6, 9.6)}}, ONE + " timed", RUNS, []),
    "other caches": ({"cached": (MANY, ONE)}, MEMORY + " timed", RUNS, []),
    "one rank has no cache": ({"cached": (MANY, "")}, MEMORY + " timed", RUNS, []),
    "a cached way is gone": ({"cached": ("pigeons", "pigeons")}, MEMORY + " timed", RUNS, []),
    "a cached way no longer opens": ({**BROKEN, "cached": (MEMORY,) * 2}, ONE + " not timed", 0, [""]),
}


@pytest.mark.parametrize(("options", "verdict", "runs", "told"), CHOSEN.values(), ids=CHOSEN)
def test_all_ranks_choose_alike(ranks2, tmp_path, options, verdict, runs, told):
    found = ranks2.run(chosen, tmp_path, options)
    said = [line for *_, lines in found for line in lines]
    assert len(said) == len(told)
    assert all(line.startswith(words) for line, words in zip(said, told, strict=True)), said
    for name, source, counts, is_open, _ in found:
        assert f"{name} {source}" == verdict
        assert counts[ONE] == counts[MANY] == runs
        assert counts[MEMORY] == RUNS if name == MEMORY or "times" in options else counts[MEMORY] <= 1
        assert is_open == (name == MEMORY)
    assert bool(list(tmp_path.rglob("*.json"))) == (
        (source == "timed" and "broken" not in options) or "cached" in options
    )


@on_ranks(2)
def test_what_is_chosen_after_a_way_has_failed_stays_out_of_the_file():
    """Of all shapes of the group: the next process may find the way well."""
    prepare(Setting())
    group, kept = dist.new_group(), Cache(None, VERSIONS)
    with as_on_gpus(MEMORY_FIRST, kept, no_symmetric_memory):
        for rows in (8, 16):
            assert_gathered(rows, group)
    assert not kept.choices
    with as_on_gpus(MEMORY_FIRST, kept):
        assert_gathered(8, dist.new_group())
    assert [choice.name for choice in kept.choices.values()] == ["symmetric"]


def test_company_of_one_rank_marks_the_choice_of_all(ranks2, tmp_path):
    ranks2.run(chosen, tmp_path, {"quiet": (True, False)})
    kept = [Cache(tmp_path / rank, VERSIONS).get(KEY) for rank in "01"]
    assert [choice and choice.company for choice in kept] == [
        "work that did not end within 2 s on rank 1"
    ] * 2
    for name, source, *_ in ranks2.run(chosen, tmp_path, {}):
        assert (name, source) == (MEMORY, "timed"), "again"


def test_a_choice_is_kept_for_the_next_process(ranks2, tmp_path):
    ranks2.run(chosen, tmp_path, {})
    for name, source, counts, _, _ in ranks2.run(chosen, tmp_path, {}):
        assert (name, source, set(counts.values())) == (MEMORY, "cached", {0})


HIDING = {  # what a block moves: features of the product that is computed chunk by chunk; 0: none is
    "column_linear gathers": 16,
    "row_linear reduces": 24,
    "row_linear backward gathers": 16,
    "column_linear backward gathers": 0,
    "column_linear backward reduces": 0,
}


@pytest.mark.parametrize(
    ("how", "symmetric", "told", "of_second_run", "opened"),
    [  # lines of the second run, and exchanges that are open, of which all shapes share one
        ("", 1.0, ": symmetric (timed: symmetric 1 ms, ", 0, 2),
        ("", 5.0, ": 2 collectives (timed: ", 0, 0),
        ("no symmetric memory", 1.0, ": 2 collectives (timed: ", 0, 0),
        ("capture", 1.0, "(not timed now: a CUDA graph is being captured)", 5, 0),
        ("TUNE=0", 1.0, "(not timed: rank 0: TPKERNELS_TUNE=0)", 0, 0),
    ],
)
@on_ranks(2)
def test_ops_take_what_was_fastest_and_time_it_once(how, symmetric, told, of_second_run, opened):
    """Collectives where there is no memory, and what arithmetic chooses where nothing may be timed."""
    prepare(Setting())
    operands = operands_of(0)

    def run() -> list[Tensor]:
        return with_gradients(block, operands, sequence_parallel=True, group=group)

    with using("c10d"):
        group = dist.new_group()
        expected = run()
    group = dist.new_group()
    no_memory = how == "no symmetric memory"
    opener = Mock(wraps=no_symmetric_memory if no_memory else open_stand_in)
    times_of = MEMORY_FIRST | {"symmetric": symmetric}
    obstacles = {
        "capture": patch.object(autotune, "capturing", lambda device: True),
        "TUNE=0": patch.dict(os.environ, {"TPKERNELS_TUNE": "0"}),
    }
    with as_on_gpus(times_of, Cache(None, VERSIONS), opener) as said, obstacles.get(how, nullcontext()):
        found = run()
        first = list(said)
        run()
    assert furthest(found, expected) < 1e-6
    by_collectives = "2 collectives" in told  # of some shapes one is as fast
    assert (any if by_collectives else all)(told in line for line in first), first
    expected_keys = [f"{moved} float32 16x24x{features}" for moved, features in HIDING.items()]
    assert [line.partition(" 2 ranks")[0] for line in first] == expected_keys
    assert len(said) - len(first) == of_second_run
    assert len(select._of_group[id(group)]._open) == opened
    assert not no_memory or opener.call_count == 1, "a machine that has none is asked for each shape"


@pytest.mark.parametrize("symmetric", [1.0, 5.0])
@on_ranks(2)
def test_rows_in_fp8_are_timed_with_the_product_that_takes_them(symmetric):
    """By the recipe: rows of 24 features in 7 words, whose scratch are numbers in fp8 and no other words."""
    prepare(Setting())
    operands, recipe, group = operands_of(0), Recipe.rowwise(), dist.new_group()

    run = partial(with_gradients, block, operands, sequence_parallel=True, quantize=recipe)
    with using("c10d"):
        expected = run(group=dist.new_group())
    times_of = MEMORY_FIRST | {"symmetric": symmetric}
    comparing = patch.object(ways, "mismatch", wraps=mismatch)
    with as_on_gpus(times_of, Cache(None, VERSIONS)) as said, comparing as compared:
        found = run(group=group)
    assert furthest(found, expected) < 1e-6
    of_words = [line for line in said if "e4m3, rowwise as int32 " in line]
    assert [line.partition(" 2 ranks")[0] for line in of_words[:2]] == [
        "column_linear gathers e4m3, rowwise as int32 16x7x16",
        "row_linear backward gathers e4m3, rowwise as int32 16x7x16",
    ]
    chosen = "symmetric" if symmetric == 1.0 else "2 collectives"
    assert all(f": {chosen} (timed: " in line for line in of_words[:2]), of_words
    assert all(call.args[1][0].std() > 0.1 for call in compared.call_args_list[:2])


@on_ranks(2)
def test_a_trial_computes_what_its_call_computes():
    """Also backward, whose products are of the columns of a weight."""
    prepare(Setting())
    group, options = dist.new_group(), {"sequence_parallel": True}
    x, weight = torch.randn(ROWS, 8, requires_grad=True), torch.randn(FEATURES, 8)
    up, gate, down = (torch.randn(*shape) for shape in ((24, 8), (24, 8), (FEATURES, 24)))
    with (
        as_on_gpus(MEMORY_FIRST, Cache(None, VERSIONS)) as said,
        patch.object(ways, "mismatch", wraps=mismatch) as compared,
        patch.object(dglu, "dglu", wraps=dglu.dglu) as launched,
    ):
        y = row_linear(x, weight, None, group, **options)
        (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
        *_, (trial, _) = (call.args for call in compared.call_args_list)  # of the gather, the last
        y = parallel_mlp(x, up, None, down, None, group, w_gate_shard=gate, **options)
        torch.autograd.grad(y, x, torch.randn_like(y))
    assert said[1].startswith("row_linear backward gathers")
    assert furthest(trial, [dx]) < 1e-6
    assert waited(launched) == 4, "rehearsed, tried, timed, and called"


@on_ranks(2)
def test_kernels_are_compiled_before_the_time_of_a_trial_begins_to_run():
    """The first launch of each waits as long as the group does, and is of rows that are there."""
    prepare(Setting())
    group, limits = dist.new_group(), dict[str, list[float]]()

    def noting(
        kernel: Callable[..., Any], *args: Any, arrivals: Arrivals | None = None, **options: Any
    ) -> Any:
        if arrivals is None:  # sums of what c10d has brought
            return kernel(*args, **options)
        if not limits.setdefault(kernel.__name__, []):
            assert arrivals.flags.eq(arrivals.awaited).all()
        limits[kernel.__name__].append(arrivals.seconds)
        return kernel(*args, arrivals=arrivals, **options)

    with (
        as_on_gpus(MEMORY_FIRST, Cache(None, VERSIONS)),
        patch.object(ways, "TRIAL_SECONDS", 20.0),
        patch.object(linear, "linear_fwd", partial(noting, linear.linear_fwd)),
        patch.object(reduce, "reduce_slots", partial(noting, reduce.reduce_slots)),
    ):
        with_gradients(block, operands_of(0), sequence_parallel=True, group=group)
    assert not select._of_group[id(group)].dropped
    assert len(limits) == 2
    assert all(first > then for first, then, *_ in limits.values()), limits
    assert set(taken_by(group)) == {"Mailboxes"}


IN_ROUNDS = {"1 collective": 5.0, "2 collectives": 6.0, "symmetric": 4.0, "symmetric in 2 rounds": 1.0}


def layers() -> tuple[Callable[[dist.ProcessGroup], None], Tensor]:
    """A column and a row of one weight over a group, whose numbers must be those of c10d; the column's x."""
    prepare(Setting())
    x, weight = torch.randn(ROWS // 2, 8), torch.randn(FEATURES, 8)

    def results(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        y = column_linear(x, weight, None, group, sequence_parallel=True)
        return y, row_linear(y, weight.t().contiguous(), None, group, sequence_parallel=True)

    with using("c10d"):
        expected = results(dist.group.WORLD)

    def assert_right(group: dist.ProcessGroup) -> None:
        for ours, theirs, atol in zip(results(group), expected, (1e-5, 1e-4), strict=True):
            assert torch.allclose(ours, theirs, atol=atol)

    return assert_right, x


@on_ranks(2)
def test_rounds_through_memory_are_products_of_their_own():
    """A gather's and a reduce's: no kernel of ours waits for rows, or stores them, once the way is chosen."""
    (assert_right, _), group = layers(), dist.new_group()
    multiplied: list[int] = []

    def into(primitive: Any, out: Sequence[Tensor], *arguments: Any) -> None:
        multiplied.append(arguments[0].shape[0])
        really(primitive, out, *arguments)

    really = primitives.into
    fused = {"side_effect": AssertionError("ours waits or stores")}
    with as_on_gpus(IN_ROUNDS, Cache(None, VERSIONS)):
        assert_right(group)
        with (
            patch.object(matmul, "how_to_wait", **fused),
            patch.object(scatter_linear, "scatter_linear", **fused),
            patch.object(primitives, "into", into),
        ):
            for _ in range(3):
                assert_right(group)
    assert multiplied == 3 * [ROWS // 2, ROWS // 2], "a product for each round of a gather"
    exchanges = select._of_group[id(group)]
    assert [(type(one).__name__, one.rounds) for one in exchanges.chosen.values()] == [("Mailboxes", 2)] * 2
    assert all(exchange.timeout > ways.TRIAL_SECONDS for exchange in exchanges._open.values())


@pytest.mark.parametrize(("broken", "chosen"), [("symmetric", "in 1 round"), ("in 2 rounds", "symmetric")])
@on_ranks(2)
def test_a_way_that_fails_leaves_no_half_of_a_call_to_those_that_share_its_memory(broken, chosen):
    """They open memory anew, on all ranks, also those that were tried before."""
    prepare(Setting())
    group, opener, launches = dist.new_group(), Mock(wraps=open_stand_in), list[int]()
    owner, name, of_rehearsal = {
        "symmetric": (matmul, "how_to_wait", 1),
        "in 2 rounds": (flag_waits, "_arrivals", 1),
    }[broken]

    def failing(*args: Any, **options: Any) -> Any:
        in_half = broken == "symmetric" or len(args[0].plan.rounds) == 2
        launches.extend([1] * in_half)
        if dist.get_rank() and in_half and len(launches) == of_rehearsal + 1:
            raise RuntimeError("planted in a run")
        return really(*args, **options)

    really = getattr(owner, name)
    times_of = {**IN_ROUNDS, "symmetric": 0.5, "symmetric in 1 round": 0.75}
    with (
        as_on_gpus(times_of, Cache(None, VERSIONS), opener) as said,
        patch.object(owner, name, failing),
        patch.object(ways, "TRIAL_SECONDS", 15.0),
    ):
        for _ in range(3):
            assert_gathered(8, group)
    dropped = select._of_group[id(group)].dropped
    assert [name.removeprefix("symmetric ") for name in dropped] == [broken]
    assert chosen in said[0].partition(" (timed")[0]
    assert opener.call_count == 2


TILES = tiles._INTERPRETED, MatmulTile(16, 32, 16, num_warps=4, num_stages=1, group=1)


@on_ranks(2)
def test_kernels_that_wait_or_store_take_the_tile_that_was_fastest():
    """On all ranks, in the calls that follow and in the next process; not for operands of another form."""
    (assert_right, x), kept, taken = layers(), Cache(None, VERSIONS), list[str]()

    def noting(kernel: Callable[..., Any], *args: Any, tile: MatmulTile | None = None, **options: Any) -> Any:
        taken.append(tile.name if tile else "untold")
        return kernel(*args, tile=tile, **options)

    # untold they take the others: the first for rows that arrive, the lower for chunks of eight rows
    waits, stores = "symmetric 16x32x16-w4-s1-p1-g1", "symmetric 32x32x32-w4-s1-p2-g2"
    times_of = {**IN_ROUNDS, waits: 0.5, stores: 0.5}
    with (
        as_on_gpus(times_of, kept) as said,
        patch.object(tiles, "default_tiles", lambda *_: TILES),
        patch.object(linear, "linear_fwd", partial(noting, linear.linear_fwd)),
        patch.object(scatter_linear, "scatter_linear", partial(noting, scatter_linear.scatter_linear)),
    ):
        for how in ("timed", "cached"):
            group = dist.new_group()
            for _ in range(3):
                taken.clear()
                assert_right(group)
            assert [f"symmetric {name}" for name in taken] == [waits, stores], (how, said)
            assert f": {waits} ({how}" in said[0]
            said.clear()
        unaligned = torch.randn(FEATURES * 8 + 1)[1:].view(FEATURES, 8)
        column_linear(x, unaligned, None, group, sequence_parallel=True)
        assert taken[-1] == "untold"
    assert {choice.name for choice in kept.choices.values()} == {waits, stores}


@on_ranks(2)
def test_ranks_meet_before_each_run_that_is_timed():
    """A rank that comes late is waited for before the run, and not in it."""
    prepare(Setting())
    group, rank, waited_for = dist.new_group(), dist.get_rank(), list[float]()

    def clock(meet: Callable[[], None], name: str, run: Callable[[], object]) -> tuple[float, float]:
        time.sleep(0.2 * rank)
        meet()
        began = time.perf_counter()
        run()
        waited_for.append(time.perf_counter() - began)
        return MEMORY_FIRST.get(name, 9.0), 0.0

    with (
        as_on_gpus(MEMORY_FIRST, Cache(None, VERSIONS)),
        patch.object(ways, "clock_on", lambda device, meet: partial(clock, meet)),
    ):
        assert_gathered(8, group)
    assert len(waited_for) == 5
    assert sorted(waited_for)[2] < 0.15


@on_ranks(2)
def test_log_says_among_how_many_ways_ranks_choose():
    prepare(Setting())
    announce = ways._announce
    with as_on_gpus(MEMORY_FIRST, Cache(None, VERSIONS)) as said, patch.object(ways, "_announce", announce):
        assert_gathered(8, dist.new_group())
    assert [line.partition(": ")[2] for line in said[:1]] == ["choosing among 5 ways, 20 s each at most"]


@on_ranks(2)
def test_ways_open_memory_once_where_there_is_none():
    prepare(Setting())
    group, opener = dist.new_group(), Mock(wraps=no_symmetric_memory)
    with as_on_gpus(IN_ROUNDS, Cache(None, VERSIONS), opener), heard("tpkernels.dispatch"):
        for rows in (8, 16):
            assert_gathered(rows, group)
    assert opener.call_count == 1
    names = {"symmetric", "symmetric in 1 round", "symmetric in 2 rounds"}
    assert select._of_group[id(group)].dropped.keys() == names


@on_ranks(2)
def test_a_rank_without_memory_for_a_trial_says_so_before_others_wait():
    """And what another shape may do is left open."""
    prepare(Setting())
    group, rank, alone = dist.new_group(), dist.get_rank(), list[bool]()
    really = matmul.Plain.product

    def product(self: matmul.Plain, rows: Gather, *args: Any, **options: Any) -> list[Tensor]:
        alone.append(rows._end is None)
        if rank and rows.full.shape[0] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(self, rows, *args, **options)

    with (
        as_on_gpus(MEMORY_FIRST, Cache(None, VERSIONS)) as said,
        patch.object(matmul.Plain, "product", product),
    ):
        for rows in (8, 16):
            assert_gathered(rows, group)
    assert alone[:3] == [True, True, False], "products of 16 rows, and of 32, before one that waits for rows"
    assert not rank or "not timed: rank 1: OutOfMemoryError: CUDA out of memory" in said[0]
    assert taken_by(group) == ["Collectives", "Mailboxes"]
