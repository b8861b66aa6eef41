"""`row_linear` and `parallel_mlp` that end in a residual and a norm: the bits of three ops, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops.invariant_cases import drawn, leaf, whole_of
from tests.ops.test_parallel_citizens import unlike_compiled
from tests.ops.transport_cases import using
from tests.products import pairwise
from tests.segments import tp_invariance
from tpkernels import ops
from tpkernels.comm import schedule
from tpkernels.comm.calls import calls_of
from tpkernels.comm.tensor_parallel import Moved
from tpkernels.comm.transports.c10d import collectives_of
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch import norms
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel import residual_norm
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS
from tpkernels.ops.tensor_parallel.parallel import ALONE
from tpkernels.ops.tensor_parallel.residual_norm import ResidualNorm
from tpkernels.ops.tensor_parallel.ways import Trial

TOKENS, BATCH, IN, OUT, SEGMENTS = 16, 3, 48, 80, 8


@dataclass(frozen=True)
class Case:
    op: str = "row"
    kind: str = "rms_norm"
    zero_centered: bool = False
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    wide_residual: bool = False
    main_grad: bool = False
    segments: int = 0
    small_chunks: bool = False  # else all rows go with the header of their call


def leaves(case: Case) -> dict[str, tuple[Tensor, int | None]]:
    """Each operand, and the dimension along which ranks have others."""
    tokens = 0 if case.sequence_parallel else None
    wide = torch.promote_types(case.dtype, torch.float32) if case.wide_residual else case.dtype
    found = {
        "residual": (leaf(drawn(1, TOKENS, BATCH, OUT), tokens, wide), tokens),
        "norm_weight": (
            leaf(drawn(2, OUT) / 9, None, torch.float32 if case.wide_residual else case.dtype),
            None,
        ),
        "bias": (leaf(drawn(3, OUT), None, case.dtype), None),
    }
    if case.kind == "layer_norm":
        found["norm_bias"] = leaf(drawn(4, OUT), None, wide), None
    if case.op == "row":
        found["x"] = leaf(drawn(5, TOKENS, BATCH, IN), 2, case.dtype), 2
        found["w"] = leaf(drawn(6, OUT, IN) / 9, 1, case.dtype), 1
    else:
        found["x"] = leaf(drawn(5, TOKENS, BATCH, OUT), tokens, case.dtype), tokens
        found["up"] = leaf(drawn(6, IN, OUT) / 9, 0, case.dtype), 0
        found["gate"] = leaf(drawn(7, IN, OUT) / 9, 0, case.dtype), 0
        found["down"] = leaf(drawn(8, OUT, IN) / 9, 1, case.dtype), 1
    return found


def operate(case: Case, given: dict[str, Tensor], main_grads: dict[str, Tensor], **added: Any) -> Any:
    options = {"sequence_parallel": case.sequence_parallel, "tp_invariant": case.segments, **added}
    bias, group = given["bias"], dist.group.WORLD
    if case.op == "row":
        return ops.row_linear(given["x"], given["w"], bias, group, main_grad=main_grads.get("w"), **options)
    if case.op == "gated":
        options |= {"w_gate_shard": given["gate"], "activation": "swiglu"}
    weights = ["up", "gate", "down"] if case.op == "gated" else ["up", "down"]
    options["main_grads"] = [main_grads.get(name) for name in weights]
    return ops.parallel_mlp(given["x"], given["up"], None, given["down"], bias, group, **options)


def in_one(case: Case, given: dict[str, Tensor], main_grads: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    norm = ops.Norm(given["norm_weight"], given.get("norm_bias"), 1e-3, case.kind, case.zero_centered)
    return operate(case, given, main_grads, residual=given["residual"], norm=norm)


def in_turn(case: Case, given: dict[str, Tensor], main_grads: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Op, addition and norm."""
    h = given["residual"] + operate(case, given, main_grads)
    group = dist.group.WORLD if case.segments and case.sequence_parallel else None
    options = {"eps": 1e-3, "group": group, "tp_invariant": case.segments}
    weight = given["norm_weight"]
    if case.zero_centered:
        weight = weight.to(torch.promote_types(h.dtype, torch.float32)) + 1
    if case.kind == "rms_norm":
        return h, ops.rms_norm(h, weight, **options)
    return h, ops.layer_norm(h, weight, given["norm_bias"], **options)


Way = Callable[[Case, dict[str, Tensor], dict[str, Tensor]], tuple[Tensor, Tensor]]


