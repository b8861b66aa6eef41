"""Megatron-Core's layers and GPTModel, and ours in their place, compute the same: `make check-megatron`."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.interop import megatron_layer_cases as layer_cases
from tests.interop.megatron_gpt import STEPS, Case, compare, replicas_after_training
from tests.interop.megatron_layer_cases import LayerCase
from tests.ranks import RankPool

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None or torch.cuda.is_available(),
    reason="megatron-core is not installed (make check-megatron installs it), or there is a GPU: this runs "
    "with stand-ins for CUDA",
)

SEQUENCE, FUSED = {"sequence_parallel": True}, {"gradient_accumulation_fusion": True}
EXPERT = {"is_expert": True, "skip_bias_add": True}
NO_WEIGHT = {"skip_weight_param_allocation": True, "bias": False}
LAYERS = {
    "column": LayerCase("column"),
    "column_without_bias": LayerCase("column", {"bias": False}),
    "column_skips_bias": LayerCase("column", {"skip_bias_add": True}),
    "column_gathers": LayerCase("column", {"gather_output": True}),
    "column_gathers_if_called_so": LayerCase("column", call={"runtime_gather_output": True}),
    "column_does_not_if_called_so": LayerCase(
        "column", {"gather_output": True}, call={"runtime_gather_output": False}
    ),
    "column_sequence": LayerCase("column", config=SEQUENCE),
    "column_fused": LayerCase("column", config=FUSED),
    "column_sequence_fused": LayerCase("column", config=SEQUENCE | FUSED),
    "column_frozen": LayerCase("column", {"bias": False}, frozen=True),
    "column_frozen_sequence": LayerCase("column", {"bias": False}, config=SEQUENCE | FUSED, frozen=True),
    "column_expert": LayerCase("column", EXPERT),
    "column_expert_sequence_fused": LayerCase("column", EXPERT, config=SEQUENCE | FUSED),
    "column_leaves_dgrad": LayerCase("column", {"disable_grad_reduce": True}),
    "column_leaves_dgrad_fused": LayerCase("column", {"disable_grad_reduce": True}, config=FUSED),
    "column_stride": LayerCase("column", {"stride": 2}),
    "column_given_weight": LayerCase("column", NO_WEIGHT, given_weight=True),
    "column_given_weight_fused": LayerCase("column", NO_WEIGHT, config=FUSED, given_weight=True),
    "row": LayerCase("row"),
    "row_skips_bias": LayerCase("row", {"skip_bias_add": True}),
    "row_of_full_input": LayerCase("row", {"input_is_parallel": False}),
    "row_sequence": LayerCase("row", config=SEQUENCE),
    "row_sequence_skips_bias": LayerCase("row", {"skip_bias_add": True}, config=SEQUENCE),
    "row_fused": LayerCase("row", config=FUSED),
    "row_sequence_fused": LayerCase("row", config=SEQUENCE | FUSED),
    "row_frozen": LayerCase("row", config=FUSED, frozen=True),
    "row_expert": LayerCase("row", EXPERT),
    "row_expert_sequence_fused": LayerCase("row", EXPERT, config=SEQUENCE | FUSED),
    "row_stride": LayerCase("row", {"stride": 2}),
    "embedding": LayerCase("embedding"),
    "embedding_sequence": LayerCase("embedding", {"reduce_scatter_embeddings": True}, config=SEQUENCE),
}
ADDED_IN_CHUNKS = {"d weight", "main_grad of weight"}  # of tokens, under sequence parallelism

LLAMA = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}
LEARNABLE = Case(config={"softmax_type": "learnable"})  # its offsets are a shard of heads
SAME_BITS = {
    "plain": Case(),
    "tied": Case(tied=True),
    "rope_gqa_swiglu": Case(rope=True, config=LLAMA | {"normalization": "LayerNorm"}),
    "qk_norm": Case(rope=True, config={"qk_layernorm": True}),
    "learnable_softmax": LEARNABLE,
    "ddp": Case(ddp={}),
    "ddp_tied_fused": Case(ddp={}, tied=True, config=FUSED, microbatches=2),
    "distributed_optimizer": Case(ddp={"use_distributed_optimizer": True}, tied=True, config=FUSED),
    "virtual_pipeline": Case(pp=2, vpp=2, microbatches=4, ddp={}, tied=True, config=FUSED),
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
ROUNDED = {
    "sequence_experts": Case(ddp={}, config=SEQUENCE | FUSED | EXPERTS | {"add_bias_linear": False}),
    "rms_norm": Case(rope=True, config=LLAMA),
    "sequence": Case(config=SEQUENCE),
    "sequence_rope_gqa": Case(rope=True, config=LLAMA | SEQUENCE),
    "sequence_tied_fused": Case(ddp={}, tied=True, config=SEQUENCE | FUSED, microbatches=2),
    "sequence_distributed_optimizer": Case(
        ddp={"use_distributed_optimizer": True}, config=SEQUENCE | FUSED, rope=True
    ),
    "sequence_virtual_pipeline": Case(pp=2, vpp=2, microbatches=4, ddp={}, config=SEQUENCE | FUSED),
}


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:  # of its own: Megatron and the stand-ins for CUDA stay in a process
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def by_rank(two):
    answers = two.run(layer_cases.both, list(LAYERS.values()))
    return [dict(zip(LAYERS, answer, strict=True)) for answer in answers]


@needs_megatron
@pytest.mark.parametrize("name", LAYERS)
def test_layer_gives_what_megatrons_does(by_rank, name):
    for rank in by_rank:
        theirs, ours = rank[name]
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                chunked = key in ADDED_IN_CHUNKS and "sequence" in name
                tolerance = 1e-6 if chunked else 0.0
                torch.testing.assert_close(
                    ours[key],
                    value,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, key=key: f"{key}: {text}",
                )
            else:
                assert ours[key] == value, key


@needs_megatron
def test_frozen_column_leaves_its_bias_a_gradient(two):
    """Megatron's does not: its function for a frozen weight forgets the bias."""
    cases = [LayerCase("column", frozen=True), LayerCase("column")]
    for (theirs, ours), (_, trained) in two.run(layer_cases.both, cases):
        assert theirs["d bias"] is None
        assert ours["d weight"] is None
        assert torch.equal(ours["d bias"], trained["d bias"])


