"""`reuse_quantized_weights`: what is quantized once, noticed and held; why nothing is kept without it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tpkernels import Recipe, ops, reuse_quantized_weights
from tpkernels.dispatch import primitives
from tpkernels.ops.quantized import weights as kept

ROWWISE = Recipe.rowwise()
K, N = 32, 16


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, ...]]]:
    """How often matrices of each shape were quantized."""
    counts: Counter[tuple[int, ...]] = Counter()
    original = primitives.quantize

    def counting(x: Tensor, *rest: object) -> Tensor:
        if not torch.compiler.is_compiling():  # compiled code would set the counts back to its own
            counts[tuple(x.shape)] += 1
        return original(x, *rest)

    monkeypatch.setattr(primitives, "quantize", counting)
    yield counts
    assert kept._kept._found is None


def layer(requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    return torch.randn(4, K, requires_grad=requires_grad), torch.randn(N, K, requires_grad=requires_grad)


def step(x: Tensor, weight: Tensor, recipe: Recipe = ROWWISE) -> Tensor:
    y = ops.linear(x, weight, quantize=recipe)
    if y.requires_grad:
        y.sum().backward()
    return y.detach()


def test_a_weight_is_quantized_once_in_each_direction(quantized):
    x, weight = layer()
    with reuse_quantized_weights():
        for _ in range(3):
            step(x, weight)
        assert (quantized[N, K], quantized[K, N]) == (1, 1)
        step(x, weight, Recipe.blockwise())  # another recipe holds other words
        assert (quantized[N, K], quantized[K, N]) == (2, 2)
        y = checkpoint(lambda x: ops.linear(x, weight, quantize=ROWWISE), x, use_reentrant=False)
        y.sum().backward()
        assert (quantized[N, K], quantized[K, N]) == (2, 2)
        y = ops.linear(x, weight, quantize=ROWWISE)
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    step(x, weight)
    assert (quantized[N, K], quantized[K, N]) == (3, 3)


def test_views_of_a_weight_are_told_apart(quantized):
    """Halves and transposes, and two weights that share one storage; what is reused has the same bits."""
    x, weight = torch.randn(4, K, requires_grad=True), torch.randn(K, K)
    views = [weight, weight.t(), weight[: K // 2], weight[K // 2 :], weight.view(K, K)]

    def results() -> list[Tensor]:
        x.grad = None
        return [*(step(x, view) for view in views), x.grad]

    expected = results()
    quantized.clear()
    with reuse_quantized_weights():
        for _ in range(2):
            assert all(ours.equal(y) for ours, y in zip(results(), expected, strict=True))
    assert (quantized[K, K], quantized[K // 2, K], quantized[K, K // 2]) == (4, 2, 2)


def anew(x: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(x, weight.detach().clone(), quantize=ROWWISE)


def test_a_weight_that_changes_is_noticed_where_torch_counts_it_or_without_the_context(quantized):
    """Other changes no version counter tells: the reason that there is no cache by versions alone."""
    x, weight = layer(False)
    with reuse_quantized_weights():
        before = step(x, weight)
        weight.add_(1)
        assert step(x, weight).equal(anew(x, weight))
        assert not step(x, weight).equal(before)
        weight.data = weight.data * 2
        assert step(x, weight).equal(anew(x, weight))
    version = weight._version
    weight.data.add_(1)
    assert weight._version == version
    assert step(x, weight).equal(anew(x, weight))
    with reuse_quantized_weights():  # which promises that there are none
        stale = step(x, weight)
        weight.data.add_(1)
        assert step(x, weight).equal(stale)
    with reuse_quantized_weights():  # what was kept before is forgotten
        assert step(x, weight).equal(anew(x, weight))


def test_storages_that_are_emptied_give_their_place_but_not_their_words(quantized, monkeypatch):
    """As FSDP2 does with the weights that it has gathered: all of a layer, then those of the next."""
    # an allocator usually gives the same place again; here all weights say that they lie there
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: 64)
    x, first, second = torch.randn(4, K), torch.randn(N, K), torch.randn(N, K)
    values = [first.clone(), second.clone()]
    expected = [ops.linear(x, value, quantize=ROWWISE) for value in values]
    second.untyped_storage().resize_(0)
    with reuse_quantized_weights():
        for _ in range(2):
            for weight, value, y in zip((first, second), values, expected, strict=True):
                weight.untyped_storage().resize_(4 * N * K)
                with torch.autograd._unsafe_preserve_version_counter(weight):
                    weight.copy_(value)
                assert step(x, weight).equal(y)
                weight.untyped_storage().resize_(0)


def test_contexts_nest_and_end_by_errors_and_in_several_threads(quantized):
    x, weight = layer(False)
    barrier = threading.Barrier(4)

    def often() -> None:
        for _ in range(50):
            with reuse_quantized_weights():
                pass
        barrier.wait(10)

    def failing() -> None:
        with reuse_quantized_weights():
            step(x, weight)
            raise KeyError

    with reuse_quantized_weights():
        with pytest.raises(KeyError):
            failing()
        step(x, weight)
        assert quantized[N, K] == 1
    step(x, weight)
    assert quantized[N, K] == 2
    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept._kept._depth == 0  # the last one to end forgets


def test_another_thread_finds_them_and_keeps_none_for_later(quantized):
    """Autograd's threads of GPUs do; one that is late adds to what is forgotten."""
    x, weight = layer(False)
    with reuse_quantized_weights():
        step(x, weight)
        thread = threading.Thread(target=step, args=(x, weight))
        thread.start()
        thread.join()
        assert quantized[N, K] == 1
    entered, ended = threading.Event(), threading.Event()
    other, original = layer(False)[1], primitives.quantize

    def slow(matrix: Tensor, *rest: object) -> Tensor:
        if matrix.shape == (N, K):
            entered.set()
            assert ended.wait(10)
        return original(matrix, *rest)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(primitives, "quantize", slow)
        with reuse_quantized_weights():
            thread = threading.Thread(target=step, args=(x, other))
            thread.start()
            assert entered.wait(10)
        ended.set()
        thread.join()
    other.data.add_(1)
    with reuse_quantized_weights():
        assert step(x, other).equal(ops.linear(x, other.clone(), quantize=ROWWISE))


