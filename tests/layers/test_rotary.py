"""Rotary positions: a pair of features is a complex number, turned by t / base^(2i / d)."""

import pytest
import torch

from tpkernels.layers.attention import rotate, rotation


def turned(x, positions, base):
    """By complex numbers, in float64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None, None] * rates
    result = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([result.real, result.imag], -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotation_is_that_of_complex_numbers(dtype, base):
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64).to(dtype)
    positions = torch.tensor([0, 1, 7, 4095, 100_003])
    wide = torch.promote_types(dtype, torch.float32)
    ours = rotate(x, rotation(positions, 8, base, dtype=wide))
    assert ours.dtype == dtype
    error = (ours.double() - turned(x, positions, base)).norm() / x.double().norm()
    assert error < {torch.float64: 1e-10, torch.float32: 1e-7, torch.bfloat16: 3e-3}[dtype]


def test_positions_by_number_count_from_zero():
    counted, given = rotation(6, 4), rotation(torch.arange(6), 4)
    assert all(torch.equal(a, b) for a, b in zip(counted, given, strict=True))
    assert counted.cos.shape == (6, 2)


def test_scores_depend_on_distances_alone():
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    scores = []
    for start in (0, 11, 512):
        by = rotation(torch.tensor([start, start + 3]), 16, dtype=torch.float64)
        both = rotate(torch.cat([query, key]), by).flatten(1)
        scores.append(both[0] @ both[1])
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))
