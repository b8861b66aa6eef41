"""Models of torch's own layers compute the same when ranks share them, alone and inside FSDP2 and DDP."""

from __future__ import annotations

import os

import pytest

from tests.interop import buffer_cases, partial_cases, verify_cases
from tests.interop.split_cases import (
    as_citizens,
    data_parallel,
    huggingface_alike,
    like_parallelize_module,
    memory_of_parts,
    refuse,
    split_alike,
    toy,
)

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.mark.parametrize(("pool", "tensor"), [("ranks1", 1), ("ranks2", 2), ("ranks4", 4), ("ranks4", 2)])
def test_split_model_is_the_whole_one(pool, tensor, request):
    for wrong in request.getfixturevalue(pool).run(split_alike, tensor):
        assert wrong == []


def test_it_computes_what_torch_does(ranks2):
    assert ranks2.run(like_parallelize_module) == [[], []]


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_data_parallel_wrappers_take_it(wrapper, ranks4):
    assert ranks4.run(data_parallel, wrapper) == [[]] * 4


def test_it_compiles_and_rounds_like_the_whole_model(ranks2):
    assert ranks2.run(as_citizens, timeout=120) == [[], []]


def test_memory_of_the_whole_is_freed(ranks4):
    whole = sum(parameter.nbytes for parameter in toy().parameters())
    for held, reserved in ranks4.run(memory_of_parts):
        assert held == reserved
        assert held < whole / 2


def test_wrong_plans_are_refused_on_all_ranks_alike(ranks2):
    first, second = ranks2.run(refuse)
    assert first == second
    expected = [
        ("ValueError", "plan: expected at least one pattern"),
        ("ValueError", "'blocks.*.gates' fits no module; there are embed, blocks, blocks.0"),
        ("TypeError", "'blocks.0.norm': expected an nn.Linear for 'column', got LayerNorm"),
        ("ValueError", "'blocks.0.up' fits both 'blocks.*.up' and 'blocks.0.up'"),
        (
            "ValueError",
            "'blocks.*.up': expected one of column, row, row_of_full, head, embedding, partial",
        ),
        ("ValueError", "expected a positive unit, and stacked > 1 for a column only"),
        ("TypeError", "'embed': expected an nn.Linear for 'head', got Embedding"),
        ("ValueError", "'a': expected out_features that 2 ranks x unit 1 x stacked 1 = 2 divides, got 7"),
        ("ValueError", "'a': expected in_features that 2 ranks x unit 1 x stacked 1 = 2 divides, got 5"),
        ("ValueError", "'b': expected an nn.Embedding without max_norm"),
        (
            "ValueError",
            "'blocks.0.out': expected in_features that 2 ranks x unit 16 x stacked 1 = 32 divides",
        ),
        ("ValueError", "'blocks.0.height': expected a number that 2 ranks divide, got None"),
        ("ValueError", "'head': expected a module without hooks or"),
        ("ValueError", "'head' shares a weight with 'embed', and must be split as that is"),
        ("TypeError", "'a': expected an nn.Linear for 'column', got ColumnLinear; it is split already"),
        ("TypeError", "'0.linear1': expected a module that its parent calls, but '0', an nn.Transformer"),
        ("ValueError", "'embed.weight': expected the same weights on all tensor-parallel ranks"),
        ("ValueError", "DistributedDataParallel has not wrapped, but it has wrapped 'module.embed.weight'"),
        (
            "ValueError",
            "DistributedDataParallel has not wrapped, but it has wrapped 'embed.weight', and",
        ),
        ("ValueError", "expected a model without optimizer, but one has 'embed.weight', and would go on"),
        ("ValueError", "weights: expected 'check' or 'broadcast', got 'ignore'"),
        ("ValueError", "ranks disagree"),
        ("ValueError", "ranks disagree"),
    ]
    for (kind, text), (expected_kind, part) in zip(first, expected, strict=True):
        assert kind == expected_kind, text
        assert part in text


def test_wrong_plans_are_refused_and_change_nothing(ranks2):
    first, second = ranks2.run(verify_cases.refused_and_unchanged)
    assert first == second
    by_values = (
        "the first module whose output differs is 'inner.out', and the last before it that agrees is "
        "'inner.qkv.2' (1e-05 is allowed, in torch.float64). Mend the plan; the model is as it was"
    )
    expected = {
        "by default": ("ValueError", "'inner' does not take this rank's features, though it takes all of"),
        "by values": ("ValueError", by_values),
        "by name": ("ValueError", by_values),
        "by position": ("ValueError", by_values),
        "unlike": ("ValueError", "verify: expected the same inputs on all tensor-parallel ranks"),
        "other shapes": ("ValueError", "ranks disagree"),
        "do not run": ("ValueError", "verify: the unsharded model does not run with these inputs"),
        "of no kind": ("TypeError", "verify: expected example inputs (a tensor, a tuple, or a mapping"),
        "True": ("TypeError", "verify: expected example inputs"),
    }
    for case, (kind, part) in expected.items():
        assert (first[case][0], part in first[case][1]) == (kind, True), first[case]
        assert first[f"{case} left"] is True, case
    assert (first["calls"], first["rng"]) == (0, True)