def results(case: Case, way: Way) -> dict[str, Tensor]:
    """Outputs and gradients."""
    calls_of(dist.group.WORLD).kinds.clear()  # their transports may be those of another test
    named = leaves(case)
    given = {name: tensor for name, (tensor, _) in named.items()}
    main_grads = {
        name: torch.zeros_like(given[name]).float() for name in given if name in ("w", "up", "gate", "down")
    }
    h, normed = way(case, given, main_grads if case.main_grad else {})
    tokens = 0 if case.sequence_parallel else None
    gradients = [leaf(drawn(seed, TOKENS, BATCH, OUT), tokens, h.dtype).detach() for seed in (9, 10)]
    torch.autograd.backward([h, normed], gradients)
    found = {"h": h.detach(), "normed": normed.detach()}
    for name, tensor in given.items():
        fused = case.main_grad and name in main_grads
        assert not fused or tensor.grad is None
        if (gradient := main_grads[name] if fused else tensor.grad) is not None:
            found[f"d{name}"] = gradient
    return found


def assert_in_one_as_in_turn(case: Case) -> None:
    least = 64 if case.small_chunks else schedule.LEAST_BYTES
    with patch.object(schedule, "LEAST_BYTES", least):
        ours, expected = results(case, in_one), results(case, in_turn)
        given = {name: tensor for name, (tensor, _) in leaves(case).items()}
        with torch.no_grad():
            assert torch.equal(in_one(case, given, {})[1], ours["normed"])
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pairwise(
    op=["row", "mlp", "gated"],
    kind=["rms_norm", "layer_norm"],
    zero_centered=[False, True],
    sequence_parallel=[False, True],
    dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64},
    wide_residual=[False, True],
    main_grad=[False, True],
    small_chunks=[False, True],
    size=[1, 2, 4],
)
def test_one_op_has_the_bits_of_three(
    op, kind, zero_centered, sequence_parallel, dtype, wide_residual, main_grad, small_chunks, size, request
):
    options = zero_centered, sequence_parallel, dtype, wide_residual, main_grad, 0, small_chunks
    request.getfixturevalue(f"ranks{size}").run(assert_in_one_as_in_turn, Case(op, kind, *options))


