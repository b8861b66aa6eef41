"""Times of calls: made from what the operators enqueue, and what these figures are held to."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench.streams.prediction import enqueued, predict
from bench.streams.record import _turned
from bench.streams.times import COMPUTE, GRAPH, HOST, LAUNCH, PRODUCT, TRANSFER, Node, times_of
from tests.products import once
from tpkernels.comm import schedule
from tpkernels.comm.transports import c10d, select, symmetric
from tpkernels.comm.transports.memory import Landing, Layout
from tpkernels.planning.gpus import gpu_named
from tpkernels.planning.step_time import OPERATORS, WAYS, Sizes

NODE = Node.of(gpu_named("h100"))
NO_HOST = NODE.with_host(GRAPH)
SIZES = Sizes(8192, 4096, 14336, 8)
LAUNCHES = Path(__file__).parents[2] / "docs" / "launches-counted.md"
CASES = {f"{op}_{way}": (op, way) for op in OPERATORS for way in ("forward", "backward")}


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """Of what operators enqueued that a test has changed."""
    enqueued.cache_clear()
    yield
    enqueued.cache_clear()


# Microseconds of calls launched by a graph, naive, c10d, symmetric and decomposed. They were computed for all
# ranks, by a model in which the operators were written once more; it shared the node's figures alone.
OF_ALL_RANKS = {
    ("column_linear", "forward", 2048, 2): (244.4, 244.4, 216.7, 212.1),
    ("column_linear", "forward", 8192, 4): (540.9, 475.9, 393.6, 422.1),
    ("column_linear", "forward", 8192, 8): (409.4, 409.4, 216.7, 354.9),
    ("column_linear", "backward", 2048, 2): (458.0, 456.5, 410.6, 456.5),
    ("column_linear", "backward", 8192, 4): (1111.2, 823.7, 876.4, 823.7),
    ("column_linear", "backward", 8192, 8): (805.9, 442.1, 630.4, 442.1),
    ("row_linear", "forward", 2048, 2): (225.1, 235.5, 199.5, 232.6),
    ("row_linear", "forward", 8192, 4): (542.4, 502.8, 411.9, 406.5),
    ("row_linear", "forward", 8192, 8): (399.4, 361.8, 225.9, 273.1),
    ("row_linear", "backward", 2048, 2): (434.8, 434.8, 420.2, 402.4),
    ("row_linear", "backward", 8192, 4): (936.1, 871.1, 835.3, 817.3),
    ("row_linear", "backward", 8192, 8): (608.3, 608.3, 462.1, 553.8),
}


def sizes_of(op, tokens, ranks, width=4096, features=14336):
    wide = (features, width) if op == "row_linear" else (width, features)
    return Sizes(tokens, *wide, ranks)


@pytest.mark.parametrize("case", OF_ALL_RANKS, ids=str)
def test_one_rank_takes_as_long_as_all_ranks_did(case):
    op, direction, tokens, ranks = case
    sizes = sizes_of(op, tokens, ranks)
    found = [1e6 * predict(op, direction, way, sizes, NO_HOST).seconds for way in WAYS]
    assert found == pytest.approx(OF_ALL_RANKS[case], rel=1e-3)


@pytest.mark.parametrize(
    ("operator", "direction", "copies", "products"),
    [("column_linear", "forward", 8, 4), ("row_linear", "forward", 8, 4), ("row_linear", "backward", 8, 5)],
)
def test_rounds_are_products_with_pushes_beside_them(operator, direction, copies, products):
    """Each shard leaves in one copy, own rows included; a weight gradient is one product more."""
    sizes = sizes_of(operator, 8192, 8)
    ran = predict(operator, direction, "rounds-4", sizes, NO_HOST).ran
    counts = Counter(each.task.kind for each in ran)
    assert (counts[TRANSFER], counts[PRODUCT]) == (copies - 1, products)
    alone = predict(operator, direction, "rounds-1", sizes, NO_HOST)
    assert predict(operator, direction, "rounds-4", sizes, NO_HOST).seconds < alone.seconds
    with pytest.raises(ValueError, match="expected rounds that divide 8 ranks, got 'rounds-3'"):
        predict(operator, direction, "rounds-3", sizes, NO_HOST)


def test_a_flag_that_is_raised_for_another_is_that_which_another_raises_here():
    layout = Layout(ranks=4, shape=(6, 8), dtype=torch.bfloat16, splits=2)
    memories = torch.zeros(4, layout.byte_count, dtype=torch.uint8).unbind()
    turned = dict(_turned(layout, memories))
    own = layout.mailbox(memories[0]).flags
    for peer, memory in enumerate(memories):
        for slot in range(schedule.SLOTS):
            raised = Landing(layout.mailbox(memory), slot, 0, layout).flags
            source = -peer % 4  # from whom rank 0 is as far as `peer` is from it
            awaited = own[slot, 2 * source : 2 * source + 2]
            assert [turned[raised.data_ptr() + 4 * i] for i in (0, 1)] == [
                awaited.data_ptr() + 4 * i for i in (0, 1)
            ]


def counted_in_docs():
    """Of docs/launches-counted.md, whose kernels are launched by the operators on tensors without memory."""
    sizes = r"\| (\d+) \| (\d) \| (\d+)"
    counts = r"\| [^|]* \| ([^|]*) \| \d+ \| ([^|]*) \| \d+ \|"
    pattern = rf"\| (column|row) (forward|backward) {sizes} {counts}"
    for kind, direction, tokens, ranks, width, *cells in re.findall(pattern, LAUNCHES.read_text()):
        for way, cell in zip(("c10d", "symmetric"), cells, strict=True):
            collectives, kernels, copies = map(int, cell.split(","))
            yield kind, direction, int(tokens), int(ranks), int(width), way, (collectives, kernels, copies)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.sweep)])
def test_the_host_launches_what_was_counted(every):
    rows = list(counted_in_docs())
    assert len(rows) == 2 * 4 * 3 * 3 * 2
    host, found, rows = NODE.host, [], rows[::every]
    for kind, direction, tokens, ranks, width, way, _ in rows:
        sizes = sizes_of(f"{kind}_linear", tokens, ranks, width, {4096: 14336, 8192: 28672}[width])
        ran = predict(f"{kind}_linear", direction, way, sizes, NODE).ran
        cost = Counter(round(1e6 * each.task.seconds) for each in ran if each.task.queue[0] == HOST)
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
    return [ran for ran in found.ran if ran.task.kind == TRANSFER]


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_rounds_are_those_of_the_schedule(rounds):
    with patch.object(c10d, "collective_rounds", lambda _, features, *__: rounds if features else 1):
        assert len(transfers("c10d")) == rounds
        for way in ("c10d", "decomposed"):  # x and dx, which other products hide
            assert len(transfers(way, "column_linear", "backward")) == 2


def test_chunks_and_what_hides_what_are_those_of_the_operators():
    usual = len(transfers("symmetric", "column_linear"))
    enqueued.cache_clear()
    with patch.object(select, "pushed_chunks", lambda *_: 2):
        assert len(transfers("symmetric", "column_linear")) == 2 * usual
    backward = predict("column_linear", "backward", "c10d", SIZES, NODE)
    assert list(backward.hidden) == ["gather of x", "shards of the sum"]
    longest = [max(beside, key=beside.get) for beside in backward.hidden.values()]
    assert longest == ["dgrad_kernel", "wgrad_kernel"]
    naive = predict("column_linear", "backward", "naive", SIZES, NODE)
    assert list(naive.hidden.values()) == [{}, {}]
    assert naive.seconds == pytest.approx(naive.products + naive.transfers, rel=0.02)


def test_the_order_of_a_gather_is_that_of_the_schedule():
    """Planted: all ranks push to the nearest last, so that what is multiplied first arrives last."""
    usual = predict("column_linear", "forward", "symmetric", SIZES, NO_HOST)
    plan = schedule.pushing_gather_plan

    def backwards(*sizes):
        planned = plan(*sizes)
        own, *others = planned.rounds
        return replace(planned, rounds=(replace(own, swaps=own.swaps[::-1]), *others))

    enqueued.cache_clear()
    with patch.object(symmetric, "pushing_gather_plan", backwards):
        planted = predict("column_linear", "forward", "symmetric", SIZES, NO_HOST)
    assert planted.seconds > 1.2 * usual.seconds


def test_pushes_in_the_stream_that_computes_are_seen_in_the_time():
    """As where torch gives out a stream of its pool again."""
    usual = predict("column_linear", "forward", "symmetric", SIZES, NO_HOST)
    of = symmetric.GroupStreams.of

    def aliased(device):
        found = of(device)
        found.side._stream = torch.cuda.current_stream()
        return found

    enqueued.cache_clear()
    with patch.object(symmetric.GroupStreams, "of", aliased):
        planted = predict("column_linear", "forward", "symmetric", SIZES, NO_HOST)
    assert planted.seconds > 1.05 * usual.seconds


def test_products_beside_a_collective_leave_it_processors_and_take_whole_waves():
    """132 tiles take one wave of 132 processors, and two of 116."""
    backward = predict("column_linear", "backward", "c10d", Sizes(128 * 33, 1024, 1024, 2), NODE)
    free = NODE.nccl.channels
    for name, sizes in (("dgrad", (4224, 1024, 512)), ("wgrad", (512, 1024, 4224))):
        (ran,) = (
            one for one in backward.ran if one.task.name == f"{name}_kernel" and one.task.queue[0] == COMPUTE
        )
        assert ran.stop - ran.start == pytest.approx(ran.task.seconds), "nothing is shared"
        assert ran.task.seconds == NODE.times.product(*sizes, free)
    alone, beside = (NODE.times.product(4224, 1024, 4096, left) for left in (0, free))
    assert 1.5 < beside / alone < 2  # the clock is higher where fewer are busy


def test_the_host_bounds_small_calls_and_a_graph_frees_them():
    small = Sizes(512, 4096, 14336, 8)
    eager = predict("column_linear", "forward", "symmetric", small, NODE)
    graph = predict("column_linear", "forward", "symmetric", small, NO_HOST)
    assert eager.seconds == pytest.approx(eager.host)
    assert graph.seconds < 0.5 * eager.seconds
    launches = [ran for ran in graph.ran if ran.task.kind == LAUNCH]
    assert sum(ran.task.seconds for ran in launches) == pytest.approx(GRAPH.call * 1e-6)


def test_the_host_is_not_ahead_by_calls_that_came_before():
    """Forward calls keep a GPU busy while the host enqueues backward ones."""
    backward = predict("column_linear", "backward", "c10d", Sizes(512, 4096, 14336, 4), NODE)
    assert backward.seconds == pytest.approx(backward.host)


def test_an_all_reduce_sends_twice_what_a_reduce_scatter_sends():
    split = Sizes(8192, 14336, 4096, 8)
    scattered, summed = (
        predict(
            "row_linear", "forward", "naive", replace(split, sequence_parallel=sequence_parallel), NO_HOST
        )
        for sequence_parallel in (True, False)
    )
    per_byte = 1 / (0.735 * NODE.gpu.nvlink)
    more = 8192 * 4096 * 2 * 7 / 8 * per_byte
    assert summed.transfers - scattered.transfers == pytest.approx(more)


def test_flags_hold_up_what_awaits_them():
    """Planted: no flag of a peer is known, so that a product goes on at once."""
    narrow = Sizes(8192, 4096, 4096, 8)  # so that links take longer than products
    program, calls = enqueued("column_linear", "forward", "symmetric", narrow, 132)
    ends = {}
    for name, turned in (("usual", program.turned), ("planted", {})):
        program.turned = turned
        ends[name] = max(
            ran.stop for ran in times_of(program, calls[:1], NO_HOST)[0] if "linear" in ran.task.name
        )
    assert ends["planted"] < 0.7 * ends["usual"]


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
