"""Ops whose rows move through memory with flags: the numbers of c10d, and errors instead of hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops import parallel_behaviour as behaviour
from tests.ops import transport_cases as cases
from tests.ops.parallel_cases import Setting, run_all
from tests.ops.parallel_compile import compiled_against_eager
from tests.ops.transport_cases import under
from tests.ranks import RankFailure, RankPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

WAYS = [("shared", "torch"), ("shared", "triton"), ("stand-in", "triton")]
ACTIVATIONS = {"column": ["gelu", None], "row": [None], "mlp": ["gelu", "swiglu"]}


@pytest.mark.parametrize("name", ["column", "row", "mlp"])
@pytest.mark.parametrize(
    ("world", "transport", "backend"),
    [("ranks2", *way) for way in WAYS]
    + [("ranks4", *way) for way in WAYS[:2]]
    + [("ranks4", "shared apart", "torch"), ("ranks4", "shared alone", "triton")]
    + [("ranks4", "stand-in apart", "triton"), ("ranks2", "stand-in apart", "triton")],
)
def test_ops_give_the_unsharded_numbers(request, world, name, transport, backend):
    way, ranks = (transport, backend), request.getfixturevalue(world)
    first, *_, last = ACTIVATIONS[name] * 2
    settings = [
        Setting(activation=first, main_grad=True),
        Setting(torch.bfloat16, activation=last, leading=(8, 3)),
        Setting(torch.float16, overlap=False, activation=first),
        Setting(sequence_parallel=False, activation=last, main_grad=True),
    ]
    if name == "column":
        settings.append(Setting(save_gathered=True, bias=False, activation="relu2"))
    if way[1] == "torch":
        settings += [Setting(torch.float64, parallel, activation=last) for parallel in (False, True)]
    if backend == "triton" and ranks.world_size == 4:
        settings = settings[::3]  # what two ranks prove of dtypes; four spin on two cores
    by_rank = ranks.run(under, *way, run_all, name, list(zip(settings, range(99), strict=False)))
    for rank, found in enumerate(by_rank):
        for setting, results in zip(settings, found, strict=True):
            too_far = {key: value for key, value in results.items() if not value < 1}
            assert not too_far, f"rank {rank}, {setting}: error as a part of what is allowed: {too_far}"


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "whole"])
def test_numbers_of_c10d_within_rounding(ranks2, sequence_parallel, way):
    assert max(ranks2.run(cases.differs_from_c10d_by, *way, sequence_parallel)) < 1e-6


@pytest.mark.parametrize(
    ("world", "transport", "backend", "sequence_parallel", "rounds"),
    [("ranks2", "shared", "triton", True, 3), ("ranks2", "shared", "triton", False, 3),
     ("ranks4", "shared", "torch", True, 3), ("ranks4", "shared", "triton", True, 2),
     ("ranks4", "shared apart", "torch", True, 3), ("ranks4", "shared alone", "torch", False, 3)],
)  # fmt: skip
def test_delays_change_no_bit(request, world, transport, backend, sequence_parallel, rounds):
    ranks = request.getfixturevalue(world)
    repeated = behaviour.repeats_are_equal
    assert all(ranks.run(under, transport, backend, repeated, sequence_parallel, "shared", rounds))


def test_one_kernel_multiplies_while_rows_arrive(ranks2):
    """Forward of column and backward of row: a launch each, and none without overlap."""
    assert ranks2.run(under, "shared", "triton", cases.waiting_products) == [(2, 0)] * 2


def test_all_exchanges_of_an_all_reduce_are_ready_for_a_capture(ranks2):
    for ready in ranks2.run(under, "stand-in", "triton", cases.ready_for_a_capture):
        assert len(ready) >= 2
        assert all(ready)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_layers_interleave_and_can_be_checkpointed(ranks2, way):
    assert all(ranks2.run(under, *way, behaviour.interleaved_layers_do_not_mix))
    assert all(ranks2.run(under, *way, behaviour.checkpointed_equals_plain, False))
    assert all(ranks2.run(under, *way, behaviour.without_grad))
    assert all(same for same, _ in ranks2.run(under, *way, behaviour.lists_share_one_gather))


def test_compiled_gives_the_same_bits(ranks2):
    setting = Setting(activation="gelu")
    for same in ranks2.run(under, "shared", "torch", compiled_against_eager, setting, (8, 16), timeout=180):
        assert same == [True] * 2


def test_replayed_calls_use_one_buffer_and_the_barrier_guards_it(ranks2):
    assert ranks2.run(cases.replayed_calls, True) == [[True] * 4] * 2
    with pytest.raises(RankFailure, match=r"gather_linear on rank \d: chunk \d had not arrived"):
        ranks2.run(cases.replayed_calls, False)  # the fault shows: flags are of another call


def test_who_cannot_wait_says_so_before_anything_is_sent(ranks2):
    for messages in ranks2.run(cases.nobody_can_wait):
        assert all(
            "TPKERNELS_BACKEND=torch computes with torch, which cannot wait" in m for m in messages[:3]
        )
        assert all("kernels that wait take bfloat16, float16 and float32" in m for m in messages[3:])


def test_a_rank_alone_opens_nothing(ranks1):
    assert ranks1.run(cases.alone) == [True]


def test_rows_that_do_not_divide_make_fewer_parts_or_go_over_c10d(ranks2):
    for parts, others in ranks2.run(cases.rows_that_do_not_divide):
        assert parts == [(7, 1), (6, 3), (5, 1), (8, 4)]
        assert others == []


def test_few_exchanges_stay_open(ranks2):
    for rows, threads, mappings in ranks2.run(cases.many_shapes):
        assert rows == [1, 4, 5]
        assert threads == 3
        assert mappings == 3 * 2


def test_exchanges_that_a_graph_writes_stay_open(ranks2):
    assert ranks2.run(cases.captured_exchanges_stay) == [[1, 4]] * 2


def test_exchanges_end_with_their_group(ranks2):
    assert ranks2.run(cases.ends_with_its_group) == [(1, 2, 0, 0)] * 2
    for message in ranks2.run(cases.destroyed_but_held):
        assert "was destroyed; make a new one" in message


@pytest.mark.parametrize(
    ("how", "words"),
    {
        "misspelt on one rank": ["on rank 0: TPKERNELS_TRANSPORT is 'share'; expected one of auto, c10d"],
        "other wishes": [
            "rank 0 has column_linear with TPKERNELS_TRANSPORT=auto",
            "rank 1 has column_linear",
        ],
        "symmetric on the CPU": [
            "CannotTakePart: column_linear: the gathers of process group '",
            "rank 0 cannot take part: TPKERNELS_TRANSPORT=symmetric exchanges memory of GPUs",
        ],
        "other shapes": [
            "ValueError: column_linear: the gathers of process group '",
            "expected equal arguments on all ranks, got pieces of (",
        ],
    }.items(),
)
def test_what_cannot_be_served_is_an_error_on_every_rank(ranks2, how, words):
    for message in ranks2.run(cases.refused, how):
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("transport", "backend"),
    [("shared", "torch"), ("shared", "triton"), ("shared apart", "torch"), ("shared apart", "triton")],
)
def test_a_dead_rank_is_an_error_that_names_op_rank_and_chunk(transport, backend):
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(cases.peer_dies, transport, backend)
    survivor = str(failure.value.exceptions[0])
    lost = ["rows of rank 1 (chunk "]
    if transport == "shared apart":  # its connections tell, perhaps before anything is asked of it
        lost += ["rank 1 cannot be reached"]
    assert survivor.startswith(tuple(f"column_linear: {what}" for what in lost))


def test_a_killed_rank_is_noticed_at_once():
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(cases.peer_is_killed)
    seconds, _, survivor = str(failure.value.exceptions[0]).partition(" s: ")
    assert "column_linear: rows of rank 1 (chunk " in survivor
    assert "its process has ended" in survivor
    assert float(seconds) < 2


def test_a_rank_that_dies_while_an_exchange_opens_is_named_with_op_and_group():
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(cases.peer_dies_while_an_exchange_opens)
    survivor = str(failure.value.exceptions[0])
    assert survivor.startswith("column_linear: r")
    assert "rank 1" in survivor
    assert "process group '" in survivor


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("op", ["column_linear", "row_linear"])
def test_a_late_rank_is_an_error_that_names_op_rank_and_chunk(ranks2, op, backend):
    (message, seconds), late = ranks2.run(cases.peer_stays_away, backend, op)
    assert f"{op}: rows of rank 1 (chunk " in message
    assert 0.3 < seconds < 40
    assert late[0] == "late"


def test_rows_are_not_overwritten_before_their_reader_has_said_so(ranks2):
    message, other = ranks2.run(cases.peer_never_says_that_it_has_read)
    assert "column_linear: " in message
    assert "rank 1" in message
    assert "expected call 1 to be released before call 3 begins" in other


def test_an_exchange_with_half_a_call_is_refused(ranks2):
    for message in ranks2.run(cases.call_after_half_a_call):
        assert "has an error ended it? Then destroy the process group" in message


def test_processes_end_with_exchanges_open_and_a_push_under_way(tmp_path):
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ops.unread_exchange", str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=root,
    )
    assert ran.stdout.strip() == "[0, 0]", ran.stderr
