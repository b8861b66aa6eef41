"""Ops over a vocabulary as citizens of PyTorch and of a group: compile, memory, mistakes, extreme values."""

from __future__ import annotations

import pytest
import torch

from tests.ops import parallel_compile, vocab_memory
from tests.ops import vocab_behaviour as behaviour
from tests.ranks import RankFailure, RankPool

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks compute on the CPU, where kernels run in the interpreter only"
)
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ranks_have_the_same_loss_by_megatrons_formula(ranks4, smoothing):
    results = ranks4.run(behaviour.losses_of_rank, smoothing)
    for loss, by_hand in results:
        assert torch.equal(loss, results[0][0])
        torch.testing.assert_close(loss.double(), by_hand, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", ["ranks1", "ranks2", "ranks4"])
def test_infinite_huge_and_ignored_logits(request, world):
    for wrong in request.getfixturevalue(world).run(behaviour.awkward_logits):
        assert not wrong


def test_nothing_to_learn_from_is_zero_and_not_nan(ranks2):
    for found in ranks2.run(behaviour.all_ignored):
        assert not any(t.any() for t in found)


def test_same_bits_every_time(ranks2):
    assert all(ranks2.run(behaviour.repeats_are_equal))


def test_only_what_is_asked_for_is_computed(ranks2):
    assert all(ranks2.run(behaviour.frozen_and_forward_only))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_it(ranks2, reentrant):
    assert all(ranks2.run(behaviour.checkpointed_equals_plain, reentrant))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_gives_the_same_bits(ranks2, sequence_parallel):
    for same in ranks2.run(behaviour.compiled_equals_eager, sequence_parallel, timeout=180):
        assert same == [True] * 3


def test_compiled_takes_overwrite_logits(ranks2):
    assert ranks2.run(behaviour.compiled_with_overwriting, timeout=180) == [True, True]


def test_compiled_keeps_as_many_bytes_for_backward(ranks1):
    (found,) = ranks1.run(vocab_memory.saved_when_eager_and_compiled, timeout=180)
    ids, losses, gradients = 12 * 8, 12 * 4, (12 + behaviour.VOCAB) * behaviour.FEATURES * 4
    expected = {
        "embedding": ids,
        "cross_entropy": ids + 2 * losses,
        "mean": gradients + 4,
        "none": ids + 2 * losses,
    }
    assert found == {name: (count, count) for name, count in expected.items()}


def test_compiled_head_takes_frozen_operands(ranks2):
    assert ranks2.run(behaviour.compiled_with_frozen_operands, timeout=180) == [[True] * 6] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_head_adds_to_main_grad_what_the_eager_one_does(ranks2, sequence_parallel):
    for differences in ranks2.run(
        parallel_compile.main_grads_of_heads_differ_by, sequence_parallel, timeout=180
    ):
        assert len(differences) == 8
        assert max(differences) < 1e-6


def test_meta_tensors_give_shapes(ranks1):
    ((*results, dw, dh),) = ranks1.run(behaviour.on_meta)
    assert results == [(5, behaviour.FEATURES), (5,), (), (5,)]
    assert (dw, dh) == ((behaviour.VOCAB, behaviour.FEATURES), (5, behaviour.FEATURES))


@BACKENDS
def test_layouts_are_any(ranks1, backend):
    assert all(ranks1.run(behaviour.awkward_layouts, backend))


def test_registered_operators_pass_opcheck(ranks1):
    ranks1.run(behaviour.pass_opcheck, timeout=180)


def test_autocast_casts_products_and_no_loss(ranks1):
    assert ranks1.run(behaviour.autocast_dtypes) == [[torch.float32] * 4]


@BACKENDS
def test_logits_are_overwritten_if_that_is_allowed_and_autograd_knows(ranks2, backend):
    for there, same, message in ranks2.run(behaviour.overwriting, backend):
        assert there
        assert same
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_head_holds_a_chunk_of_logits_and_never_all(ranks1, reduction):
    tokens, vocab, chunk = 1024, 600, 64
    (found,) = ranks1.run(vocab_memory.peak_of_head, reduction, tokens, vocab, chunk)
    (largest, peak), (pair_largest, pair_peak) = found["chunked"], found["pair"]
    assert largest == chunk * vocab
    assert pair_largest == tokens * vocab  # else the measurement sees nothing
    # beside the logits their copies in the oracle, and what is as large as hidden or weight
    assert peak < 6 * 4 * chunk * vocab + 4 * 12 * behaviour.FEATURES * (tokens + vocab)
    assert peak < pair_peak / 4


def test_a_rank_alone_touches_no_transfer():
    with RankPool(1) as own:  # patched for good, hence not the common one
        assert own.run(behaviour.a_rank_alone_touches_no_transfer) == [True]


MISTAKES = {
    "target past the end": "ValueError: vocab_cross_entropy: expected target from 0 to 15, or -100 to be ",
    "negative target": "expected target from 0 to 15, or -100 to be ignored, got -1",
    "target in padding": "expected target from 0 to 14, or -100 to be ignored, got 15",
    "id past the end": "ValueError: vocab_embedding: expected ids from 0 to 15, got 16",
    "negative id": "expected ids from 0 to 15, got -1",
    "target of head": "ValueError: linear_cross_entropy: expected target from 0 to 15",
    "target shape": "expected a target for each row of logits_shard (6, 8), got (5,)",
    "target dtype": "TypeError: vocab_cross_entropy: expected target of int64 or int32, got torch.float32",
    "integer logits": "expected floating-point logits_shard",
    "smoothing": "expected label_smoothing from 0 to less than 1, got 1.0",
    "smoothing one id": "expected no label_smoothing with one id",
    "vocabulary": "expected a vocab_size from 1 to 16, what 2 ranks of 8 hold, got 17",
    "leaf": "expected no leaf with overwrite_logits",
    "expanded": "expected logits with memory of their own for each element",
    "no group": "expected a process group",
    "ragged tokens": "divisible by the 2 ranks",
    "padding_idx": "expected a padding_idx from -16 to 15, got 16",
    "head shapes": "expected target (6,) for hidden (6, 8), got (5,)",
    "head target of a shard": "expected target (12,) for hidden (6, 8) of each of 2 ranks, got (6,)",
    "reduction": "expected reduction of mean, sum, none; got 'avg'",
    "chunk": "expected chunk_tokens of at least 1, got 0",
    "head dtype": "expected one dtype",
}


def test_mistakes_are_errors_on_every_rank(ranks2):
    for messages in ranks2.run(behaviour.all_bad_calls, list(MISTAKES)):
        for (name, words), message in zip(MISTAKES.items(), messages, strict=True):
            assert words in message, name


@pytest.mark.parametrize(
    ("wrong", "words"), [(5, "ranks disagree on tensor 0"), (99, "on rank 1: expected target")]
)
def test_targets_that_differ_are_an_error_on_every_rank_in_debug_mode(ranks2, wrong, words):
    for message in ranks2.run(behaviour.one_rank_has_other_targets, wrong):
        assert words in message


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("call", "told"), [(1, 1), (2, 2), (5, 8)])
def test_a_rank_that_reads_a_batch_of_its_own_is_told_of(ranks2, call, told, sequence_parallel):
    for number, message in ranks2.run(behaviour.other_ids_from, call, sequence_parallel):
        assert number == told
        assert "vocab_embedding: ranks disagree on tensor 0: rank 0 has ids (6,) with checksum" in message


def test_a_dead_rank_is_an_error_that_names_the_op():
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(behaviour.peer_dies)
    survivor = str(failure.value.exceptions[0])
    assert survivor.startswith("vocab_cross_entropy: r")
    assert "rank 1" in survivor
