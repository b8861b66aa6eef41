"""Products by torch with one pass of ours behind: launches, memory, and one wide product for two weights."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dispatch.conftest import FakeTimer, call, need_interpreter, timed
from tests.dispatch.test_candidates import names
from tests.kernels.checks import assert_written, rows_for
from tests.ops.test_bytes_moved import BytesMoved
from tpkernels.dispatch import one_pass
from tpkernels.dispatch.candidates import TARGET_GPUS, candidates, tune_key
from tpkernels.dispatch.checking import scratch_like
from tpkernels.dispatch.products import PRODUCTS, dglu, dgrad_act, glu, linear
from tpkernels.dispatch.record import Layer
from tpkernels.gate import expectations
from tpkernels.gate.causes import REGISTER_UNIT
from tpkernels.gate.numerics import relative_error
from tpkernels.kernels import launch
from tpkernels.kernels.operands import are_halves, stacked
from tpkernels.kernels.reference import glu_ref
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import ELEMENTS
from tpkernels.registered.names import TABLE

T, N, K = 37, 48, 40
LAYER = Layer(T, N, K, torch.bfloat16, "gelu_tanh")


def weights():
    """Two that are halves of one matrix."""
    return (torch.randn(2 * N, K) / K**0.5).bfloat16().chunk(2)


@pytest.mark.parametrize(
    ("step", "changed", "offered"),
    [
        ("linear", {}, {"mm+activate"}),
        ("linear", {"activation": "none"}, set()),
        ("linear", {"training": False, "activation": "silu"}, set()),  # torch does it in place
        ("linear", {"dtype": torch.float64}, set()),
        ("glu", {}, {"mm+activate"}),
        ("glu", {"training": False}, {"mm+activate"}),
        ("dgrad_act", {}, {"mm+act_grad"}),
        ("dgrad_act", {"activation": "none"}, set()),
        ("dglu", {}, {"mm+glu_grad"}),
        ("dgrad", {}, set()),
        ("wgrad", {}, set()),
    ],
    ids=str,
)
def test_one_pass_is_offered_where_there_is_something_to_fuse(step, changed, offered):
    layer = Layer(**{"tokens": T, "out_features": N, "in_features": K, "activation": "gelu"} | changed)
    assert {name for name in names(step, layer) if "mm+" in name} == offered


STARTS_NONE = {"new_empty", "empty", "empty_like", "empty_strided", "promote_types"}


class Launches(TorchDispatchMode):
    """Counts kernels of torch, by name; views and allocations start none."""

    def __init__(self):
        super().__init__()
        self.of_torch = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in STARTS_NONE:
            self.of_torch[name] += 1
        return func(*args, **(kwargs or {}))


def launches(run, *arguments):
    """Kernels of torch and of ours that a way starts, on tensors without memory."""
    with torch.no_grad(), launch.recording(H100) as ours, Launches() as torchs:
        run(*arguments)
    return dict(torchs.of_torch) | Counter(one.kernel.__name__ for one in ours)


def samples(record):
    return record.sample(Layer(64, 128, 256, activation="relu2"))


# a record -> its ways, and what each starts: docs/which-kernels.md has these counts
COUNTS = {
    "linear-torch": (linear.by_torch, linear, {"addmm": 1, "relu": 1, "pow": 1}),
    "linear-mm+activate": (one_pass.LINEAR.run, linear, {"addmm": 1, "_activate_kernel": 1}),
    "linear-ours": (linear.by_kernel, linear, {"_linear_fwd_kernel": 1}),
    "glu-torch": (glu.by_torch, glu, {"mm": 2, "silu": 1, "mul": 1}),
    "glu-mm+activate": (one_pass.GLU.run, glu, {"mm": 2, "_activate_kernel": 1}),
    "glu-ours": (glu.by_kernel, glu, {"_glu_fwd_kernel": 1}),
    "dgrad_act-torch": (dgrad_act.by_torch, dgrad_act, {"mm": 1, "mul": 2, "relu": 1, "sum": 1}),
    "dgrad_act-mm+act_grad": (
        one_pass.DGRAD_ACT.run,
        dgrad_act,
        {"mm": 1, "_act_grad_kernel": 1, "_sum_rows_kernel": 1},
    ),
    "dgrad_act-ours": (dgrad_act.by_kernel, dgrad_act, {"_dgrad_kernel": 1, "_sum_rows_kernel": 1}),
    "dglu-torch": (dglu.by_torch, dglu, {"mm": 1, "silu": 1, "mul": 3, "silu_backward": 1}),
    "dglu-mm+glu_grad": (one_pass.DGLU.run, dglu, {"mm": 1, "_glu_grad_kernel": 1}),
    "dglu-ours": (dglu.by_kernel, dglu, {"_dglu_kernel": 1}),
}


@pytest.mark.parametrize(("run", "record", "started"), COUNTS.values(), ids=COUNTS)
def test_each_way_starts_so_many_kernels(run, record, started):
    assert launches(run, *samples(record)) == started


# T x F is the size of what lies between two products, and of nothing else
TOKENS, BETWEEN, HIDDEN = 64, 128, 384
UP, DOWN = Layer(TOKENS, BETWEEN, HIDDEN), Layer(TOKENS, HIDDEN, BETWEEN)
STEPS = {
    "`linear`, `gelu_tanh`, z kept": (linear, replace(UP, activation="gelu_tanh"), [one_pass.LINEAR]),
    "`linear`, `relu2`, z kept": (linear, replace(UP, activation="relu2"), [one_pass.LINEAR]),
    "`glu`, g and u kept": (glu, UP, [one_pass.GLU, one_pass.WIDE_GLU]),
    "`glu`, inference": (glu, replace(UP, training=False), [one_pass.GLU, one_pass.WIDE_GLU]),
    "`dgrad_act`, `gelu_tanh`, db": (
        dgrad_act,
        replace(DOWN, activation="gelu_tanh"),
        [one_pass.DGRAD_ACT],
    ),
    "`dgrad_act`, `relu2`, db": (dgrad_act, replace(DOWN, activation="relu2"), [one_pass.DGRAD_ACT]),
    "`dglu`": (dglu, DOWN, [one_pass.DGLU]),
}
PAGE = (Path(__file__).parents[2] / "docs/which-kernels.md").read_text()


UNTOUCHED = {"GATED": ("u_ptr",), "KEEP": ("g", "u")}  # where these constants are false


def is_between(tensor):
    """Also two of them side by side."""
    return tensor.ndim == 2 and tensor.shape[0] == TOKENS and tensor.shape[1] in (BETWEEN, 2 * BETWEEN)


def launches_and_passes(run, arguments):
    """How many kernels a way starts, and how often these read or write a matrix between two products."""
    moved = BytesMoved(is_between)
    with torch.no_grad(), launch.recording(H100) as ours, Launches() as torchs, moved:
        run(*arguments)
    by_ours = [
        getattr(value, "base", value)
        for one in ours
        for name, value in one.named.items()
        if not any(name in names and not one.constants.get(flag, True) for flag, names in UNTOUCHED.items())
    ]
    matrices = [each for each in by_ours if isinstance(each, torch.Tensor) and is_between(each)]
    passes = (moved.by_call.total() + sum(each.nbytes for each in matrices)) / (2 * TOKENS * BETWEEN)
    return f"{torchs.of_torch.total() + len(ours)}, {passes:g}"


@pytest.mark.parametrize("step", STEPS)
def test_page_counts_the_launches_and_passes_of_each_way(step):
    record, layer, libraries = STEPS[step]
    arguments = record.sample(layer)
    if record is glu:
        x, *_, kind, keep = arguments
        arguments = (x, *replace(layer, out_features=2 * BETWEEN).weight().chunk(2), kind, keep)
    ways = [record.by_torch, *(library.run for library in libraries), record.by_kernel]
    counted = [launches_and_passes(way, arguments) for way in ways]
    *_, row = (line for line in PAGE.splitlines() if line.startswith(f"| {step} |"))
    assert [cell.strip() for cell in row.split("|")[2:] if cell.strip()] == counted


def test_halves_are_those_of_one_matrix():
    whole, other = torch.randn(8, 4), torch.randn(8, 4)
    first, second = whole.chunk(2)
    assert are_halves(first, second)
    assert torch.equal(stacked(first, second), whole)
    assert are_halves(whole[2:4], whole[4:6])
    memory = bytearray(whole.numel() * 4)  # one tensor behind the other, by chance
    apart = [torch.frombuffer(memory, dtype=torch.float32, count=16, offset=at).view(4, 4) for at in (0, 64)]
    assert apart[1].data_ptr() - apart[0].data_ptr() == apart[0].nbytes
    for pair in (
        (second, first),
        (first, first),
        (first, other[4:]),
        (whole[:3], whole[4:7]),
        (whole[:2], whole[2:6]),
        whole.chunk(2, dim=1),
        (first, second.view(torch.int32)),
        apart,
        (whole[:0], whole[:0]),
    ):
        assert not are_halves(*pair)


def test_wide_product_is_offered_and_named_for_halves_alone():
    x, (gate, up) = torch.empty(T, K, dtype=torch.bfloat16), weights()
    for pair, there in (((gate, up), True), ((up, gate), False), ((gate.clone(), up), False)):
        key = tune_key(glu, x, *pair, "swiglu", True)
        found = [one.name for one in candidates(glu, key, TARGET_GPUS["h100"])]
        assert ("wide_mm+activate" in found) == there
        assert ("swiglu+gu+halves" in str(key)) == there


def test_scratch_of_halves_is_halves():
    x, (gate, up) = torch.empty(T, K), weights()
    _, one, two, *_ = scratch_like((x, gate, up, "swiglu", True), K, torch.device("cpu"))
    assert are_halves(one, two)
    assert not torch.equal(one, two)
    _, one, two, *_ = scratch_like((x, gate, up.clone(), "swiglu", True), K, torch.device("cpu"))
    assert not are_halves(one, two)


@pytest.mark.parametrize("keep", [True, False])
def test_wide_product_is_chosen_and_computes_what_torch_does(keep, make_tuner):
    """Weights of the same sizes that are apart are another key."""
    tuner = make_tuner(FakeTimer({"wide": 1.0, "": 2.0}))
    x, (gate, up) = torch.randn(T, K).bfloat16(), weights()
    exact = glu_ref(*(one.double() for one in (x, gate, up)), "swiglu", keep)
    torchs = glu_ref(x, gate, up, "swiglu", keep)
    for pair, products in (((gate, up), 1), ((gate.clone(), up.clone()), 2)):
        call(tuner, glu, x, *pair, "swiglu", keep)  # chooses
        with Launches() as counted:
            results = call(tuner, glu, x, *pair, "swiglu", keep)
        by_one = {"mm": 1} if products == 1 else {"mm": 2, "silu": 1, "mul": 1}
        assert {name: counted.of_torch[name] for name in by_one} == by_one
        for ours, truth, theirs in zip(results, exact, torchs, strict=True):
            assert (ours is None) == (truth is None)
            if ours is not None:  # g and u were rounded, as torch's are, and h once
                assert relative_error(ours, truth) <= 1.01 * relative_error(theirs, truth)


@pytest.mark.parametrize("keep", [True, False])
def test_wide_product_goes_into_given_tensors(keep):
    need_interpreter()
    x, (gate, up) = torch.randn(T, K).bfloat16(), weights()
    results = one_pass.GLU.run(x, gate, up, "swiglu", keep)
    out, around = rows_for(results)
    one_pass.WIDE_GLU.into(out, x, gate, up, "swiglu", keep)
    assert_written(out, around, results)


def test_a_pass_that_computes_something_else_is_dropped(make_tuner, monkeypatch, caplog):
    """The planted fault: what is checked before it is timed."""
    timer = FakeTimer({"mm+": 1.0, "": 2.0})
    careless = one_pass._glu_grad
    monkeypatch.setattr(
        one_pass, "_glu_grad", lambda dh, g, u, **how: careless(dh, u.clone(), g.clone(), **how)
    )
    arguments = scratch_like(dglu.sample(LAYER), N, torch.device("cpu"))
    timed(make_tuner(timer), PRODUCTS["dglu"], *arguments)
    assert "mm+glu_grad" not in timer.asked[0]
    assert "mm+glu_grad dropped" in caplog.text


COST = re.compile(r"\| \**`(\w+)`, `(\w+)`(?: \(erf\))?(, db)?\** \| (\d+) \| (\d+) \| (\d+) \| \d+ \|")


@pytest.mark.parametrize("row", COST.findall(PAGE), ids=lambda row: "-".join(row[:2]) + "+db" * bool(row[2]))
def test_page_names_the_instructions_that_were_compiled(row):
    kernel, epilogue, db, registers, instructions, an_element = row
    name = f"{kernel}/pointer/bf16/32x128/{epilogue}{'+db' * bool(db)}"
    budget = expectations.read(TABLE)["3.7"].of("sm_90", name)
    threads = 32 * ELEMENTS.num_warps
    elements = ELEMENTS.block_rows * ELEMENTS.block_cols // threads
    assert budget is not None
    handed_out = -(-budget.registers // REGISTER_UNIT) * REGISTER_UNIT
    assert (handed_out, budget.instructions["all"]) == (int(registers), int(instructions))
    assert int(an_element) in (int(instructions) // elements, -(-int(instructions) // elements))
    assert budget.spills == 0
