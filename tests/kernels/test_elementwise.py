"""The pass behind a library's product: activations, gated units and their gradients, beside float64."""

import pytest
import torch

from tests.kernels.checks import DTYPES, LAYOUTS, assert_accurate, assert_written, dense, normal, rows_for
from tests.products import once, pairwise
from tpkernels.gate.numerics import BOUND
from tpkernels.kernels import elementwise, launch
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF, act_grad_ref, act_ref
from tpkernels.kernels.elementwise import act_grad, activate, glu_grad
from tpkernels.kernels.reference import bias_grad_ref, glu_grad_ref
from tpkernels.kernels.target import H100

# straddling the edges of the interpreter's block of 16 x 32
SHAPES = {
    "one_block": (16, 32),
    "ragged": (37, 45),
    "aligned": (40, 128),
    "one_row": (1, 136),
    "one_column": (600, 1),  # of few numbers a norm is that of one or two roundings
}


def activated(z, *, activation):
    return (activate(z, activation=activation),)


def gated(g, u, *, kind):
    return (activate(g, u, activation=GATE_OF[kind]),)


# name -> ours, torch's, how many operands
CALLS = {f"activate-{one}": (activated, {"activation": one}, 1) for one in ACTIVATIONS}
CALLS |= {f"activate-{kind}": (gated, {"kind": kind}, 2) for kind in GATE_OF}
CALLS |= {f"act_grad-{one}": (act_grad, {"activation": one, "bias_grad": True}, 2) for one in ACTIVATIONS}
CALLS |= {f"glu_grad-{kind}": (glu_grad, {"kind": kind}, 3) for kind in GATE_OF}


def by_torch(run, options, operands):
    if run is activated:
        return (act_ref(*operands, options["activation"]),)
    if run is gated:
        return (act_ref(operands[0], GATE_OF[options["kind"]]) * operands[1],)
    if run is act_grad:
        dz = act_grad_ref(*operands, options["activation"])
        return dz, bias_grad_ref(dz)
    return glu_grad_ref(*operands, options["kind"])


def assert_pass(name, operands):
    """Results are accurate, and operands as before."""
    run, options, _ = CALLS[name]
    before = [one.clone() for one in operands]
    ours = run(*operands, **options)
    torch.testing.assert_close(operands, before, rtol=0, atol=0)
    truths = by_torch(run, options, [one.double() for one in operands])
    torchs = by_torch(run, options, [dense(one) for one in operands])
    for number, (one, truth, other) in enumerate(zip(ours, truths, torchs, strict=True)):
        if truth.ndim == 1:  # relative to what is summed, which may cancel; of dz before it was rounded
            assert one.dtype == torch.float32
            size = truths[0].abs().sum(0).norm()
            fast = one.is_cuda and operands[0].dtype != torch.float32
            bound = BOUND[operands[0].dtype if fast else torch.float32]  # epilogues.FAST is of 16 bits
            assert (one.double() - truth).norm() <= bound * size
        else:
            assert one.dtype == other.dtype
            assert_accurate(one, truth, other, f"result {number} of {name}")


def operands_of(name, shape, dtype, device):
    return [normal(*shape, dtype, device) for _ in range(CALLS[name][2])]


@pairwise(name=list(CALLS), shape=SHAPES, dtype=DTYPES)
def test_pass_matches_float64(name, shape, dtype, device):
    assert_pass(name, operands_of(name, shape, dtype, device))


OPERANDS = {
    f"{name}-{number}": (name, number)
    for name in ("activate-swiglu", "act_grad-silu", "glu_grad-geglu")
    for number in range(CALLS[name][2])
}


@once(operand=OPERANDS, layout=LAYOUTS)
def test_pass_takes_any_layout_of_each_operand(operand, layout, device):
    name, number = operand
    operands = operands_of(name, (40, 64), torch.float16, device)
    operands[number] = layout(operands[number])
    assert_pass(name, operands)


@pairwise(name=["activate-swiglu", "act_grad-silu", "glu_grad-geglu"], shape=[(0, 8), (5, 0), (0, 0)])
def test_empty_matrices_have_results(name, shape, device):
    run, options, _ = CALLS[name]
    operands = operands_of(name, shape, torch.float32, device)
    torch.testing.assert_close(list(run(*operands, **options)), list(by_torch(run, options, operands)))


def launched(name, operands, out):
    run, options, _ = CALLS[name]
    if run in (activated, gated):
        return activate(*operands, activation=options.get("activation") or GATE_OF[options["kind"]], out=out)
    return run(*operands, **options, out=out)


@pytest.mark.parametrize("name", CALLS)
def test_pass_writes_into_given_rows_alone(name, device):
    operands = operands_of(name, (37, 45), torch.bfloat16, device)
    run, options, _ = CALLS[name]
    fresh = run(*operands, **options)
    out, around = rows_for(fresh)
    launched(name, operands, tuple(out))
    assert_written(out, around, fresh)


@pytest.mark.parametrize(("name", "number"), OPERANDS.values(), ids=OPERANDS)
def test_first_result_takes_the_place_of_any_operand(name, number, device):
    """Called three times: the last repeats the plan of the second."""
    run, options, _ = CALLS[name]
    for _ in range(3):
        operands = operands_of(name, (37, 45), torch.bfloat16, device)
        fresh = run(*operands, **options)
        others = [one.clone() for at, one in enumerate(operands) if at != number]
        out = (operands[number], *(torch.empty_like(one) for one in fresh[1:]))
        launched(name, operands, out)
        torch.testing.assert_close(list(out), list(fresh), rtol=0, atol=0)
        left = [one for at, one in enumerate(operands) if at != number]
        torch.testing.assert_close(left, others, rtol=0, atol=0)


