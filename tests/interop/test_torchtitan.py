"""torchtitan's `tp_gemm_backend="dist_gemm"` on our ops: with a stand-in of its hook, and with its layers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.on_ranks import on_ranks
from tpkernels.interop import torchtitan

HOOK = "torchtitan.models.common.dist_gemm"
PARAMETERS = {  # what torchtitan 0.3.0 hands to `apply`, after which its forwards are named
    "AllGatherLinear": "x_shard_m, w_shard_n, bias_shard_n, group, group_name",
    "AllGatherLinearMulti": "x_shard_m, wa_shard_n, wb_shard_n, group, group_name",
    "LinearReduceScatter": "x_shard_k, w_shard_k, bias, group, group_name",
}
TOKENS, FEATURES, BETWEEN = 8, 6, 12


@contextmanager
def stand_in(**changed: str | None) -> Iterator[ModuleType]:
    """A module where torchtitan has its hook, of functions that refuse; changed: parameters, or None."""
    made = {}
    for part in ("torchtitan", "torchtitan.models", "torchtitan.models.common", HOOK):
        made[part] = ModuleType(part)
        made[part].__path__ = []
    for name, parameters in {**PARAMETERS, **changed}.items():
        if parameters is not None:
            space: dict[str, type] = {}
            body = "raise AssertionError('needs symmetric memory')"
            exec(f"class {name}:\n def forward(ctx, {parameters}): {body}\n apply = forward", space)
            setattr(made[HOOK], name, space[name])
    with patch.dict(sys.modules, made):
        yield made[HOOK]


def shards(*full: torch.Tensor, dims: str) -> list[torch.Tensor]:
    """This rank's shard of each along its dimension, "-" for all of it; as leaves."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cut = [t if dim == "-" else t.chunk(ranks, int(dim))[rank] for t, dim in zip(full, dims, strict=True)]
    return [part.detach().clone().requires_grad_() for part in cut]


def expect_shards(given: list[torch.Tensor], full: list[torch.Tensor], dims: str) -> None:
    for actual, expected in zip(given, shards(*full, dims=dims), strict=True):
        torch.testing.assert_close(actual, expected.detach())


@on_ranks(2)
def test_hook_computes_the_unsharded_mlp_and_all_its_gradients():
    """A column layer with a bias, the pair that shares its tokens, a row layer with a bias."""
    torch.manual_seed(0)
    sizes = [(TOKENS, FEATURES), (FEATURES, FEATURES), (FEATURES,), (BETWEEN, FEATURES), (BETWEEN, FEATURES)]
    full = [torch.randn(size) for size in (*sizes, (FEATURES, BETWEEN), (FEATURES,), (TOKENS, FEATURES))]
    *full, dy = (tensor.requires_grad_() for tensor in full)
    x, w, b, w1, w3, w2, b2 = full
    y = F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2, b2)
    z = F.linear(x, w, b)
    expected = torch.autograd.grad([y, z], full, [dy, dy])

    dims = "000001-"  # x, w, b, w1, w3: dimension 0; w2: its input features; b2: replicated
    mine = shards(*full, dims=dims)
    x, w, b, w1, w3, w2, b2 = mine
    group = dist.group.WORLD
    with stand_in() as hook:
        torchtitan.install()
        torchtitan.install()  # twice is once
        z_shard = hook.AllGatherLinear.apply(x, w, b, group, group.group_name)
        h1, h3 = hook.AllGatherLinearMulti.apply(x, w1, w3, group, group.group_name)
        y_shard = hook.LinearReduceScatter.apply(F.silu(h1) * h3, w2, b2, group, group.group_name)
    expect_shards([y_shard, z_shard], [y, z], "01")
    dy_shard, dz_shard = shards(dy, dy, dims="01")
    found = torch.autograd.grad([y_shard, z_shard], mine, [dy_shard, dz_shard])
    expect_shards(list(found), list(expected), dims)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"LinearReduceScatter": None}, "LinearReduceScatter to take x_shard_k, .* has no such function"),
        ({"AllGatherLinear": "x, w, group"}, "AllGatherLinear to take x_shard_m, .* has x, w, group"),
    ],
    ids=["absent", "other_arguments"],
)
def test_another_hook_is_refused_and_left_as_it_is(changed, told):
    with stand_in(**changed) as hook:
        before = dict(vars(hook))
        with pytest.raises(ImportError, match=told):
            torchtitan.install()
        assert vars(hook) == before


def test_without_torchtitan_the_error_says_which_has_the_hook():
    with (
        patch.dict(sys.modules, {"torchtitan": None}),
        pytest.raises(ImportError, match=r"such as 0\.3\.0; found no torchtitan"),
    ):
        torchtitan.install()


needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan is not installed (docs/torchtitan.md says how)"
)


@needs_torchtitan
@on_ranks(2)
def test_torchtitans_own_layers_are_its_unsharded_ones():
    """Feed-forward, fused QKV and output projection, as `tp_gemm_backend="dist_gemm"` builds them."""
    dist_gemm, utilities = import_module(HOOK), import_module("torchtitan.models.common.config_utils")
    spmd, backends = (
        import_module("torchtitan.distributed.spmd_types"),
        import_module("torchtitan.distributed.utils"),
    )
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torchtitan.install()

    def both(make, *, split):
        """The stock layer, and the fused one that holds this rank's shards of its weights by name."""
        stock, fused = make("default"), make("dist_gemm")
        for name, parameter in stock.named_parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
            module = fused.get_submodule(name.rpartition(".")[0])
            (shard,) = shards(parameter, dims=split[name])
            setattr(module, name.rpartition(".")[2], nn.Parameter(shard))
        return stock, fused

    def feed_forward(backend):
        initial = {"weight": nn.init.zeros_}
        sizes = {"dim": 8, "hidden_dim": 16, "w1_param_init": initial, "w2w3_param_init": initial}
        return utilities.make_ffn_config(**sizes, tp_gemm_backend=backend).build()

    stock, fused = both(feed_forward, split={"w1.weight": "0", "w2.weight": "1", "w3.weight": "0"})
    torch.manual_seed(1)
    x, dy = torch.randn(2, 6, 8), torch.randn(2, 6, 8)  # batch, tokens, features
    y = stock(x)
    y.backward(dy)
    previous = backends.get_spmd_backend()
    backends.set_spmd_backend("spmd_types")
    try:
        with spmd.set_current_spmd_mesh(mesh):
            x_shard, dy_shard = shards(x, dy, dims="11")
            y_shard = fused(x_shard)
            y_shard.backward(dy_shard.detach())
    finally:
        backends.set_spmd_backend(previous)
    expect_shards([y_shard], [y], "1")
    assert isinstance(fused, dist_gemm.AllGatherFusedFeedForward)
    named = dict(stock.named_parameters())
    for name, dim in {"w1": "0", "w2": "1", "w3": "0"}.items():
        expect_shards([fused.get_parameter(f"{name}.weight").grad], [named[f"{name}.weight"].grad], dim)
