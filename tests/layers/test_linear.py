"""Column and row layers, one rank at a time: shapes, attributes, options, and mistakes that never get far."""

import gc
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch

import tpkernels
from tests.layers.worlds import posing
from tpkernels import ColumnParallelLinear, ParallelMLP, RMSNorm, RowParallelLinear
from tpkernels.comm.calls import Calls
from tpkernels.layers import replicas
from tpkernels.layers.attributes import Attributes

PACKAGE = Path(tpkernels.__file__).parent


@pytest.fixture
def in_two():
    with posing(1, 2):
        yield


@pytest.fixture
def nothing_moves(monkeypatch):
    """Whatever would be sent is a failure, but for what compares inputs."""

    def refuse(*_, **__):
        raise AssertionError("a transfer was made before the mistake was found")

    monkeypatch.setattr(Calls, "begin", refuse)
    monkeypatch.setattr(replicas, "steps_between_checks", 0)


def test_parameters_say_how_they_are_split(in_two):
    column = ColumnParallelLinear(4, 12, stride=3, gather_output=False)
    assert column.output_size_per_partition == 6
    for parameter in column.parameters():
        assert Attributes.of(parameter) == Attributes(True, 0, 3)
    row = RowParallelLinear(12, 4, stride=2)
    assert row.input_size_per_partition == 6
    assert Attributes.of(row.weight) == Attributes(True, 1, 2)
    assert Attributes.of(row.bias) == Attributes()


def test_row_bias_is_partial_only_where_the_caller_adds_it(in_two):
    options = {"input_is_parallel": True, "sequence_parallel": True}
    assert not RowParallelLinear(4, 4, **options).bias.sequence_parallel
    assert RowParallelLinear(4, 4, skip_bias_add=True, **options).bias.sequence_parallel
    assert not RowParallelLinear(4, 4, skip_bias_add=True).bias.sequence_parallel


def test_bias_starts_at_zero_or_is_absent(in_two):
    for layer in (ColumnParallelLinear, RowParallelLinear):
        assert layer(4, 6).bias.eq(0).all()
        assert layer(4, 6, False).bias is None


def test_representation_tells_the_shard(in_two):
    said = "ColumnParallelLinear(4, 6, bias=True, rank 1 of 2 holds weight (3, 4))"
    assert repr(ColumnParallelLinear(4, 6)) == said
    assert "bias=False, rank 1 of 2 holds weight (6, 2)" in repr(RowParallelLinear(4, 6, bias=False))
    assert "holds no weight" in repr(ColumnParallelLinear(4, 6, skip_weight_param_allocation=True))


def test_master_weight_is_kept_when_asked_for(in_two):
    layer = RowParallelLinear(4, 6, keep_master_weight_for_test=True, dtype=torch.bfloat16)
    assert layer.master_weight.dtype == torch.bfloat16
    assert torch.equal(layer.master_weight[:, 2:], layer.weight)
    assert RowParallelLinear(4, 6).master_weight is None
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_external_weight_takes_the_place_of_its_own(in_two):
    layer = ColumnParallelLinear(4, 6, skip_weight_param_allocation=True, gather_output=False)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    y, _ = layer(x, weight)
    torch.testing.assert_close(y, x @ weight.t())
    y.sum().backward()
    assert weight.grad is not None
    with pytest.raises(ValueError, match=r"expected a weight in forward: .* and has none"):
        layer(x)


BAD_LAYERS = {
    "no input": (lambda: ColumnParallelLinear(0, 6), "input_size must be a positive integer, got 0"),
    "negative": (lambda: RowParallelLinear(4, -6), "output_size must be a positive integer, got -6"),
    "stride": (lambda: ColumnParallelLinear(4, 6, stride=2), r"x stride \(2\) = 4; choose a multiple of 4"),
    "activation": (lambda: ColumnParallelLinear(4, 6, activation="sigmoid"), "expected an activation of"),
    "1-D init": (lambda: RowParallelLinear(4, 6, init_method=lambda w: w.flatten()), r"shape \(6, 4\)"),
    "bias after activation": (
        lambda: ColumnParallelLinear(4, 6, activation="gelu", skip_bias_add=True),
        "expected no activation with skip_bias_add",
    ),
}


