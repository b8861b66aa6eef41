"""The same bits at every tensor-parallel size."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.ops.invariant_cases import (
    Setting,
    drawn,
    hashes,
    hashes_by_kernels,
    norm_over_ranks,
    refusals,
)
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import ops
from tpkernels.dispatch.segments import canonical

DTYPES = (torch.float32, torch.bfloat16)
OPTIONS = {
    "column": ("", "gelu", "main_grad", "save_gathered"),
    "row": ("", "main_grad"),
    "mlp": ("gelu", "swiglu"),
    "embedding": ("",),
    "cross_entropy": ("", "smoothed", "overwritten"),
    "head": ("", "none", "whole", "main_grad"),
    "norm": ("rms_norm", "layer_norm"),
    "heads": ("1", "2", "4"),
}
ASKED = [
    (name, Setting(dtype, sequence_parallel, option=option))
    for name, options in OPTIONS.items()
    for option, dtype, sequence_parallel in product(options, DTYPES, (False, True))
]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_size_gives_the_same_bits(name, ranks1, ranks2, ranks4):
    asked = [(program, setting) for program, setting in ASKED if program == name]
    by_size = [ranks.run(hashes, 8, asked)[0] for ranks in (ranks1, ranks2, ranks4)]
    for number, (_, setting) in enumerate(asked):
        alone = by_size[0][number]
        assert len(set(alone.values())) > 1
        for found in by_size[1:]:
            assert found[number] == alone, setting
        if name not in ("embedding", "cross_entropy", "heads"):
            assert alone == by_size[0][number // 2 * 2], f"{setting}: as without sequence parallelism"


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
        ("c10d", [("mlp", True), ("row", False), ("row", True)], ["ranks2", "ranks4"]),
        ("stand-in", [("column", True), ("row", True)], ["ranks2"]),
        pytest.param("stand-in", [("mlp", True)], ["ranks2", "ranks4"], marks=pytest.mark.sweep),
    ],
)
def test_our_kernels_give_the_same_bits_at_every_size(request, transport, asked, worlds, ranks1):
    settings = [(name, Setting(torch.bfloat16, p, tokens=4, option=OPTIONS[name][0])) for name, p in asked]
    alone = ranks1.run(hashes_by_kernels, 4, settings, transport)[0]
    for world in worlds:
        assert request.getfixturevalue(world).run(hashes_by_kernels, 4, settings, transport)[0] == alone
    assert len({str(found) for (name, _), found in zip(asked, alone, strict=True) if name == "row"}) == 1


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


@once(kind=["rms_norm", "layer_norm"], world=["ranks2", "ranks4"])
def test_a_norm_over_a_group_sums_its_gradients_without_the_mode_too(ranks, kind):
    for found in ranks.run(norm_over_ranks, kind):
        assert {"dweight", "dx"} <= found.keys()
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("strides", [(1, 1), (1, 6), (4, 1)])
def test_one_feature_has_the_strides_that_it_has_at_every_size(strides):
    """torch calls all of these but the last contiguous, and multiplies them in other ways."""
    x = torch.arange(24.0).as_strided((6, 1), strides)
    assert canonical(x).stride() == (1, 1)
    assert torch.equal(canonical(x), x)


def test_without_it_bits_depend_on_the_size(ranks1, ranks4):
    """So the tests above can fail."""
    asked = [(name, setting) for name, setting in ASKED if name in ("column", "row", "mlp", "head")]
    alone, four = ranks1.run(hashes, 0, asked)[0], ranks4.run(hashes, 0, asked)[0]
    for number, (name, _) in enumerate(asked):
        assert alone[number] != four[number], name


def test_what_it_cannot_serve_is_refused_on_all_ranks(ranks2, ranks4):
    found = ranks2.run(refusals)
    assert found[0] == found[1]
    for text in found[0][:4]:
        assert "segments of TP-invariance divide, got" in text
    for text in found[0][4:]:
        assert "expected no sum of what ranks computed by themselves" in text
    for (text,) in ranks4.run(refusals):
        assert "a tensor-parallel size that divides the 2 segments of TP-invariance, got 4" in text
