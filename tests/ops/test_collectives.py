"""c10d as GPUs use it: the bits of today's exchange on gloo, and what is launched, in which order."""

from __future__ import annotations

import pytest
import torch

from tests.ops import collective_cases as cases
from tests.ops.collective_cases import noting
from tests.ranks import RankFailure, RankPool
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel import mappings, parallel
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp

WORLDS = [("ranks2", 1), ("ranks2", 2), ("ranks4", 1), ("ranks4", 2), ("ranks4", 4)]
T, K, N, R = 8192, 4096, 1792, 8


@pytest.mark.parametrize(("world", "rounds"), WORLDS)
def test_rows_move_as_they_do_point_to_point(request, world, rounds):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
    for wrong in request.getfixturevalue(world).run(cases.wrong_moves, rounds, dtypes):
        assert wrong == []


@pytest.mark.parametrize(("world", "rounds"), WORLDS)
def test_ops_have_the_bits_of_chunks(request, world, rounds):
    ranks = request.getfixturevalue(world)
    for sequence_parallel, overlap in [(True, True), (False, True), (True, False)]:
        for wrong in ranks.run(cases.wrong_ops, rounds, sequence_parallel, overlap):
            assert wrong == []


@pytest.mark.parametrize("rounds", [1, 2])
def test_regions_go_by_collectives(ranks2, rounds):
    assert ranks2.run(cases.wrong_regions, rounds) == [[], []]


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
def test_one_kernel_sums_to_the_same_bits(request, world):
    for wrong in request.getfixturevalue(world).run(cases.sums_of_kernels):
        assert wrong == []


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_dead_rank_is_an_error_that_names_op_and_rank(rounds):
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(cases.dies, rounds)
    survivor = str(failure.value.exceptions[0])
    assert survivor.startswith("column_linear: r")
    assert "rank 1 " in survivor
    assert "process group '" in survivor


@pytest.mark.parametrize("scatter", [True, False])
def test_the_backend_sums_if_it_is_told_to(ranks2, scatter):
    for found, expected, refused in ranks2.run(cases.backend_summed, scatter):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert refused.startswith(
            "ValueError: row_linear: TPKERNELS_BACKEND_SUMS=1 leaves sums of tensors on"
        )


def test_ranks_that_differ_in_who_sums_are_refused(ranks2):
    for message in ranks2.run(cases.options_differ):
        assert "rank 0 has row_linear: shards of the sum (4, 4)" in message
        assert "rank 1 has row_linear: shards of the sum by the backend (4, 4)" in message


def test_ranks_that_cut_otherwise_are_refused(ranks2):
    for message in ranks2.run(cases.rounds_differ):
        assert "rank 0 has column_linear: gather of x (4, 8)" in message
        assert "rank 1 has column_linear: gather of x in 2 rounds (4, 8)" in message