def test_inference(quantized):
    """Inference tensors count no versions; what is quantized in inference mode serves training, too."""
    x, weight = layer()
    with torch.inference_mode():
        frozen = weight.detach().clone()
    with reuse_quantized_weights():
        with torch.inference_mode():
            inferred = step(x, weight)
            assert step(x, frozen).equal(inferred)
            frozen.add_(1)
            assert not step(x, frozen).equal(inferred)
        quantized.clear()
        assert step(x, weight).equal(inferred)
        assert quantized[N, K] == 0
        assert x.grad is not None


def test_memory_is_freed_at_the_end_and_weights_are_not_held(quantized):
    x, weight = layer(False)
    with reuse_quantized_weights():
        step(x, weight)
        words = [weakref.ref(words) for _, words in kept._kept._found.values()]
        held = weakref.ref(weight)
        del weight
        assert held() is None
    gc.collect()
    assert [word() for word in words] == [None]


def test_casts_of_autocast_do_not_pile_up(quantized):
    """Each call casts anew, so that nothing is reused; nor is anything kept of casts that are gone."""
    x, weight = layer()
    with reuse_quantized_weights(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(5):
            step(x, weight)
        assert quantized[N, K] == 5
        assert len(kept._kept._found) <= 2


def test_under_compile_weights_are_reused_where_the_context_is_open(quantized):
    """Its state is not compiled in: the same code quantizes anew outside."""
    x, weight = layer(False)
    compiled = torch.compile(lambda x, weight: ops.linear(x, weight, quantize=ROWWISE), backend="aot_eager")
    compiled(x, weight)
    quantized.clear()
    for _ in range(2):
        with reuse_quantized_weights():
            compiled(x, weight)
            compiled(x, weight)
    assert quantized[N, K] == 2
    weight.data.add_(1)
    assert compiled(x, weight).equal(ops.linear(x, weight.clone(), quantize=ROWWISE))