@needs_megatron
@pytest.mark.parametrize("limit", [0, 2])
def test_deferred_gradients_are_those_of_megatrons_drain(two, limit):
    for later, at_once in two.run(layer_cases.deferred, limit):
        assert at_once.abs().max() > 1
        torch.testing.assert_close(later, at_once, rtol=1e-6, atol=1e-5)


@needs_megatron
def test_what_is_not_supported_is_refused_by_name():
    with RankPool(2) as own:  # Megatron finds no apex there afterwards
        own.run(layer_cases.refusals)


@needs_megatron
@pytest.mark.parametrize(("ours", "marks"), [(True, (True, 0)), (False, (False, -1))])
def test_learnable_softmax_offsets_are_no_replicas(two, ours, marks):
    """Marked in a model with our layers, and described by Megatron itself in one without."""
    assert two.run(replicas_after_training, LEARNABLE, ours) == [["nothing", marks]] * 2


@needs_megatron
def test_layers_replaces_inside_and_only_there(two):
    ours, theirs = "tpkernels.interop.megatron_core", "megatron.core.tensor_parallel.layers"
    subclass = layer_cases.__name__
    inside = [f"{ours}.linear", subclass, f"{ours}.replace"]
    after = [theirs, subclass, "torch.nn.modules.normalization"]
    assert two.run(layer_cases.inside_and_after_layers) == [[*inside, *after]] * 2


@needs_megatron
def test_spec_provider_names_ours(two):
    column, row = "linear.ColumnParallelLinear", "linear.RowParallelLinear"
    named = [column, row, "replace.build_norm", column, row]
    expected = [f"tpkernels.interop.megatron_core.{name}" for name in named]
    assert two.run(layer_cases.named_by_spec_provider) == [expected] * 2


def losses(results):
    """Megatron's and ours, of ranks of the last stage, where they fall."""
    found = [(each.theirs, each.ours) for each in results if each.theirs]
    assert found
    for theirs, _ in found:
        assert len(theirs) == STEPS
        assert theirs[-1] < theirs[0] - 0.05
    return found


def largest(results):
    pairs = [pair for both in losses(results) for pair in zip(*both, strict=True)]
    return max(abs(theirs - ours) for theirs, ours in pairs)


@needs_megatron
@pytest.mark.parametrize("name", SAME_BITS)
def test_gpt_trains_to_the_same_bits(request, name):
    results = ranks_for(request, SAME_BITS[name]).run(compare, SAME_BITS[name])
    for theirs, ours in losses(results):
        assert ours == theirs
    assert [each.apart for each in results] == [0.0] * len(results)


@needs_megatron
@pytest.mark.parametrize("name", ROUNDED)
def test_gpt_trains_alike(request, name):
    """Where tokens are added in chunks, or by our RMSNorm."""
    assert largest(ranks_for(request, ROUNDED[name]).run(compare, ROUNDED[name])) < 1e-6


def ranks_for(request, case):
    wants_four = case.pp > 1 or (case.ddp or {}).get("use_distributed_optimizer")
    return request.getfixturevalue("four" if wants_four else "two")


def layers_of(model, kind):
    return [layer for layer in model.modules() if type(layer).__name__ == kind]


def add_bias_on_each_rank(model):
    for layer in layers_of(model, "RowParallelLinear"):
        layer.register_forward_hook(lambda _, __, output: (output[0], 2 * output[1]))


def leave_norms_partial(model):
    for parameter in (each for layer in layers_of(model, "LayerNorm") for each in layer.parameters()):
        parameter.sequence_parallel = False


def leave_dgrad_partial(model):
    for layer in layers_of(model, "ColumnParallelLinear"):
        layer.allreduce_dgrad, layer.disable_grad_reduce = False, True


def count_norms_twice(model):
    for parameter in (each for layer in layers_of(model, "LayerNorm") for each in layer.parameters()):
        parameter.register_hook(lambda gradient: 2 * gradient)


@needs_megatron
@pytest.mark.parametrize(
    ("plant", "config"),
    [
        (add_bias_on_each_rank, {}),
        (leave_dgrad_partial, {}),
        (leave_norms_partial, SEQUENCE),
        (count_norms_twice, SEQUENCE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_comparison_sees_planted_faults(two, plant, config):
    assert largest(two.run(compare, Case(config=config), STEPS, plant)) > 1e-5


def test_nothing_is_imported_before_it_is_used():
    program = (
        "import sys; from tpkernels.interop import megatron_core\n"
        "dir(megatron_core)\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
        "sys.modules['megatron'] = None\n"
        "assert 'install' in dir(megatron_core) and 'layers' not in dir(megatron_core)\n"
        "try:\n    megatron_core.layers\nexcept ImportError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "pip install megatron-core" in ran.stdout
