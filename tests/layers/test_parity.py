"""Layers give the unsharded numbers, and start from the unsharded weights, for every number of ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.layers.parity import Setting, run_all, swapped_shards

# ranks in all, ranks that share a layer: the others are data-parallel
WORLDS = [("ranks1", 1), ("ranks2", 2), ("ranks4", 4), ("ranks4", 2)]


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world[0]}-tp{world[1]}")
def check(request):
    pool, tensor = request.getfixturevalue(request.param[0]), request.param[1]

    def run(name, settings):
        for rank, results in enumerate(pool.run(run_all, name, tensor, settings)):
            for setting, errors in zip(settings, results, strict=True):
                too_far = {key: value for key, value in errors.items() if not value < 1}
                assert not too_far, f"rank {rank}, {setting}: error as a part of what is allowed: {too_far}"

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_column_and_row(check, dtype):
    check("pair", [Setting(dtype, *flags) for flags in product([False, True], [False, True], [None, "gelu"])])


def test_options_of_column_and_row(check):
    check(
        "pair",
        [
            Setting(whole=True),
            Setting(whole=True, activation=None, leading=()),
            Setting(bias=False, sequence_parallel=True),
            Setting(skip_bias_add=True),
            Setting(skip_bias_add=True, sequence_parallel=True),
            Setting(stride=3),
            Setting(stride=2, whole=False, sequence_parallel=True),
            Setting(fused=True),
            Setting(fused=True, sequence_parallel=True, dtype=torch.bfloat16),
            Setting(strided=True, whole=True),
            Setting(strided=True, sequence_parallel=True),
            *(Setting(leading=leading) for leading in ((), (5,), (2, 3, 1, 2), (0,), (3, 0))),
            *(
                Setting(leading=leading, sequence_parallel=True)
                for leading in ((8,), (4, 3, 1, 2), (0, 3), (4, 0))
            ),
        ],
    )


def test_column_that_gathers_its_output(check):
    flags = product([torch.float32, torch.bfloat16], [False, True], [False, True], [None, "gelu"])
    leading = [(4,), (0, 3), (4, 1, 2)]
    check("gathered", [Setting(*flag) for flag in flags])
    check("gathered", [Setting(sequence_parallel=True, leading=shape) for shape in leading])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_norm_and_mlp(check, dtype):
    flags = product([False, True], [False, True], ["gelu_tanh", "swiglu"])
    check("block", [Setting(dtype, *flags) for flags in flags])


def test_options_of_mlp(check):
    check(
        "block",
        [
            *(Setting(activation=name) for name in ("none", "gelu", "silu", "relu", "relu2")),
            *(Setting(activation=name, bias=False) for name in ("geglu", "geglu_tanh")),
            Setting(skip_bias_add=True, sequence_parallel=True),
            Setting(skip_bias_add=True, activation="swiglu"),
            Setting(bias=False, sequence_parallel=True, activation="relu2"),
            Setting(fused=True, sequence_parallel=True),
            Setting(fused=True, activation="swiglu"),
            Setting(leading=()),
            Setting(strided=True, sequence_parallel=True),
            Setting(leading=(0, 3), sequence_parallel=True),
            Setting(leading=(4, 2, 1, 3), sequence_parallel=True, activation="swiglu"),
        ],
    )


def test_swapped_shards_would_be_seen(ranks2):
    assert min(ranks2.run(swapped_shards)) > 1000
