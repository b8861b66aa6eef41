"""Seconds: what is hidden, what is exposed, and where a group lies."""

import math
from dataclasses import replace

import pytest

from tests.planning.shapes import GPT2, LLAMA
from tests.products import pairwise
from tpkernels.dispatch.candidates import TARGET_GPUS
from tpkernels.models.config import model_config
from tpkernels.planning.gpus import RATED_GPUS, RatedGpu, gpu_named
from tpkernels.planning.job import Hardware, Job, RankLayout
from tpkernels.planning.memory import parameters_of_stage
from tpkernels.planning.step_time import (
    OverlappedWork,
    _TransferTimes,
    exposed,
    message_between_stages,
    step_time,
)

ROUND = RatedGpu("round numbers", 132, flops=1e12, bytes=1e12, memory=10**11, nvlink=100e9, network=10e9)
MACHINE = Hardware(ROUND, gpus_per_node=8, efficiency=1.0, link_efficiency=1.0)
JOB = Job(model=LLAMA.with_sizes(num_layers=8), tokens=64, batch=16)


@pytest.mark.parametrize(
    ("alone", "products", "transfers", "seconds"),
    [
        ((0.25, 0.0), 8.0, 6.0, 0.0),  # all but the last quarter hide it
        ((0.25, 0.0), 8.0, 7.0, 1.0),
        ((0.25, 0.2), 8.0, 6.0, 1.2),  # before the first product
        ((1.0, 1.0), 8.0, 7.0, 7.0),  # one after the other
        ((0.25, 0.0), 0.0, 7.0, 7.0),  # nothing to hide behind
        ((0.0, 0.0), 8.0, 7.0, 0.0),  # another product hides it
        ((0.25, 0.25), 80.0, 8.0, 2.0),  # the last, whatever the products
    ],
)
def test_products_hide_transfers_but_for_what_is_alone(alone, products, transfers, seconds):
    products_alone, transfers_alone = alone
    work = OverlappedWork(products_alone=products_alone, transfers_alone=transfers_alone)
    assert exposed(work, products, transfers) == pytest.approx(seconds)


def simulated(products, transfers, rounds, kind):
    """A gather or a reduce-scatter of RANKS, round by round: one at a time is computed, and one travels."""
    block = RANKS // rounds
    sizes = [block - 1, *[block] * (rounds - 1)]  # in shards: a rank's own does not travel
    computing, moving = products / rounds, [transfers * size / (RANKS - 1) for size in sizes]
    computed = moved = 0.0
    for number in range(rounds):
        if kind == "gather":
            moved += moving[number]
            computed = max(computed, moved) + computing
        else:  # own rows in the last
            computed += computing
            moved = max(moved, computed) + moving[rounds - 1 - number]
    return max(computed, moved)


RANKS = 8


@pairwise(
    kind=["gather", "reduce"], rounds=[1, 2, 4], seconds=[(4.0, 8.0), (1.0, 9.0), (3.0, 3.0), (9.0, 3.0)]
)
def test_the_formula_is_what_rounds_do(kind, rounds, seconds):
    products, transfers = seconds
    width = 256 * 2 * 132 * rounds * 128 // 8192  # two tiles for each of 132 processors in each round
    work = _TransferTimes(replace(JOB, tokens=8192), RANKS, 132).gathers(1.0, features=width)
    assert work.products_alone == 1 / rounds
    expected = products + exposed(work, products, transfers)
    assert simulated(products, transfers, rounds, kind) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "stride", "exchanging", "circling"),
    [
        (1, 1, 0, 0),
        (8, 1, 1 / 100e9, 1 / 100e9),  # one node
        (4, 2, 1 / 100e9, 1 / 100e9),
        (16, 1, 8 / 15 / 10e9, 1 / 80e9),  # 8 of 15 others are in the other node; 8 adapters for a ring
        (4, 8, 1 / 10e9, 1 / 10e9),  # each in a node of its own
        (4, 4, 2 / 3 / 10e9, 1 / 20e9),  # two in a node
        (2, 16, 1 / 10e9, 1 / 10e9),
    ],
)
def test_bytes_go_over_the_links_that_a_group_has(size, stride, exchanging, circling):
    assert MACHINE.exchanging(1.0, size, stride) == pytest.approx(exchanging)
    assert MACHINE.circling(1.0, size, stride) == pytest.approx(circling)


def test_a_message_to_the_next_stage_takes_the_slowest_link():
    assert MACHINE.handing_on(1.0, size=2, stride=4) == 1 / 100e9
    assert MACHINE.handing_on(1.0, size=4, stride=4) == 1 / 10e9  # the second and third in two nodes
    assert replace(MACHINE, link_efficiency=0.5).handing_on(1.0, size=2, stride=4) == 2 / 100e9