def test_it_says_when_it_could_not_compare(ranks2):
    first, second = ranks2.run(verify_cases.told_when_not_compared)
    assert second == {case: [] for case in first}
    assert [len(first[case]) for case in ("no inputs", "off", "large", "large, asked")] == [1, 0, 1, 0]
    assert "was not compared with the unsharded one: no inputs with which it runs" in first["no inputs"][0]
    assert "numbers, and a comparison takes 26 bytes for each; pass verify=" in first["large"][0]


def test_it_sees_what_zeros_hide_and_models_without_numbers(ranks2):
    first, second = ranks2.run(verify_cases.faults_seen)
    assert first == second
    assert "the first module whose output differs is 'blocks.0.out', and the last" in first["bias"][1]
    assert "the first module whose output differs is 'inner.out'" in first["meta"][1]
    assert "'inner' does not take this rank's features" in first["meta, by default"][1]
    assert first["meta, right"] == first["meta, right by default"] == ("nothing", "")


def test_models_that_know_no_float64_are_compared_in_float32(ranks2):
    for right, wrong in ranks2.run(verify_cases.in_float32):
        assert right == ""
        assert "(1e-03 is allowed, in torch.float32)" in wrong


def test_right_plans_of_other_models_pass(ranks2):
    assert ranks2.run(verify_cases.like_the_whole_in_bfloat16) == [["", "", ""]] * 2


@pytest.mark.parametrize("how", partial_cases.WAYS)
def test_adamw_does_what_it_does_unsharded(how, ranks2):
    assert ranks2.run(partial_cases.trained_alike, how, timeout=120) == [[], []]


def test_adamw_on_four_ranks(ranks4):
    assert ranks4.run(partial_cases.trained_alike, "plain") == [[]] * 4


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_under_data_parallel_wrappers(wrapper, ranks4):
    assert ranks4.run(partial_cases.data_parallel, wrapper) == [[]] * 4


def test_plan_may_say_it_and_is_checked(ranks2):
    first, second = ranks2.run(partial_cases.declared)
    assert first == second
    assert first["declared"] == []
    kind, text = first["untold"]
    assert kind == "ValueError"
    assert "'attentions.0.scale' stands beside layers that are split, and it cannot be told" in text
    for case, name in (("wrong", "q_norm.weight"), ("whole one", "norms.1.weight")):
        kind, text = first[case]
        assert kind == "ValueError"
        assert f"{name}' is off by" in text, text
    assert "'attentions.0.scale' stands beside layers that are split" in first["reentrant"][1]


def test_what_cannot_be_right_is_refused(ranks2):
    first, second = ranks2.run(partial_cases.refused)
    assert first == second
    expected = {
        "all heads": "'attentions.0.q.1' does not take this rank's features, though it takes all of them",
        "gate": "reaches both full features and, past no column, those that ranks split",
        "norm": "the first module whose output differs is 'down', and the last before it that agrees is 'up'",
    }
    for case, part in expected.items():
        assert first[case][0] == "ValueError"
        assert part in first[case][1], first[case]


def test_gradients_without_sums_are_seen(ranks2):
    for kind, text in ranks2.run(partial_cases.without_sums):
        assert kind == "ValueError"
        assert "the gradient of 'attentions." in text
        assert "is off by" in text


@pytest.mark.parametrize("kind", ["reset", "configured", "told"])
def test_buffers_are_computed_again(kind, ranks2):
    assert ranks2.run(buffer_cases.computed_again, kind) == [[], []]


@pytest.mark.parametrize("kind", ["alone", "half"])
def test_buffers_that_nobody_can_compute_are_named(kind, ranks2):
    first, second = ranks2.run(buffer_cases.set_by_hand, kind)
    assert first == second
    *both, one, differs = first
    for error, text in both:
        assert error == "RuntimeError"
        assert "expected the numbers of 'scaled.factors', 'scaled.shift', which the model was built" in text
    assert "expected the numbers of 'scaled.shift', which" in one[1]
    assert differs == []


def test_tied_weights_stay_tied(ranks2):
    assert ranks2.run(buffer_cases.tied_again) == [[], []]


def test_buffers_that_are_there_are_not_emptied(ranks2):
    assert ranks2.run(buffer_cases.carried_over) == [[], []]


SIZES = {
    "llama": {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "gpt2": {
        "vocab_size": 37,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 8,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
for sizes in SIZES.values():
    sizes |= {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("tensor", [2, 4])
def test_models_of_transformers(tensor, ranks4):
    pytest.importorskip("transformers", reason="transformers is not installed")
    for wrong in ranks4.run(huggingface_alike, SIZES, tensor, timeout=150):
        assert wrong == []