@pytest.mark.parametrize("transport", ["c10d", "shared", "shared apart"])
def test_without_overlap_each_peer_gets_one_message(ranks4, transport):
    beside = {"c10d": 1, "shared": 1, "shared apart": 2}[transport]  # of these, ranks on other machines
    for rank, found in enumerate(ranks4.run(cases.messages, transport, False)):
        peers = [peer for peer in range(4) if peer != rank and (beside == 1 or (peer - rank) % 2)]
        assert found == (peers, peers, True)
    for gathered_to, *_, right in ranks4.run(cases.messages, transport, True):
        assert right
        assert len(gathered_to) == 4 * len(peers), "and with it, four chunks"


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def launched(notes: list[str]) -> list[str]:
    """And forget."""
    found = list(notes)
    notes.clear()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_column_is_one_gather_and_one_product(overlap):
    with noting(R) as group:
        y = column_linear(leaf(T // R, K), leaf(N, K), None, group, sequence_parallel=True, overlap=overlap)
        assert launched(group.notes) == ["all_gather", "await all_gather", f"linear {T}"]
        y.backward(torch.empty_like(y))
        notes = launched(group.notes)
    gathered, summed = ["all_gather"], ["await all_to_all", "sum"]
    if overlap:  # the gather travels behind dgrad, the reduce behind wgrad
        expected = [*gathered, f"dgrad {T}", "all_to_all", "await all_gather", f"wgrad {T}", *summed]
    else:
        expected = [*gathered, f"dgrad {T}", "all_to_all", *summed, "await all_gather", f"wgrad {T}"]
    assert notes == expected


def test_row_is_cut_in_two_where_each_half_fills_the_gpu():
    with noting(R) as group:
        y = row_linear(leaf(T, N), leaf(K, N), None, group, sequence_parallel=True)
        half = [f"linear {T // 2}", "all_to_all"]
        assert launched(group.notes) == [*half, *half, "await all_to_all", "await all_to_all", "sum"]
        y.backward(torch.empty_like(y))
        assert launched(group.notes)[:2] == ["all_gather", "await all_gather"]
        row_linear(leaf(T, N), leaf(K, N), None, group, sequence_parallel=True, overlap=False)
        whole = [f"linear {T}", "all_to_all", "await all_to_all", "sum"]
        assert launched(group.notes) == whole


def test_rounds_of_a_gather_are_launched_before_the_first_product():
    with noting(R) as group, torch.no_grad():
        column_linear(leaf(T // R, K), leaf(2 * N, K), None, group, sequence_parallel=True)
        rounds = ["3 sends, 3 receives", "4 sends, 4 receives"]
        half = f"linear {T // 2}"
        assert launched(group.notes) == [*rounds, f"await {rounds[0]}", half, f"await {rounds[1]}", half]


def test_all_reduce_is_a_reduce_and_a_gather():
    with noting(R) as group, torch.no_grad():
        for overlap, pieces in [(True, 2), (False, 1)]:
            row_linear(leaf(T, N), leaf(K, N), None, group, overlap=overlap)
            products = [f"linear {T // pieces}", "all_to_all"] if overlap else [f"linear {T}", "all_to_all"]
            reduced = products * pieces + ["await all_to_all"] * pieces
            assert launched(group.notes) == [*reduced, "sum", "all_gather", "await all_gather"]
    with noting(2) as group, torch.no_grad():  # as many bytes, in one step
        row_linear(leaf(2048, N), leaf(1024, N), None, group)
        assert launched(group.notes) == ["linear 2048", "all_gather", "await all_gather", "sum"]


def test_mlp_hides_its_transfers():
    with noting(R) as group:
        y = parallel_mlp(leaf(T // R, K), leaf(N, K), None, leaf(K, N), None, group, sequence_parallel=True)
        launched(group.notes)
        y.backward(torch.empty_like(y))
        notes = launched(group.notes)
    assert [note for note in notes if not note.startswith("await")][:2] == ["all_gather", "all_gather"]
    assert notes.index("all_to_all") < len(notes) - 1 - notes[::-1].index(f"wgrad {T}")
    assert notes[-2:] == ["await all_to_all", "sum"]
    assert len([note for note in notes if note.startswith("all")]) == 3


def test_a_region_is_one_collective():
    x = torch.empty(T, K, device="meta")
    with noting(R) as group, torch.no_grad():
        mappings.gather_from_sequence_region(x, group)
        assert launched(group.notes) == ["all_gather", "await all_gather"]
        mappings.reduce_scatter_to_sequence_region(x, group)
        assert launched(group.notes) == ["all_to_all", "await all_to_all", "sum"]
        mappings.reduce_from_region(x, group)
        assert launched(group.notes) == [
            "all_to_all",
            "await all_to_all",
            "sum",
            "all_gather",
            "await all_gather",
        ]


def test_the_backend_sums_in_one_launch(monkeypatch):
    monkeypatch.setattr(parallel, "backend_sums", True)
    monkeypatch.setattr(parallel, "require_backend_sums", lambda *_: None)
    with noting(R) as group, torch.no_grad():
        row_linear(leaf(T, N), leaf(K, N), None, group, sequence_parallel=True)
        assert launched(group.notes) == [f"linear {T}", "reduce_scatter", "await reduce_scatter"]
        row_linear(leaf(T, N), leaf(K, N), None, group)
        assert launched(group.notes) == [f"linear {T}", "all_reduce", "await all_reduce"]
