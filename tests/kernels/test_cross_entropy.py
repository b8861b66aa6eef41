"""Vocabulary-parallel cross-entropy: padding, extremes, layouts; the oracles against torch's autograd."""

import pytest
import torch
import triton.language as tl
from torch.nn import functional
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.checks import LAYOUTS, assert_accurate, normal
from tests.products import once
from tpkernels.kernels import reference
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.reference import cross_entropy_grad_ref, softmax_statistics_ref

FIRST_ID = 100


def totals(statistics):
    """Of all ranks together, where another rank has one logit, 2.5, for each row."""
    maximum = statistics[0].clamp_min(2.5)
    total = statistics[1] * (statistics[0] - maximum).exp() + (2.5 - maximum).exp()
    return maximum, total


PADDED = 80  # a row of whole 16-byte units, and two and a half tiles of the interpreter


@once(
    columns=[0, 1, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 79, 80],
    padding=[float("nan"), float("inf"), float("-inf")],
)
def test_padding_is_loaded_and_counts_for_nothing(columns, padding, device):
    """The bits of logits that end at `columns`, which are loaded element by element."""
    padded = torch.full((5, PADDED), padding, dtype=torch.bfloat16, device=device)
    padded[:, :columns] = 3 * normal(5, columns, torch.bfloat16, device)
    ending = padded[:, :columns].contiguous()
    ours, ignored, of_others = (0, columns - 1), -1, (columns, columns + 3)
    target = torch.tensor([*ours, ignored, *of_others], device=device)
    dloss = torch.randn(5, device=device)
    statistics = softmax_statistics(padded, target, columns=columns)
    assert torch.equal(statistics, softmax_statistics(ending, target))
    maximum, total = totals(statistics)
    dlogits = cross_entropy_grad(padded, target, maximum, total, dloss, columns=columns)
    assert torch.equal(dlogits[:, :columns], cross_entropy_grad(ending, target, maximum, total, dloss))
    assert not dlogits[:, columns:].any()
    over = cross_entropy_grad(padded, target, maximum, total, dloss, columns=columns, in_place=True)
    assert torch.equal(over, dlogits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter shows what is loaded")
@pytest.mark.parametrize("width", [PADDED, 83])
@pytest.mark.parametrize("columns", [9, 33, 80])
def test_no_load_leaves_a_row(width, columns, monkeypatch):
    """Not even for padding: behind the last row there may be no memory at all."""
    logits, target = normal(5, width, torch.bfloat16, "cpu"), torch.tensor([0, 1, -1, 8, 0])
    statistics = softmax_statistics(logits, target, columns=columns)
    loaded: set[int] = set()

    def load(self, ptrs, mask, *others):
        if ptrs.get_element_ty() == tl.bfloat16:  # as nothing but the logits is
            loaded.update(ptrs.data[mask.data.astype(bool)].tolist())
        return sound(self, ptrs, mask, *others)

    sound = InterpreterBuilder.create_masked_load
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    softmax_statistics(logits, target, columns=columns)
    cross_entropy_grad(logits, target, *totals(statistics), statistics[0], columns=columns)
    tiles_end = min(width, -(-columns // 32) * 32)
    assert loaded == {
        logits[row, column].data_ptr() for row in (0, 1, 3, 4) for column in range(tiles_end)
    }  # and none of the row that is ignored


EXTREME = {
    "huge": [1e4, -1e4, 9999.0, 0.0],
    "shifted": [1e4, 1e4 + 1, 1e4 - 1, 1e4],
    "masked": [1.0, float("-inf"), 2.0, float("-inf")],
    "lowest": [torch.finfo(torch.float32).min] * 2 + [0.0, 1.0],
    "nothing_else": [float("-inf")] * 3 + [5.0],
}


@pytest.mark.parametrize("row", EXTREME.values(), ids=EXTREME.keys())
def test_extreme_logits_neither_overflow_nor_cancel(row, device):
    """Behind many moderate blocks and before them, so that the maximum grows, and does not."""
    for logits in (torch.tensor(row), torch.tensor([*row, *[-3.0] * 70]), torch.tensor([*[-3.0] * 70, *row])):
        logits = logits[None].to(device)
        target = torch.tensor([int(logits[0].argmax())], device=device)
        maximum, total, picked, _ = softmax_statistics(logits, target)
        exact = functional.cross_entropy(logits.double(), target)
        loss = (total.log() + (maximum - picked))[0].double()
        torch.testing.assert_close(loss, exact, rtol=1e-6, atol=1e-7)
        given = maximum, total, torch.ones(1, device=device)
        ours = cross_entropy_grad(logits, target, *given)
        truth = cross_entropy_grad_ref(logits.double(), target, *(one.double() for one in given))
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(value, device):
    for place in (0, 40, 69):
        logits = torch.zeros(1, 70, device=device)
        logits[0, place] = value
        statistics = softmax_statistics(logits, torch.zeros(1, dtype=torch.int64, device=device))
        assert statistics[1].isnan().all()
        assert softmax_statistics_ref(logits, torch.tensor([0], device=device))[1].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_cross_entropy_takes_any_layout(layout, device):
    logits = layout(normal(9, 40, torch.float16, device))
    target = torch.randint(40, (9,), device=device, dtype=torch.int32)
    statistics = softmax_statistics(logits, target)
    exact = softmax_statistics_ref(logits.double(), target)
    dloss = torch.ones(9, device=device)
    assert_accurate(statistics[:2], exact[:2])
    ours = cross_entropy_grad(logits, target, statistics[0], statistics[1], dloss)
    assert_accurate(ours, cross_entropy_grad_ref(logits.double(), target, exact[0], exact[1], dloss.double()))


def test_cross_entropy_takes_no_tokens(device):
    logits, none = torch.empty(0, 8, device=device), torch.empty(0, dtype=torch.int64, device=device)
    statistics = softmax_statistics(logits, none)
    assert statistics.shape == (4, 0)
    assert cross_entropy_grad(logits, none, *statistics[:2], statistics[0]).shape == (0, 8)


def test_rows_do_not_depend_on_the_batch(device):
    logits, target = normal(9, 70, torch.bfloat16, device), torch.arange(9, device=device)
    whole = softmax_statistics(logits, target)
    assert torch.equal(softmax_statistics(logits[4:5], target[4:5])[:, 0], whole[:, 4])


def test_cross_entropy_oracles_match_autograd(device):
    logits = torch.randn(9, 20, dtype=torch.float64, device=device, requires_grad=True)
    target, smoothing = torch.randint(20, (9,), device=device), 0.1
    maximum, total, picked, summed = softmax_statistics_ref(logits.detach(), target)
    normalizer = total.log() + maximum
    loss = (1 - smoothing) * (normalizer - picked) + smoothing * (normalizer - summed / 20)
    exact = functional.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(loss, exact)
    dloss = torch.randn_like(exact)
    (dlogits,) = torch.autograd.grad(exact, logits, dloss)
    ours = cross_entropy_grad_ref(
        logits.detach(), target, maximum, total, dloss, on_target=1 - smoothing, off_target=smoothing / 20
    )
    torch.testing.assert_close(ours, dlogits)


def test_oracle_does_not_tell_what_an_ignored_token_has(device):
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]], device=device)
    target = torch.tensor([0, -1, -1], device=device)
    maximum, total, *_ = softmax_statistics_ref(logits, target)
    gradient = cross_entropy_grad_ref(logits, target, maximum, total, torch.ones(3, device=device))
    assert not gradient[1:].any()
    assert gradient[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_oracles_read_a_few_rows_after_the_other_and_write_over_logits(dtype, monkeypatch):
    logits, columns = 3 * normal(13, 83, dtype, "cpu"), 77
    logits[:, columns:] = float("inf")  # padding, which would win
    target = torch.randint(FIRST_ID - 20, FIRST_ID + columns + 20, (13,))  # ours and of others
    target[::5] = -1
    statistics = softmax_statistics_ref(logits, target, columns, FIRST_ID)
    assert statistics.dtype == torch.float32
    for cached in (1, 3 * columns, 12 * columns):
        monkeypatch.setattr(reference, "CACHED", cached)
        assert torch.equal(softmax_statistics_ref(logits, target, columns, FIRST_ID), statistics)

    given = target, *totals(statistics), torch.randn(13), columns, FIRST_ID, 0.9, 0.001
    before, fresh = logits.clone(), cross_entropy_grad_ref(logits, *given)
    assert torch.equal(logits, before)
    assert not fresh[:, columns:].any()
    assert cross_entropy_grad_ref(logits, *given, True) is logits
    assert torch.equal(logits, fresh)