@pytest.mark.parametrize(("build", "words"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_layer_that_cannot_be_is_refused(in_two, build, words):
    with pytest.raises(ValueError, match=words):
        build()


def column(**options):
    return ColumnParallelLinear(4, 6, **({"gather_output": False} | options))


def row(**options):
    return RowParallelLinear(4, 6, **({"input_is_parallel": True} | options))


BAD_INPUTS = {
    "column width": (lambda: column()(torch.randn(3, 5)), r"expected input \(..., 4\), got \(3, 5\)"),
    "row width": (lambda: row()(torch.randn(3, 4)), r"expected input \(..., 2\).*=False takes all features"),
    "row whole width": (lambda: row(input_is_parallel=False)(torch.randn(3, 2)), r"input \(..., 4\).*=True"),
    "no dimensions": (lambda: column()(torch.tensor(1.0)), r"got \(\)"),
    "sequence": (lambda: row(sequence_parallel=True)(torch.randn(3, 2)), "of x divisible by the 2 ranks"),
    "dtype": (lambda: column(sequence_parallel=True)(torch.randn(3, 4).half()), "expected one dtype"),
    "only features": (lambda: column(sequence_parallel=True)(torch.randn(4)), "tokens, ..., in_features"),
    "mlp width": (lambda: ParallelMLP(4, 6)(torch.randn(2, 3)), r"expected input \(..., 4\), got \(2, 3\)"),
    "mlp dtype": (lambda: ParallelMLP(4, 6)(torch.randn(2, 4).double()), "expected one dtype"),
    "norm width": (lambda: RMSNorm(4)(torch.randn(2, 3)), r"weight \(3,\) for x \(2, 3\), got \(4,\)"),
    "weight": (lambda: column()(torch.randn(2, 4), torch.randn(6, 4)), r"expected a weight \(3, 4\)"),
    "main_grad": (
        lambda: column(gradient_accumulation_fusion=True)(torch.randn(2, 4)),
        "expected weight.main_grad with",
    ),
}


@pytest.mark.parametrize(("call", "words"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_input_that_does_not_fit_is_refused_before_anything_moves(in_two, nothing_moves, call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_a_transfer_would_be_seen(in_two, nothing_moves):
    with pytest.raises(AssertionError, match="before the mistake was found"):
        column(sequence_parallel=True)(torch.randn(3, 4))


def test_sequence_parallelism_is_nothing_on_one_rank():
    with posing(0, 1):
        column = ColumnParallelLinear(4, 6, sequence_parallel=True)
        row = RowParallelLinear(6, 4, input_is_parallel=True, sequence_parallel=True, skip_bias_add=True)
        assert not column.sequence_parallel
        assert not row.bias.sequence_parallel
        x = torch.randn(4)  # not even a sequence
        torch.testing.assert_close(row(column(x)[0])[0], x @ column.weight.t() @ row.weight.t())
        with pytest.raises(ValueError, match="expected input_is_parallel=True"):
            RowParallelLinear(4, 6, sequence_parallel=True)


@pytest.mark.parametrize("later", ["another", "none"])
def test_a_main_grad_that_is_replaced_before_backward_is_told(later):
    with posing(0, 1):
        layer = ColumnParallelLinear(4, 6, gradient_accumulation_fusion=True)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        y, _ = layer(torch.ones(3, 4))
        layer.weight.main_grad = torch.zeros_like(layer.weight) if later == "another" else None
        with pytest.raises(RuntimeError, match="expected the weight's main_grad of forward in backward"):
            y.sum().backward()


def calls_before_op(run):
    """Python calls of ours in `run`, by name, until those of its op."""
    found = []

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.append((path.relative_to(PACKAGE).parts[0], frame.f_code.co_name))

    gc.disable()  # what it ends is not of this call
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    own = takewhile(lambda call: call[0] in ("layers", "groups"), found)
    return [name for _, name in own]


LAYERS = {
    "column": (lambda: ColumnParallelLinear(4, 8, gather_output=False), (2, 4)),
    "row": (lambda: RowParallelLinear(8, 4, input_is_parallel=True), (2, 4)),
    "mlp": (lambda: ParallelMLP(4, 8), (2, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_warm_forward_looks_at_its_group_alone(layer, in_two):
    make, shape = LAYERS[layer]
    module, x = make(), torch.ones(shape, requires_grad=True)
    for _ in range(2):
        module(x)
    comprehensions = ["<listcomp>"] * (layer == "mlp" and sys.version_info < (3, 12))
    assert calls_before_op(lambda: module(x)) == ["forward", *comprehensions, "group", "is_alive"]
