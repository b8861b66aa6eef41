"""With TPKERNELS_BATCH_INVARIANT=1 a row has the same bits in a batch of any size."""

import runpy

import pytest
import torch

from tpkernels.kernels import invariance, launch, tiles
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.target import A100, H100, MI300
from tpkernels.kernels.tiles import MatmulTile

TOKENS = 100
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = ["linear", "glu", "dgrad", "dgrad_pairs", "dgrad_act", "dglu"]
SIZES = {"aligned": (72, 80), "ragged_n": (45, 64), "ragged_k": (64, 45)}
# what a launcher chooses from in the interpreter here: tiles that add up in different orders, as GPUs have
TILES = (
    MatmulTile(32, 64, 32, num_warps=4, num_stages=1, parts=2, group=2),
    MatmulTile(16, 32, 64, num_warps=4, num_stages=1, parts=2, group=2),
)
# The interpreter multiplies by BLAS, which rounds the last rows of a block otherwise: there a row keeps its
# place in its tile. On a GPU it need not.
BATCHES = ((0, 1), (32, 33), (0, 21), (64, 97)) + ((7, 8), (5, 38)) * torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "batch_invariant", True)


@pytest.fixture
def _choice_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(tiles, "default_tiles", lambda *case: TILES)


def kernels_of(n, k, dtype, device):
    """Each kernel as a function of the rows of its batch, over what all rows share."""
    w, wg, b = (torch.randn(s, device=device).to(dtype) for s in ((n, k), (n, k), (n,)))
    x, dy, z, u = (torch.randn(TOKENS, m, device=device).to(dtype) for m in (k, n, k, k))
    return {
        "linear": lambda rows: linear_fwd(x[rows], w, b, activation="gelu", keep_z=True),
        "glu": lambda rows: glu_fwd(x[rows], wg, w, keep_gu=True),
        "dgrad": lambda rows: (dgrad(dy[rows], w),),
        "dgrad_pairs": lambda rows: (dgrad_pairs(dy[rows], w, dy[rows], wg),),
        "dgrad_act": lambda rows: dgrad_act(dy[rows], w, z[rows], "silu")[:1],
        "dglu": lambda rows: dglu(dy[rows], w, z[rows], u[rows], emit_h=True),
    }


def assert_same_bits(kernel, sizes, dtype, device):
    function = kernels_of(*sizes, dtype, device)[kernel]
    whole = function(slice(None))
    for first, last in BATCHES:
        part = function(slice(first, last))
        for ours, all_of_it in zip(part, whole, strict=True):
            assert torch.equal(ours, all_of_it[first:last]), (first, last)


@pytest.mark.usefixtures("_choice_of_tiles")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kernel", KERNELS)
def test_row_has_the_same_bits_in_every_batch(kernel, sizes, dtype, device):
    assert_same_bits(kernel, sizes, dtype, device)


@pytest.mark.usefixtures("_choice_of_tiles")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may add up alike in other tiles")
@pytest.mark.parametrize("kernel", KERNELS)
def test_without_the_variable_bits_do_differ(kernel, device, monkeypatch):
    monkeypatch.setattr(invariance, "batch_invariant", False)
    with pytest.raises(AssertionError):
        assert_same_bits(kernel, SIZES["aligned"], torch.float32, device)


@pytest.mark.parametrize("target", [H100, A100, MI300], ids=["h100", "a100", "mi300"])
@pytest.mark.parametrize("sizes", [(4096, 4096), (45, 64), (64, 45), (1, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_form_and_tile_do_not_depend_on_the_number_of_rows(sizes, dtype, target):
    n, k = sizes
    weight = torch.empty(n, k, dtype=dtype, device="meta")

    def chosen(rows):
        x, y = (torch.empty(rows, m, dtype=dtype, device="meta") for m in (k, n))
        matrices = (("x", x), ("weight", weight), ("the result", y))
        return launch.choose("linear_fwd", "linear", target, matrices, (rows, n), None, None)

    assert len({chosen(rows) for rows in (1, 2, 3, 16, 129, 4096, 2**17)}) == 1


def test_without_the_variable_they_do_depend(monkeypatch):
    """Else the tests above prove nothing."""
    monkeypatch.setattr(invariance, "batch_invariant", False)
    test = test_form_and_tile_do_not_depend_on_the_number_of_rows
    for sizes in ((4096, 4096), (45, 64)):
        with pytest.raises(AssertionError):
            test(sizes, torch.bfloat16, H100)


def test_row_of_a_view_is_judged_by_the_pitch_of_the_view():
    """One row of a matrix whose rows are 43 elements apart goes the way of the whole matrix."""
    wide = torch.empty(64, 43, dtype=torch.bfloat16, device="meta")[:, :40]
    weight = torch.empty(24, 40, dtype=torch.bfloat16, device="meta")

    def form(x):
        y = torch.empty(x.shape[0], 24, dtype=torch.bfloat16, device="meta")
        matrices = (("x", x), ("weight", weight), ("y", y))
        return launch.choose("linear_fwd", "linear", H100, matrices, (x.shape[0], 24), None, None)[0]

    assert form(wide) == form(wide[:1]) == "pointer"


def test_weight_gradient_chooses_as_ever(monkeypatch):
    dy, x = (torch.empty(64, n, dtype=torch.bfloat16, device="meta") for n in (256, 512))
    dw = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    arguments = ("wgrad", "wgrad", H100, (("dy", dy), ("x", x), ("dw", dw)), (256, 512), None, None)
    invariant = launch.choose(*arguments)
    monkeypatch.setattr(invariance, "batch_invariant", False)
    assert launch.choose(*arguments) == invariant


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_variable_is_read(value, expected, monkeypatch):
    monkeypatch.delenv("TPKERNELS_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("TPKERNELS_BATCH_INVARIANT", value)
    assert runpy.run_path(invariance.__file__)["batch_invariant"] is expected