def test_all_results_may_take_the_places_of_operands(device):
    dh, g, u = operands_of("glu_grad-swiglu", (37, 45), torch.bfloat16, device)
    fresh = glu_grad(dh, g, u)
    glu_grad(dh, g, u, out=(u, dh, g))
    torch.testing.assert_close([u, dh, g], list(fresh), rtol=0, atol=0)


def test_a_wide_matrix_is_read_in_two_halves(device):
    """As one product with both weights leaves them."""
    both = normal(37, 90, torch.bfloat16, device)
    g, u = both.chunk(2, dim=1)
    assert torch.equal(
        activate(g, u, activation="silu"), activate(g.contiguous(), u.contiguous(), activation="silu")
    )


def test_nan_and_infinity_stay_where_they_are(device):
    z, dy = normal(37, 45, torch.float32, device), normal(37, 45, torch.float32, device)
    z[3, 5], dy[7, 9] = float("nan"), float("inf")
    dz, db = act_grad(dy, z, "silu", bias_grad=True)
    assert db is not None
    assert dz.isfinite().logical_not().nonzero().tolist() == [[3, 5], [7, 9]]
    assert db.isfinite().logical_not().nonzero().flatten().tolist() == [5, 9]
    for activation in ACTIVATIONS:
        assert activate(z, activation=activation).isnan().nonzero().tolist() == [[3, 5]]


def test_bias_gradient_is_of_what_was_not_rounded(device):
    """Whole rows of the same number: rounded ones would all be off alike."""
    dy = torch.full((256, 45), 1.0, dtype=torch.bfloat16, device=device)
    z = torch.full((256, 45), 0.3, dtype=torch.bfloat16, device=device)
    dz, db = act_grad(dy, z, "silu", bias_grad=True)
    exact = 256 * act_grad_ref(dy[:1].double(), z[:1].double(), "silu")[0]
    assert db is not None
    off = (db.double() - exact).abs().max() / exact.max()
    rounded = (dz.double().sum(0) - exact).abs().max() / exact.max()
    assert off < rounded / 10


def test_bias_gradient_has_the_same_bits_in_each_call(device):
    dy, z = (normal(137, 45, torch.bfloat16, device) for _ in range(2))
    first, second = (act_grad(dy, z, "gelu", bias_grad=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_only_results_that_are_asked_for_are_kept(device):
    z = normal(3, 5, torch.float32, device)
    assert act_grad(z, z, "silu").db is None


ONES = torch.ones(4, 8)
REFUSED = {
    "float64": (lambda: activate(ONES.double(), activation="silu"), "got torch.float64"),
    "3-D": (lambda: activate(ONES[None], activation="silu"), "z of 2 dimensions"),
    "two dtypes": (
        lambda: glu_grad(ONES, ONES.half(), ONES),
        "dh in torch.float32 and g in torch.float16",
    ),
    "activation": (lambda: activate(ONES, activation="tanh"), "activate: expected an activation of none"),
    "activation of a gradient": (lambda: act_grad(ONES, ONES, "tanh"), "act_grad: expected an activation"),
    "kind": (lambda: glu_grad(ONES, ONES, ONES, kind="silu"), "glu_grad: expected a gated unit of swiglu"),
    "shape": (
        lambda: activate(ONES, ONES[:, :4], activation="silu"),
        r"activate: expected u of shape \(4, 8\), that of z; got \(4, 4\)",
    ),
    "shape of u": (lambda: glu_grad(ONES, ONES, ONES[:2]), r"expected u of shape \(4, 8\), that of dh"),
    "count": (
        lambda: glu_grad(ONES, ONES, ONES, out=(torch.empty(4, 8),)),
        r"expected 3 tensors as out, dg \(4, 8\), du \(4, 8\), h \(4, 8\); got 1",
    ),
    "columns": (
        lambda: activate(ONES, activation="silu", out=torch.empty(4, 16)[:, :8]),
        "h of out contiguous",
    ),
    "rows of an operand": (
        lambda: activate((both := torch.ones(6, 8))[:4], activation="silu", out=both[1:5]),
        "h of out with memory of its own, got some of z",
    ),
    "another view of an operand": (
        lambda: act_grad(one := torch.ones(4, 8), ONES, "silu", out=one.view(4, 8)),
        "dz of out with memory of its own, got some of dy",
    ),
    "twice": (
        lambda: glu_grad(ONES, ONES, one := torch.ones(4, 8), out=(one, one, torch.empty(4, 8))),
        "du of out with memory of its own, got some of dg",
    ),
    "dtype of a sum": (
        lambda: act_grad(ONES, ONES, "silu", bias_grad=True, out=(torch.empty(4, 8), torch.empty(8).half())),
        "db of out in torch.float32",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tensors are on the CPU")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_program_numbers_of_half_a_million_rows_fit_a_grid():
    """Recorded, as no test has the memory."""
    x = torch.empty(2**19, 2**13, dtype=torch.bfloat16, device="meta")
    with launch.recording(H100) as launches:
        activate(x, activation="silu")
        act_grad(x, x, "silu")
        glu_grad(x, x, x)
    assert [one.grid for one in launches] == [(2**20,)] * 3


def test_a_product_read_at_another_row_is_noticed(monkeypatch, device):
    """What the bound above can tell."""
    start = elementwise._start

    def shifted(kernel, operands, results, **constants):
        start(kernel, (operands[0].roll(1, 0), *operands[1:]), results, **constants)

    monkeypatch.setattr(elementwise, "_start", shifted)
    with pytest.raises(AssertionError, match="against float64"):
        assert_pass("glu_grad-swiglu", operands_of("glu_grad-swiglu", (37, 45), torch.bfloat16, device))