@pytest.mark.parametrize("op", ["row", "gated"])
@on_ranks(2)
def test_autocast_keeps_a_wide_residual(op):
    """The op computes in bf16; the residual and its norm stay in fp32."""
    case = Case(op, sequence_parallel=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = results(case, in_one), results(case, in_turn)
    assert ours["h"].dtype == ours["normed"].dtype == torch.float32
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def whole(case: Case, way: Way) -> dict[str, Tensor]:
    """Results as one rank would have them; gradients of a norm are sums over ranks' tokens."""
    dims = {f"d{name}": dim for name, (_, dim) in leaves(case).items()}
    dims |= dict.fromkeys(("h", "normed"), 0 if case.sequence_parallel else None)
    found = results(case, way)
    for name in ("dnorm_weight", "dnorm_bias"):
        if case.sequence_parallel and not case.segments and name in found:
            dist.all_reduce(found[name])
    return {name: whole_of((tensor, dims[name])) for name, tensor in found.items()}


@pairwise(
    op=["row", "mlp", "gated"], kind=["rms_norm", "layer_norm"], zero_centered=[False, True], segments=[0, 8]
)
def test_every_size_gives_one_ranks_results(op, kind, zero_centered, segments, ranks1, ranks2, ranks4):
    """In float64; with TP-invariance in bf16, to the bit."""
    dtype = torch.bfloat16 if segments else torch.float64
    case = Case(op, kind, zero_centered, dtype=dtype, segments=segments)
    (alone,) = ranks1.run(whole, case, in_turn)
    for ranks in (ranks1, ranks2, ranks4):
        for sequence_parallel in (False, True):
            for found in ranks.run(whole, replace(case, sequence_parallel=sequence_parallel), in_one):
                for name, tensor in alone.items():
                    allowed = 0.0 if segments else 1e-12 * tensor.norm()
                    assert (found[name] - tensor).norm() <= allowed, name


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@on_ranks(1)
def test_gradients_are_those_of_differences(kind):
    case = Case("gated", kind, dtype=torch.float64)
    named = {name: tensor.detach()[..., :6].clone() for name, (tensor, _) in leaves(case).items()}
    named = {n: t[:3, :2] if t.ndim == 3 else t[:6] for n, t in named.items()}
    names = [*named]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return in_one(case, dict(zip(names, tensors, strict=True)), {})

    assert torch.autograd.gradcheck(run, [t.clone().requires_grad_() for t in named.values()])


@pytest.mark.parametrize("segments", [0, SEGMENTS])
@on_ranks(2)
def test_one_graph_has_the_bits_of_eager(segments):
    weight, up, bias = (torch.randn(size).requires_grad_() for size in ((16, 16), (16, 16), (16,)))
    with tp_invariance(segments) if segments else nullcontext():

        def block(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Tensor:
            group, residual = dist.group.WORLD, x[: len(x) // 2] * 2
            norm = ops.Norm(weight[0], bias, kind="layer_norm", zero_centered=True)
            options = {"sequence_parallel": True, "norm": norm}
            h, normed = ops.row_linear(x, weight, None, group, residual=residual, **options)
            h, normed = ops.parallel_mlp(normed, up, None, weight, bias, group, residual=h, **options)
            return h * normed

        xs = [torch.randn(tokens, 3, 16).requires_grad_() for tokens in (16, 32)]
        assert not unlike_compiled(block, [[x, weight, up, bias] for x in xs])


@pytest.mark.parametrize("wide_residual", [False, True])
@pytest.mark.parametrize("transport", ["shared", "stand-in"])
@on_ranks(2)
def test_the_kernel_that_adds_slots_does_the_rest(transport, wide_residual):
    """By the interpreter, over memory that ranks share."""
    found, add_slots = [], ResidualNorm.add_slots
    dtype = torch.bfloat16 if wide_residual else torch.float32
    case = Case("row", "layer_norm", False, True, dtype, wide_residual)
    expected = results(case, in_turn)

    def noted(self: ResidualNorm, slots: Tensor, *args: Any, **how: Any) -> Tensor:
        found.append(tuple(slots.shape))
        return add_slots(self, slots, *args, **how)

    small = patch.object(schedule, "LEAST_BYTES", 64)
    second = patch.object(norms, "add_norm", side_effect=AssertionError("a second pass"))
    with using(transport, "triton"), patch.object(ResidualNorm, "add_slots", noted), second, small:
        ours = results(case, in_one)
    assert found == [(2, TOKENS * BATCH // 2, OUT)]
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= (5e-3 if wide_residual else 1e-6) * tensor.norm(), name


@on_ranks(2)
def test_sums_that_are_gathered_are_followed_behind_the_gather():
    """All rows of residual and norm, of which slots have a shard."""
    case = Case("row", "layer_norm")
    expected = results(case, in_turn)
    not_there = patch.object(ResidualNorm, "add_slots", side_effect=AssertionError("of a shard"))
    with using("stand-in", "triton"), not_there, patch.object(schedule, "LEAST_BYTES", 64):
        ours = results(case, in_one)
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= 1e-6 * tensor.norm(), name


@pytest.mark.parametrize("bias", [None, torch.randn(8)], ids=["nobias", "bias"])
def test_collectives_leave_what_follows_to_the_kernel(bias):
    """Slots keep their rows, which without a bias are else those of a wider matrix."""
    given = residual_norm.Added(torch.randn(4, 8), torch.rand(8), None, "rms_norm", 1e-5)
    slots, after = torch.randn(2, 4, 8), ResidualNorm(given)
    terms = Terms(4, 8, slots[0], slots[0].__getitem__, after=after)
    h = collectives_of(1, FLAG_KERNELS)._sum(slots, bias, terms)
    total = slots.sum(0) if bias is None else slots.sum(0) + bias
    torch.testing.assert_close(h, total + given.residual)
    assert after.of(h)[0] is h


@pytest.mark.parametrize(
    ("features", "fixed", "expected"),
    [(8192, "", True), (8192, "TPKERNELS_BATCH_INVARIANT=1", False), (8193, "", False)],
)
def test_slots_are_left_alone_where_rows_are_wide_or_bits_fixed(features, fixed, expected):
    """A wider row would spill; a norm's bits depend on the kernel, which with one rank has other slots."""
    x = torch.ones(2, features)
    given = residual_norm.Added(x, x[0], None, "rms_norm", 1e-5)
    terms = Terms(2, features, x, lambda rows: x[rows], alone=lambda bias: x.clone())
    with patch.object(residual_norm.invariance, "why_fixed", return_value=fixed):
        residual_norm.reduced("row_linear", terms, None, given, ALONE, residual_norm.Plain())
    assert (terms.after is not None) == expected


def test_ranks_time_sums_without_what_follows():
    """Not every way computes it, and ways are compared; sums of others are not taken for the call's."""
    given = residual_norm.Added(torch.ones(2, 8), torch.ones(8), None, "rms_norm", 1e-5)
    after, x = ResidualNorm(given), torch.ones(2, 8)
    terms = Terms(2, 8, x, lambda rows: x[rows], after=after)
    moved = Moved("row_linear", "reduces", 2, 8, x.dtype, x.device)
    trial = Trial(Mock(), moved, x, Mock(size=lambda: 2), Mock(**{"find.return_value": None}), terms)
    assert trial._terms is not None
    assert (trial._terms.after, terms.after) == (None, after)
    other = after.add_slots(torch.full((2, 2, 8), 3.0), None, tree=False)
    assert after.of(other)[0] is other
    assert (after.of(x)[0] == 2).all()


@on_ranks(2)
def test_without_gradients_any_tokens_will_do():
    """Segments of TP-invariance divide tokens for sums of gradients alone; a sample has any number."""
    case = Case("row", sequence_parallel=True, segments=4)
    odd = {name: tensor.detach() for name, (tensor, _) in leaves(case).items()}
    odd |= {"x": odd["x"][:6], "residual": odd["residual"][:3]}
    with torch.no_grad():
        assert all(map(torch.equal, in_one(case, odd, {}), in_turn(case, odd, {})))
    with pytest.raises(ValueError, match=r"tokens .* that this rank's 2 of the 4 segments"):
        in_one(case, odd, {})


def without_residual(y, residual, *rest):
    return y, *ADD_NORM(y, residual, *rest)[1:]


def of_the_sum_alone(y, residual, *rest):
    h, *_ = ADD_NORM(y, residual, *rest)
    return h, *ADD_NORM(y, torch.zeros_like(residual), *rest)[1:]


def without_plus(*args, plus):
    return NORM_GRADIENTS(*args, plus=torch.zeros_like(plus))


ADD_NORM, NORM_GRADIENTS = norms.add_norm, residual_norm.norm_gradients
FAULTS = {
    "a dropped residual": (norms, "add_norm", without_residual),
    "a norm of the sum alone": (norms, "add_norm", of_the_sum_alone),
    "a gradient of h that is left out": (residual_norm, "norm_gradients", without_plus),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_planted_faults_are_found(fault):
    with patch.object(*FAULTS[fault]), pytest.raises(AssertionError):
        assert_in_one_as_in_turn(Case("gated", sequence_parallel=True))


@on_ranks(2)
def test_fp8_products_may_end_in_a_norm():
    recipe = Recipe.rowwise(wgrad="bf16")
    x, w, residual, weight = torch.randn(4, 32), torch.randn(16, 32), torch.randn(4, 16), torch.rand(16)
    group, options = dist.group.WORLD, {"quantize": recipe}
    h, normed = ops.row_linear(x, w, None, group, residual=residual, norm=ops.Norm(weight), **options)
    y = ops.row_linear(x, w, None, group, **options)
    assert torch.equal(h, residual + y)
    assert torch.equal(normed, ops.rms_norm(h, weight))
    narrow = residual.half()
    h, _ = ops.row_linear(x, w, None, group, residual=narrow, norm=ops.Norm(weight), **options)
    assert torch.equal(h, narrow + y), "its dtype is that of an addition"


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks():
    x, w, residual, weight = torch.randn(4, 8), torch.randn(16, 8), torch.randn(4, 16), torch.rand(16)
    group = dist.group.WORLD

    def refused(match: str, error: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            ops.row_linear(x, w, None, group, **options)
        tokens = residual[:2] if options.get("sequence_parallel") else residual
        with pytest.raises(error, match=match.replace("row_linear", "parallel_mlp")):
            ops.parallel_mlp(tokens, w.t(), None, w, None, group, **options)

    refused(
        "row_linear: expected residual and norm together, got residual alone; pass norm", residual=residual
    )
    refused("row_linear: expected residual and norm together, got norm alone", norm=ops.Norm(weight))
    refused("expected an ops.Norm as norm, got Tensor", TypeError, residual=residual, norm=weight)
    with_norm = {"norm": ops.Norm(weight)}
    refused(r"expected residual \(4, 16\) like the output, got \(3, 16\)", residual=residual[:3], **with_norm)
    refused("this rank's tokens", residual=residual, sequence_parallel=True, **with_norm)
    refused("a floating-point residual, got torch.int64", TypeError, residual=residual.long(), **with_norm)
    refused("one device", residual=residual.to("meta"), **with_norm)
    refused(r"expected norm.weight \(16,\)", residual=residual, norm=ops.Norm(weight[:5]))
    refused("expected norm.weight in", TypeError, residual=residual, norm=ops.Norm(weight.half()))
    bias = ops.Norm(weight, weight[:3], kind="layer_norm")
    refused(r"expected norm.bias \(16,\)", residual=residual, norm=bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "batch_norm"}, "Norm: expected rms_norm or layer_norm as kind, got 'batch_norm'"),
        ({"bias": torch.ones(4)}, "Norm: expected no bias for rms_norm"),
        ({"eps": -1.0}, "Norm: expected an eps of 0 or more, got -1.0"),
    ],
)
def test_a_norm_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ops.Norm(torch.ones(4), **options)
