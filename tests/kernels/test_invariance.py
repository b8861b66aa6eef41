"""With TPKERNELS_BATCH_INVARIANT=1 a row has the same bits in a batch of any size."""

import runpy

import pytest
import torch

from tests.kernels.launchers import OF_ROWS, PRODUCTS, arguments
from tests.products import once, pairwise
from tpkernels.kernels import invariance, launch, tiles
from tpkernels.kernels.target import A100, H100, MI300
from tpkernels.kernels.tiles import MatmulTile

TOKENS = 100
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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


def assert_same_bits(name, sizes, dtype, device):
    call = arguments(name, (TOKENS, sizes[1], sizes[0]), dtype, device)
    call |= {"bias_grad": False} if name == "dgrad_act" else {}

    def rows(first, last):
        batch = [one[first:last] if getattr(one, "shape", [0])[0] == TOKENS else one for one in call.values()]
        results = PRODUCTS[name].by_kernel(*batch)
        return [results] if isinstance(results, torch.Tensor) else [one for one in results if one is not None]

    full = rows(0, TOKENS)
    for first, last in BATCHES:
        for ours, all_rows in zip(rows(first, last), full, strict=True):
            assert torch.equal(ours, all_rows[first:last]), (first, last)


@pytest.mark.usefixtures("_choice_of_tiles")
@once(name=OF_ROWS, sizes=SIZES, dtype=DTYPES)
def test_row_has_the_same_bits_in_every_batch(name, sizes, dtype, device):
    assert_same_bits(name, sizes, dtype, device)


@pytest.mark.usefixtures("_choice_of_tiles")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may add up alike in other tiles")
@pytest.mark.parametrize("name", OF_ROWS)
def test_without_the_variable_bits_do_differ(name, device, monkeypatch):
    monkeypatch.setattr(invariance, "batch_invariant", False)
    with pytest.raises(AssertionError):
        assert_same_bits(name, SIZES["aligned"], torch.float32, device)


def chosen(x, weight, target=H100):
    """Form and tile of a product."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    matrices = (("x", x), ("weight", weight), ("the result", y))
    return launch.choose("linear_fwd", "linear", target, matrices, tuple(y.shape), None, None)


@pairwise(
    sizes=[(4096, 4096), (45, 64), (64, 45), (1, 64)],
    dtype=DTYPES,
    target={"h100": H100, "a100": A100, "mi300": MI300},
)
def test_form_and_tile_do_not_depend_on_rows(sizes, dtype, target):
    weight = torch.empty(*sizes, dtype=dtype, device="meta")
    batches = (weight.new_empty(rows, sizes[1]) for rows in (1, 2, 3, 16, 129, 4096, 2**17))
    assert len({chosen(x, weight, target) for x in batches}) == 1


def test_without_the_variable_they_do_depend(monkeypatch):
    """Else the tests above prove nothing."""
    monkeypatch.setattr(invariance, "batch_invariant", False)
    test = test_form_and_tile_do_not_depend_on_rows
    for sizes in ((4096, 4096), (45, 64)):
        with pytest.raises(AssertionError):
            test(sizes, torch.bfloat16, H100)


def test_row_of_a_view_is_judged_by_the_pitch_of_the_view():
    """One row of a matrix whose rows are 43 elements apart goes the way of the whole matrix."""
    wide = torch.empty(64, 43, dtype=torch.bfloat16, device="meta")[:, :40]
    weight = torch.empty(24, 40, dtype=torch.bfloat16, device="meta")
    assert chosen(wide, weight)[0] == chosen(wide[:1], weight)[0] == "pointer"


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
