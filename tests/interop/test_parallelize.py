"""Models of torch's own layers compute the same when ranks share them, alone and inside FSDP2 and DDP."""

from __future__ import annotations

import os

import pytest

from tests.interop import buffer_cases, partial_cases, split_cases, verify_cases

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_split_model_is_the_whole_one(ranks, tensor, request):
    pool = request.getfixturevalue(f"ranks{ranks}")
    assert pool.run(split_cases.split_alike, tensor) == [[]] * ranks


@pytest.mark.parametrize(
    "unlike",
    [
        split_cases.like_parallelize_module,
        split_cases.compiled_copied_and_rounded,
        verify_cases.refused_in_bfloat16_tied_or_frozen,
        buffer_cases.tied_again,
        buffer_cases.carried_over,
    ],
)
def test_split_model_is_the_whole_one_also(unlike, ranks2):
    assert ranks2.run(unlike) == [[], []]


@pytest.mark.parametrize("cases", [split_cases, partial_cases], ids=["plain", "partial"])
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_data_parallel_wrappers_take_it(wrapper, cases, ranks4):
    assert ranks4.run(cases.data_parallel, wrapper) == [[]] * 4


def test_memory_of_the_whole_is_freed(ranks4):
    whole = sum(parameter.nbytes for parameter in split_cases.toy().parameters())
    for held, reserved in ranks4.run(split_cases.memory_of_shards):
        assert held == reserved
        assert held < whole / 2


def test_wrong_plans_are_refused_on_all_ranks_alike(ranks2):
    first, second = ranks2.run(split_cases.refuse)
    assert first == second


def test_wrong_plans_are_refused_and_change_nothing(ranks2):
    first, second = ranks2.run(verify_cases.refused_and_unchanged)
    assert first == second


def test_it_says_when_it_could_not_compare(ranks2):
    first, second = ranks2.run(verify_cases.told_when_not_compared)
    assert second == {case: [] for case in first}
    assert [len(first[case]) for case in ("no inputs", "off", "large", "large, asked")] == [1, 0, 1, 0]
    assert "was not compared with the unsharded one: no inputs with which it runs" in first["no inputs"][0]
    assert "numbers, and a comparison takes 26 bytes for each; pass verify=" in first["large"][0]


def test_it_sees_what_zeros_hide_and_models_without_numbers(ranks2):
    first, second = ranks2.run(verify_cases.faults_seen)
    assert first == second


def test_models_that_know_no_float64_are_compared_in_float32(ranks2):
    for right, wrong in ranks2.run(verify_cases.in_float32):
        assert right == ""
        assert "(1e-03 is allowed, in torch.float32)" in wrong


@pytest.mark.parametrize("how", partial_cases.WAYS)
def test_adamw_does_what_it_does_unsharded(how, ranks2):
    assert ranks2.run(partial_cases.trained_alike, how, timeout=120) == [[], []]


def test_adamw_on_four_ranks(ranks4):
    assert ranks4.run(partial_cases.trained_alike, "plain") == [[]] * 4


def test_plan_may_say_it_and_is_checked(ranks2):
    first, second = ranks2.run(partial_cases.declared)
    assert first == second
    assert first[0] == []


def test_what_cannot_be_right_is_refused(ranks2):
    first, second = ranks2.run(partial_cases.refusals)
    assert first == second


@pytest.mark.parametrize("kind", ["reset", "configured", "told"])
def test_buffers_are_computed_again(kind, ranks2):
    assert ranks2.run(buffer_cases.computed_again, kind) == [[], []]


@pytest.mark.parametrize("kind", ["alone", "half"])
def test_buffers_that_nobody_can_compute_are_named(kind, ranks2):
    assert ranks2.run(buffer_cases.set_by_hand, kind) == [[], []]


LLAMA = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
GPT2 = {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("tensor", [2, 4])
def test_models_of_transformers(tensor, ranks4):
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"llama": LLAMA | NO_IDS, "gpt2": GPT2 | NO_IDS}
    assert ranks4.run(split_cases.huggingface_alike, sizes, tensor, timeout=150) == [[]] * 4
