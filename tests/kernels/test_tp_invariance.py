"""In TP-invariant mode kernels are chosen, and add, alike at every tensor-parallel size."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.kernels.checks import DTYPES
from tests.kernels.waiting import EPOCH, arrivals
from tests.products import once
from tests.segments import in_op
from tpkernels.kernels import invariance, launch
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.segments import segment_sum
from tpkernels.kernels.target import A100, B200, H100, MI300, RTX_5090, Target
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_
from tpkernels.tp_invariance import tree_sum

SEGMENTS = 8
SIZES = (1, 2, 4, 8)  # of the tensor-parallel group
GPUS = {"h100": H100, "b200": B200, "a100": A100, "mi300": MI300, "rtx5090": RTX_5090}
SEGMENT_WIDTHS = (8, 24, 64, 512, 1792, 3584)  # of what is split
RAGGED_WIDTHS = (1, 3, 4, 12, 45)


@pytest.fixture(autouse=True)
def _tp_invariant() -> Iterator[None]:
    with in_op(SEGMENTS):
        yield


def meta(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype, device="meta")


# tokens, the width of a rank's shard, all features of the other kind, segments of the shard -> launches
CALLS = {
    "column": lambda t, n, k, _, of: linear_fwd(of(t, k), of(n, k), activation="gelu", keep_z=True),
    "glu": lambda t, n, k, _, of: glu_fwd(of(t, k), of(n, k), of(n, k), keep_gu=True),
    "row_dgrad": lambda t, n, k, _, of: dgrad(of(t, k), of(k, n)),
    "row_dgrad_act": lambda t, n, k, _, of: dgrad_act(of(t, k), of(k, n), of(t, n), "silu"),
    "dglu": lambda t, n, k, _, of: dglu(of(t, k), of(k, n), of(t, n), of(t, n), emit_h=True),
    "column_wgrad": lambda t, n, k, _, of: wgrad(of(t, n), of(t, k)),
    "row_wgrad": lambda t, n, k, _, of: wgrad(of(t, k), of(t, n), dtype=torch.float32),
    "main_grad": lambda t, n, k, _, of: wgrad_accumulate_(meta(n, k, torch.float32), of(t, n), of(t, k)),
    "row": lambda t, n, k, s, of: segment_sum([(of(t, n), of(k, n))], transposed=True, segments=s),
    "column_dgrad": lambda t, n, k, s, of: segment_sum([(of(t, n), of(n, k))], transposed=False, segments=s),
    "two_dgrads": lambda t, n, k, s, of: segment_sum(
        [(of(t, n), of(n, k))] * 2, transposed=False, segments=s
    ),
}


class Refused(Exception):
    """By the rule for one form."""


def launched(call: str, target: Target, dtype: torch.dtype, ranks: int, width: int, other: int, tokens: int):
    """Kernel, constants and types of operands of all products that a rank launches."""
    own = SEGMENTS // ranks
    try:
        with launch.recording(target) as launches:
            CALLS[call](tokens, own * width, other, own, partial(meta, dtype=dtype))
    except ValueError as error:
        if "TP-invariance expected rows of whole, aligned 16-byte units" in str(error):
            raise Refused from error
        raise
    return {
        (one.kernel.__name__, *(_chosen(one, name, value) for name, value in one.named.items()))
        for one in launches
        if "BLOCK_DEPTH" in one.constants
    }


def _chosen(one: launch.Launch, name: str, value: object) -> tuple[str, object]:
    constants = (*launch.compiled_in(one.kernel), "num_warps", "num_stages")
    return name, value if name in constants else type(value).__name__


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("call", CALLS)
def test_form_and_tile_are_one_at_every_size(call, dtype):
    for target, width in product(GPUS, SEGMENT_WIDTHS):
        found = [launched(call, GPUS[target], dtype, ranks, width, 512, 256) for ranks in SIZES]
        found += [launched(call, GPUS[target], dtype, 4, width, 512, tokens) for tokens in (1, 129, 2**17)]
        assert len(found[0]) == 1, "one kernel, one tile"
        assert all(at_a_size == found[0] for at_a_size in found), (target, width)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("call", CALLS)
def test_what_would_change_the_form_is_refused(call, dtype):
    """At the sizes at which rows are no whole 16-byte units; at all others the form is one."""
    for target, width in product(GPUS, RAGGED_WIDTHS):
        found = []
        for ranks in SIZES:
            with suppress(Refused):
                found.append(launched(call, GPUS[target], dtype, ranks, width, 512, 256))
        assert all(at_a_size == found[0] for at_a_size in found), (target, width)
        refused = len(SIZES) - len(found)
        assert bool(refused) == (dtype != torch.float32), "where shards are narrowest, at least"


@pytest.mark.parametrize("call", ["column", "row_dgrad", "column_wgrad", "row_wgrad", "glu"])
def test_in_plain_mode_they_do_change(call):
    """Else the tests above prove nothing."""
    for width in (512, 12):
        with in_op(0):
            found = [launched(call, H100, torch.bfloat16, ranks, width, 2048, 4096) for ranks in SIZES]
        assert any(one != found[0] for one in found), width


LAYOUTS = {
    "misaligned": lambda: torch.empty(64 * 64 + 1, dtype=torch.bfloat16, device="meta")[1:].view(64, 64),
    "odd_pitch": lambda: meta(64, 67)[:, :64],
    "transposed": lambda: meta(64, 64).t(),
    "expanded": lambda: meta(1, 1).expand(64, 64),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_views_that_contradict_are_refused_by_name(make):
    with launch.recording(H100) as launches:
        with pytest.raises(ValueError, match=r"linear_fwd: TP-invariance expected .* but x (starts|has) "):
            linear_fwd(make(), meta(64, 64))
        linear_fwd(meta(0, 64), meta(64, 64))  # nothing of it
        wgrad(meta(0, 64), meta(0, 64))  # zeros
        with in_op(0):
            linear_fwd(make(), meta(64, 64))
    assert len(launches) == 2


@once(dtype=DTYPES, width={"aligned": 8, "ragged": 21})
def test_a_kernel_that_waits_has_the_bits_of_linear(width, dtype, device):
    """Of shards of a column layer at 4 ranks, against the full weight at 1."""
    x, w = torch.randn(48, 72, device=device).to(dtype), torch.randn(4 * width, 72, device=device).to(dtype)
    if torch.cuda.is_available() and width % 8:
        pytest.skip("refused there")
    here = arrivals(device, EPOCH, EPOCH, EPOCH)
    gathered = partial(linear_fwd, x, arrivals=here)
    shards = [gathered(one, first_row=16, activation="gelu").y for one in w.split(width)]
    assert torch.equal(torch.cat(shards, dim=1), linear_fwd(x, w, activation="gelu").y)
    shards = [dgrad(x, one.t().contiguous(), arrivals=here, first_row=32) for one in w.split(width)]
    assert torch.equal(torch.cat(shards, dim=1), dgrad(x, w.t().contiguous()))


def random_pairs(count, tokens, depth, cols, transposed, dtype, device):
    shape = (cols, depth) if transposed else (depth, cols)
    return [
        (torch.randn(tokens, depth, device=device).to(dtype), torch.randn(shape, device=device).to(dtype))
        for _ in range(count)
    ]


def sums_of_ranks(pairs, transposed, ranks, segments):
    """Of shards as ranks hold them: contiguous."""

    def split(matrix, dim):
        return [shard.contiguous() for shard in matrix.chunk(ranks, dim)]

    depth = 1 if transposed else 0
    shards = [zip(split(a, 1), split(w, depth), strict=True) for a, w in pairs]
    return [
        segment_sum([*own], transposed=transposed, segments=segments) for own in zip(*shards, strict=True)
    ]


SUMS = {  # how many products, whether of transposed weights, how deep a segment
    "linear": (1, True, 37),
    "dgrad": (1, False, 37),
    "two_dgrads": (2, False, 16),
    "three_dgrads": (3, False, 8),
    "two_linears": (2, True, 8),
}


@once(products=SUMS, dtype=DTYPES)
def test_segment_sum_has_the_bits_of_every_number_of_ranks(products, dtype, device):
    """Segments deeper than a block and ragged, or of less than one; columns of one block and a bit."""
    count, transposed, width = products
    if torch.cuda.is_available() and width % 8:
        pytest.skip("refused there")
    pairs = random_pairs(count, 20, SEGMENTS * width, 40, transposed, dtype, device)
    found = [
        tree_sum(sums_of_ranks(pairs, transposed, ranks, SEGMENTS // ranks)) for ranks in (1, 2, SEGMENTS)
    ]
    exact = sum(a.double() @ (w.double().t() if transposed else w.double()) for a, w in pairs)
    assert found[0].dtype == torch.float32
    assert (found[0].double() - exact).norm() / exact.norm() < 3e-7
    for at_a_size in found:
        assert torch.equal(at_a_size, found[0])


@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "as_it_lies"])
def test_a_plain_sum_of_ranks_has_other_bits(transposed, device):
    """The test above can fail: products of shards of another depth, added in order."""
    pairs = random_pairs(1, 32, 256, 32, transposed, torch.float32, device)
    plain = [sum(sums_of_ranks(pairs, transposed, ranks, 1)) for ranks in SIZES]
    assert any(not torch.equal(one, plain[0]) for one in plain)


def test_more_segments_than_slots_are_summed_by_halves(device):
    """The same tree, of any number of them."""
    pairs = random_pairs(2, 16, 16 * 3, 20, False, torch.float32, device)
    whole = segment_sum(pairs, transposed=False, segments=16)
    assert torch.equal(whole, sum(sums_of_ranks(pairs, False, 2, 8)))
    assert torch.equal(whole, tree_sum(sums_of_ranks(pairs, False, 16, 1)))


@pytest.mark.parametrize("shape", [(0, 64, 8), (4, 0, 8), (4, 64, 0)], ids=["tokens", "depth", "cols"])
def test_segment_sum_takes_empty(shape, device):
    tokens, depth, cols = shape
    for transposed in (True, False):
        pairs = random_pairs(1, tokens, depth, cols, transposed, torch.bfloat16, device)
        y = segment_sum(pairs, transposed=transposed, segments=SEGMENTS)
        assert y.shape == (tokens, cols)
        assert not y.any()


def test_segment_sum_refuses_what_cannot_work(device):
    pairs = random_pairs(1, 4, 20, 8, True, torch.float32, device)
    with pytest.raises(ValueError, match="a power of two of segments, got 3"):
        segment_sum(pairs, transposed=True, segments=3)
    with pytest.raises(ValueError, match=r"a depth that 8 segments divide, got \(4, 20\)"):
        segment_sum(pairs, transposed=True, segments=8)


def test_bias_gradients_are_summed_row_after_row():
    """No sum across threads, whose layout follows from the alignment of the shard."""
    with launch.recording(H100) as launches:
        bias_grad(meta(8192, 24))
    assert {one.constants["BLOCK_ROWS"] for one in launches} == {1}


@pytest.mark.parametrize(
    ("segments", "batch", "expected"),
    [(8, False, "TPKERNELS_TP_INVARIANT=8"), (8, True, "TPKERNELS_TP_INVARIANT=8"),
     (0, True, "TPKERNELS_BATCH_INVARIANT=1"), (0, False, "")],
)  # fmt: skip
def test_what_forbids_choices_is_named(segments, batch, expected, monkeypatch):
    monkeypatch.setattr(invariance, "batch_invariant", batch)
    with in_op(segments):
        assert invariance.why_fixed() == expected