def test_bubble_is_a_share_of_stages_and_micro_batches():
    for stages in (1, 2, 4):
        time = step_time(JOB, RankLayout(1, stages, 1), MACHINE)
        count = JOB.micro_batches(RankLayout(1, stages, 1))
        turn = time.bubble / max(1, stages - 1)
        share = (stages - 1) / (count + stages - 1)
        assert time.bubble == pytest.approx(share * (count * turn + time.bubble))
        assert (time.bubble == 0) == (stages == 1)
        assert time.total == time.compute + time.exposed + time.bubble
    few = replace(JOB, batch=4)
    one, four = (step_time(few, RankLayout(1, stages, 1), MACHINE) for stages in (1, 4))
    assert four.bubble > 0.7 * four.compute  # 3 turns of 4 + 3
    assert four.compute < one.compute


def test_a_rank_alone_exposes_nothing_and_computes_six_flops_a_parameter_and_token():
    model = model_config("llama3-8b")
    job = Job(model=model, tokens=8192, batch=4)
    time = step_time(job, RankLayout(1, 1, 1), MACHINE)
    assert (time.exposed, time.bubble) == (0, 0)
    matrices = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 128256 * 4096
    attention = 32 * 3.5 * 2 * 8192 * 4096
    assert time.compute == pytest.approx(4 * 8192 * (6 * matrices + attention) / 1e12)


def test_messages_between_stages_are_exposed_there_and_back():
    message = 64 * 64 * 2
    assert step_time(JOB, RankLayout(1, 2, 1), MACHINE).exposed == pytest.approx(16 * 2 * message / 100e9)
    assert message_between_stages(JOB, 2) == message / 2
    assert message_between_stages(replace(JOB, sequence_parallel=False), 2) == message


def test_gradients_and_weights_travel_once_a_step():
    """Of a model that fits into one bucket, which no backward hides."""
    count = parameters_of_stage(JOB, RankLayout(1, 1, 2), 0).total
    for batch in (2, 16):
        time = step_time(replace(JOB, batch=batch), RankLayout(1, 1, 2), MACHINE)
        assert time.exposed == pytest.approx((4 + 2) * count / 2 / 100e9)
    large = Job(model=model_config("llama3-8b"), tokens=8192, batch=2)
    count = parameters_of_stage(large, RankLayout(1, 1, 2), 0).total
    hidden = step_time(large, RankLayout(1, 1, 2), MACHINE).exposed * 100e9 - 2 * count / 2
    assert hidden == pytest.approx(4 * 128256 * 4096 / 2)  # the table, in the last bucket


def test_gradients_of_copies_travel_once_a_step_by_the_fullest_stage():
    models = (GPT2.with_sizes(max_positions=positions) for positions in (64, 1064))
    jobs = (Job(model=model, tokens=64, batch=16) for model in models)
    few, many = (step_time(job, RankLayout(2, 1, 1), MACHINE) for job in jobs)
    assert many.exposed - few.exposed == pytest.approx(2 * 4 * 1000 * 64 / 2 / 100e9)
    # Positions are the first stage's.
    models = (GPT2.with_sizes(max_positions=positions) for positions in (1064, 2064))
    jobs = (Job(model=model, tokens=64, batch=16) for model in models)
    few, many = (step_time(job, RankLayout(1, 2, 2), MACHINE) for job in jobs)
    assert many.exposed - few.exposed == pytest.approx((4 + 2) * 1000 * 64 / 2 / 100e9)
    jobs = (Job(model=GPT2.with_sizes(tied=tied), tokens=64, batch=16) for tied in (True, False))
    tied, untied = (step_time(job, RankLayout(1, 2, 1), MACHINE) for job in jobs)
    assert tied.exposed - untied.exposed == pytest.approx(4 * 250 * 64 / 100e9)
    assert tied.compute == untied.compute


def test_data_sheets():
    assert gpu_named("h100").floor(1.0, 3.35e12) == 1.0  # little work, much memory
    for gpu in RATED_GPUS.values():
        assert gpu.network < gpu.nvlink < gpu.bytes < gpu.flops
    processors = {name: TARGET_GPUS[name].processors for name in RATED_GPUS}
    assert {name: gpu.processors for name, gpu in RATED_GPUS.items()} == processors
    with pytest.raises(ValueError, match="gpu: expected one of h200, h100, a100, got 'h1000'"):
        gpu_named("h1000")


@pytest.mark.parametrize(
    "bad",
    [
        {"gpus_per_node": 0},
        {"efficiency": 0.0},
        {"efficiency": 1.1},
        {"link_efficiency": math.nan},
        {"reserve": 1.0},
        {"reserve": -0.1},
    ],
)
def test_assumptions_that_cannot_be_are_told(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
        replace(MACHINE, **bad)
