"""What ways enqueue, and that it is what the operators enqueue."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.products import once
from tpkernels.comm import schedule
from tpkernels.gpus import gpu_named
from tpkernels.planning.timeline import symmetric, ways
from tpkernels.planning.timeline.node import GRAPH, Node
from tpkernels.planning.timeline.operators import OPERATORS, Sizes
from tpkernels.planning.timeline.prediction import CALLS, WAYS, predict, record
from tpkernels.planning.timeline.recording import COMPUTE, HOST, LAUNCH, TRANSFER

NODE = Node.of(gpu_named("h100"))
SIZES = Sizes(8192, 4096, 14336, 8)
LAUNCHES = Path(__file__).parents[3] / "docs" / "launches.md"
CASES = {f"{op}_{way}": (op, way) for op in OPERATORS for way in ("forward", "backward")}


def counted_in_docs():
    """Of docs/launches.md, which counts the operators themselves."""
    pattern = (
        r"\| (column|row) (forward|backward) \| (\d+) \| (\d) \| (\d+) \| [^|]* \| ([^|]*) \| ([^|]*) \|"
    )
    for kind, direction, tokens, ranks, width, *cells in re.findall(pattern, LAUNCHES.read_text()):
        for way, cell in zip(("c10d", "symmetric"), cells, strict=True):
            collectives, kernels, copies, _ = map(int, cell.split(","))
            yield kind, direction, int(tokens), int(ranks), int(width), way, (collectives, kernels, copies)


def test_a_model_enqueues_what_the_operators_do():
    rows = list(counted_in_docs())
    assert len(rows) == 2 * 4 * 3 * 3 * 2
    host, found = NODE.host, []
    for kind, direction, tokens, ranks, width, way, _ in rows:
        wide = {4096: 14336, 8192: 28672}[width]
        sizes = Sizes(tokens, width, wide, ranks) if kind == "column" else Sizes(tokens, wide, width, ranks)
        tasks = record(f"{kind}_linear", direction, way, sizes, NODE)
        ours = [task for task in tasks if task.key[:2] == (ranks // 2, CALLS - 1)]
        cost = Counter(round(1e6 * task.seconds) for task in ours if task.queue[1] == HOST)
        counts = cost[host.collective], cost[host.kernel], cost[host.copy]
        found.append((kind, direction, tokens, ranks, width, way, counts))
    assert found == rows


@once(case=CASES, way=[*reversed(WAYS)], sequence_parallel=[True, False])
def test_a_rank_alone_moves_nothing(case, way, sequence_parallel):
    found = predict(*case, way, Sizes(512, 1024, 4096, 1, sequence_parallel), NODE)
    assert found.transfers == 0
    assert found.seconds >= 0.999 * found.products > 0


def transfers(way, operator="row_linear", direction="forward", sizes=SIZES):
    found = predict(operator, direction, way, sizes, NODE)
    return [ran for ran in found.ran if ran.task.kind == TRANSFER and ran.task.queue[0] == 0]


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_rounds_are_those_of_the_schedule(rounds):
    with patch.object(ways, "collective_rounds", lambda _, features, *__: rounds if features else 1):
        assert len(transfers("c10d")) == rounds
        for way in ("c10d", "decomposed"):  # x and dx, which other products hide
            assert len(transfers(way, "column_linear", "backward")) == 2
    sizes = Sizes(8192, 14336, 4096, 8)
    assert len(transfers("c10d", sizes=sizes)) == schedule.collective_rounds(8192, 4096, 8, 132)


def test_chunks_and_what_hides_what_are_those_of_the_schedule():
    usual = len(transfers("symmetric", "column_linear"))
    with patch.object(symmetric, "pushed_chunks", lambda *_: 2):
        assert len(transfers("symmetric", "column_linear")) == 2 * usual
    backward = predict("column_linear", "backward", "c10d", SIZES, NODE)
    assert list(backward.hidden) == ["x", "dx"]
    assert max(backward.hidden["x"], key=backward.hidden["x"].get) == "dgrad"
    assert max(backward.hidden["dx"], key=backward.hidden["dx"].get) == "wgrad"
    naive = predict("column_linear", "backward", "naive", SIZES, NODE)
    assert naive.hidden == {"x": {}, "dx": {}}
    assert naive.seconds == pytest.approx(naive.products + naive.transfers, rel=0.02)


def test_the_order_of_a_gather_is_that_of_the_schedule():
    """Planted: all ranks push to the nearest last, so that what is multiplied first arrives last."""
    usual = predict("column_linear", "forward", "symmetric", SIZES, replace(NODE, host=GRAPH))
    plan = schedule.pushing_gather_plan

    def backwards(*sizes):
        planned = plan(*sizes)
        own, *others = planned.rounds
        return replace(planned, rounds=(replace(own, swaps=own.swaps[::-1]), *others))

    with patch.object(symmetric, "pushing_gather_plan", backwards):
        planted = predict("column_linear", "forward", "symmetric", SIZES, replace(NODE, host=GRAPH))
    assert planted.seconds > 1.2 * usual.seconds


def test_products_beside_a_collective_leave_it_processors_and_take_whole_waves():
    """132 tiles take one wave of 132 processors, and two of 116."""
    backward = predict("column_linear", "backward", "c10d", Sizes(128 * 33, 1024, 1024, 2), NODE)
    free = NODE.nccl.channels
    for name, sizes in (("dgrad", (4224, 1024, 512)), ("wgrad", (512, 1024, 4224))):
        ran = next(one for one in backward.ran if one.task.name == name and one.task.queue == (0, COMPUTE))
        assert ran.stop - ran.start == pytest.approx(ran.task.seconds), "nothing is shared"
        assert ran.task.seconds == NODE.times.product(name, *sizes, free)
    alone, beside = (NODE.times.product("dgrad", 4224, 1024, 4096, left) for left in (0, free))
    assert 1.5 < beside / alone < 2  # the clock is higher where fewer are busy


def test_the_host_bounds_small_calls_and_a_graph_frees_them():
    small = Sizes(512, 4096, 14336, 8)
    eager = predict("column_linear", "forward", "symmetric", small, NODE)
    graph = predict("column_linear", "forward", "symmetric", small, replace(NODE, host=GRAPH))
    assert eager.seconds == pytest.approx(eager.host)
    assert graph.seconds < 0.5 * eager.seconds
    launches = [ran for ran in graph.ran if ran.task.kind == LAUNCH]
    assert sum(ran.task.seconds for ran in launches) == pytest.approx(8 * GRAPH.call * 1e-6)


USUAL = ("column_linear", "forward", "c10d")


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (USUAL, (0, 4096, 14336, 8), "tokens: expected at least 1, got 0"),
        (USUAL, (8192, 4096, 14336, 0), "ranks: expected at least 1, got 0"),
        (USUAL, (8190, 4096, 14336, 8), "tokens: expected a multiple of the 8 ranks .* got 8190"),
        (USUAL, (8192, 4096, 14337, 8), "features_out: expected a multiple of the 8 ranks, got 14337"),
        (("linear", "forward", "c10d"), (8, 8, 8, 8), "operator: expected one of .* got 'linear'"),
        (("mlp", "sideways", "c10d"), (8, 8, 8, 8), "direction: expected one of forward, backward, got 's"),
        (("mlp", "forward", "nccl"), (8, 8, 8, 8), "way: expected one of naive.* got 'nccl'"),
    ],
)
def test_sizes_and_names_that_cannot_be_are_told(names, sizes, message):
    with pytest.raises(ValueError, match=message):
        predict(*names, Sizes(*sizes), NODE)
