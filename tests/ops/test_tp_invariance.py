"""The same bits at every tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels.tp_invariance
from tests.on_ranks import on_ranks
from tests.ops.invariant_cases import Setting, drawn, hashes, hashes_by_kernels, norm, whole_of
from tests.ops.test_parallel_citizens import unlike_compiled
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import ops
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.segment_heads import segment_heads
from tpkernels.ops.tensor_parallel.segments import canonical

DTYPES = (torch.float32, torch.bfloat16)
OPTIONS = {
    "column": ("", "gelu", "main_grad", "save_gathered"),
    "row": ("", "main_grad"),
    "mlp": ("gelu", "swiglu"),
    "embedding": ("",),
    "cross_entropy": ("", "smoothed", "overwritten", "weighted"),
    "head": ("", "none", "whole", "main_grad", "all_terms"),
    "logprobs": ("", "two", "top_k"),
    "norm": ("rms_norm", "layer_norm"),
    "heads": ("1", "2", "4"),
}


def asked_of(name: str, rest: bool) -> list[tuple[str, Setting]]:
    """Each option in one of the dtypes, in turn; `rest`: in the other one. With and without split tokens."""
    return [
        (name, Setting(DTYPES[(number + rest) % 2], sequence_parallel, option=option))
        for number, option in enumerate(OPTIONS[name])
        for sequence_parallel in (False, True)
    ]


@once(name=list(OPTIONS), rest=[False, True])
def test_every_size_gives_the_same_bits(name, rest, ranks1, ranks2, ranks4):
    asked = asked_of(name, rest)
    by_size = [ranks.run(hashes, 8, asked)[0] for ranks in (ranks1, ranks2, ranks4)]
    for number, (_, setting) in enumerate(asked):
        alone = by_size[0][number]
        assert len(set(alone.values())) > 1
        for found in by_size[1:]:
            assert found[number] == alone, setting
        if name not in ("embedding", "cross_entropy", "heads"):
            assert alone == by_size[0][number // 2 * 2], f"{setting}: as without sequence parallelism"


def norms_and_products(x: Tensor, w: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    """With TP-invariance heads that segments share, as well."""
    group = dist.group.WORLD
    y = ops.layer_norm(x, w[0], bias, group=group) * ops.rms_norm(x, w2[0], group=group)
    h = ops.column_linear(y, [w, w2], None, group, activation="gelu", sequence_parallel=True)
    y = ops.row_linear(h[0] * h[1], w, None, group, sequence_parallel=True)
    if tpkernels.tp_invariance.default.segments:
        y = y.sum() + segment_heads(h[0], group, 1).sin().sum() + segment_heads(y, group, 4).cos().sum()
    return y


@pytest.mark.parametrize("segments", [0, 8])
@on_ranks(2)
def test_one_graph_has_the_bits_of_eager_norms_and_heads(segments):
    w, w2, bias = (torch.randn(size).requires_grad_() for size in ((16, 16), (16, 16), (16,)))
    xs = [torch.randn(tokens, 3, 16).requires_grad_() for tokens in (8, 16)]
    with tp_invariance(segments) if segments else nullcontext():
        wrong = unlike_compiled(norms_and_products, [[x, w, w2, bias] for x in xs])
    assert [line for line in wrong if not line.startswith("saved bytes")] == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIONS)
def test_as_many_ranks_as_segments_give_the_same_bits(name, ranks1, ranks8):
    asked = asked_of(name, False) + asked_of(name, True)
    assert ranks8.run(hashes, 8, asked)[0] == ranks1.run(hashes, 8, asked)[0]


def drawn_setting(seed: int) -> tuple[str, Setting]:
    """One of the programs, of some sizes and options."""
    draw = Random(seed)
    name = draw.choice(list(OPTIONS))
    return name, Setting(
        dtype=draw.choice(DTYPES),
        sequence_parallel=draw.random() < 0.5,
        overlap=draw.random() < 0.5,
        tokens=8 * draw.randint(1, 9),
        option=draw.choice(OPTIONS[name]),
        k=8 * draw.randint(1, 12),
        n=8 * draw.randint(1, 12),
        bias=draw.random() < 0.7,
        autocast=draw.random() < 0.6,
    )


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 424), marks=pytest.mark.sweep)], ids=["few", "many"]
)
def test_every_size_gives_the_same_bits_whatever_the_shapes_and_options(seeds, ranks1, ranks2, ranks4):
    """In autocast regions, too."""
    asked = [drawn_setting(seed) for seed in seeds]
    alone, *others = (ranks.run(hashes, 8, asked)[0] for ranks in (ranks1, ranks2, ranks4))
    for setting, expected, *found in zip(asked, alone, *others, strict=True):
        assert found == [expected, expected], setting


def test_rows_in_blocks_give_the_same_bits_with_and_without_overlap(ranks1, ranks4):
    asked = [
        (name, Setting(sequence_parallel=True, overlap=overlap, tokens=1024))
        for name in ("column", "row", "mlp")
        for overlap in (False, True)
    ]
    alone, four = ranks1.run(hashes, 8, asked)[0], ranks4.run(hashes, 8, asked)[0]
    assert alone == four
    assert alone[0::2] == alone[1::2]


def test_tokens_that_segments_do_not_divide(ranks1, ranks2):
    asked = [
        (name, Setting(dtype, option=OPTIONS[name][0], tokens=13)) for name in OPTIONS for dtype in DTYPES
    ]
    asked += [(name, Setting(option=OPTIONS[name][0], tokens=0)) for name in OPTIONS]
    assert ranks1.run(hashes, 8, asked)[0] == ranks2.run(hashes, 8, asked)[0]


@pytest.mark.parametrize(
    ("transport", "asked", "worlds"),
    [  # the host waits, or kernels do
        ("c10d", [("mlp", True), ("row", False), ("row", True)], ["ranks4"]),
        ("stand-in", [("column", True), ("row", True)], ["ranks2"]),
        ("rounds", [("column", True), ("row", True)], ["ranks2"]),
        pytest.param("stand-in", [("mlp", True)], ["ranks2", "ranks4"], marks=pytest.mark.sweep),
    ],
)
def test_our_kernels_give_the_same_bits_at_every_size(request, transport, asked, worlds, ranks1):
    settings = [(name, Setting(torch.bfloat16, p, tokens=4, option=OPTIONS[name][0])) for name, p in asked]
    alone = ranks1.run(hashes_by_kernels, 4, settings, transport)[0]
    for world in worlds:
        assert request.getfixturevalue(world).run(hashes_by_kernels, 4, settings, transport)[0] == alone
    of_rows = [found for (name, _), found in zip(asked, alone, strict=True) if name == "row"]
    assert all(found == of_rows[0] for found in of_rows), "with and without sequence parallelism"


def gradients_of_layer_norm(threads: int) -> list[torch.Tensor]:
    x, weight, bias, dy = drawn(1, 64, 3, 512), drawn(2, 512), drawn(3, 512), drawn(4, 64, 3, 512)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tp_invariance(2):
            return list(torch.autograd.grad(ops.layer_norm(*leaves), leaves, dy))
    finally:
        torch.set_num_threads(before)


def test_gradients_of_a_norm_do_not_depend_on_the_number_of_threads():
    """A rank alone often has more of them."""
    for one, other in zip(gradients_of_layer_norm(1), gradients_of_layer_norm(2), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@on_ranks()
def test_a_norm_over_a_group_sums_its_gradients_without_the_mode_too():
    """They are those of all tokens."""
    for kind in OPTIONS["norm"]:
        over_ranks = norm(Setting(sequence_parallel=True, option=kind))
        alone = norm(Setting(option=kind))
        for name in ("dweight", "dbias", "dx") if kind == "layer_norm" else ("dweight", "dx"):
            ours, (expected, _) = whole_of(over_ranks[name]), alone[name]
            assert (ours - expected).norm() < 1e-6 * expected.norm(), f"{kind} {name}"


@pytest.mark.parametrize("strides", [(1, 1), (1, 6), (4, 1)])
def test_one_feature_has_the_strides_that_it_has_at_every_size(strides):
    """torch calls all of these but the last contiguous, and multiplies them in other ways."""
    x = torch.arange(24.0).as_strided((6, 1), strides)
    assert canonical(x).stride() == (1, 1)
    assert torch.equal(canonical(x), x)


SOME = ((torch.float32, False), (torch.bfloat16, True))


def test_without_it_bits_depend_on_the_size(ranks1, ranks4):
    """So the tests above can fail."""
    asked = [
        (name, Setting(dtype, sequence_parallel, option=option))
        for name in ("column", "row", "mlp", "head")
        for option, (dtype, sequence_parallel) in zip(OPTIONS[name], cycle(SOME))
    ]
    alone, four = ranks1.run(hashes, 0, asked)[0], ranks4.run(hashes, 0, asked)[0]
    for number, (name, _) in enumerate(asked):
        assert alone[number] != four[number], name


@on_ranks(2)
def test_what_it_cannot_serve_is_refused_on_all_ranks():
    group, x = dist.group.WORLD, torch.ones(8, 24, requires_grad=True)
    divided, summed = "segments of TP-invariance divide, got", "no sum of what ranks computed by themselves"
    ids = torch.zeros(8, dtype=torch.int64)
    refused: list[tuple[str, Callable[[], object]]] = [
        (divided, lambda: ops.column_linear(x, torch.ones(9, 24), None, group)),
        (divided, lambda: ops.row_linear(torch.ones(8, 22), torch.ones(8, 22), None, group)),
        (divided, lambda: ops.vocab_embedding(ids, torch.ones(9, 24), group)),
        (divided, lambda: ops.rms_norm(torch.ones(3, 24, requires_grad=True), torch.ones(24), group=group)),
        (summed, lambda: mappings.copy_to_region(x, group)),
        (summed, lambda: mappings.reduce_from_region(x, group)),
    ]
    with tp_invariance(8):
        for words, call in refused:
            with pytest.raises(ValueError, match=words):
                call()


@on_ranks(4)
def test_more_ranks_than_segments_are_refused():
    expected = "a tensor-parallel size that divides the 2 segments of TP-invariance, got 4"
    with tp_invariance(2), pytest.raises(ValueError, match=expected):
        ops.column_linear(torch.ones(8, 24), torch.ones(9, 24), None, dist.group.WORLD)
