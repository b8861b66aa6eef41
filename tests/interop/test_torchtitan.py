"""torchtitan's `tp_gemm_backend="dist_gemm"` on our ops: with a stand-in of its hook, and with its layers.

torchtitan's own tests of it (`test_distributed_linear.py`, `test_dist_gemm.py`) are in none of its packages.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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


needs_spmd_types = pytest.mark.skipif(
    find_spec("spmd_types") is None, reason="spmd_types is not installed: pip install spmd_types"
)


@needs_spmd_types
@on_ranks(2)
def test_types_over_ranks_are_those_of_torchtitans_functions():
    spmd, checker = import_module("spmd_types"), import_module("spmd_types.checker")
    S, R, P, group = spmd.S, spmd.R, spmd.P, dist.group.WORLD
    takes = {  # types of inputs, of what is given, and an input of another type
        "AllGatherLinear": ([S(0), S(0), S(0)], S(1), R),
        "AllGatherLinearMulti": ([S(0), S(0), S(0)], S(1), P),
        "LinearReduceScatter": ([S(1), S(1), R], S(0), R),
    }
    with stand_in() as hook, spmd.set_current_mesh([group]):
        torchtitan.install()
        for name, (types, given, other) in takes.items():
            w = torch.ones(8, 4)
            inputs = [torch.ones(4, 4), w, w if name == "AllGatherLinearMulti" else torch.ones(8)]

            def call(types, inputs=inputs, name=name):
                inputs = [each.clone() for each in inputs]
                with checker.typecheck(local=False):
                    for each, type_ in zip(inputs, types, strict=True):
                        spmd.assert_type(each, {group: type_})
                    ys = as_list(getattr(hook, name).apply(*inputs, group, group.group_name))
                    for y in ys:
                        spmd.assert_type(y, {group: given})  # noqa: B023  # called in this round
                    return len(ys)

            assert call(types) == 1 + (name == "AllGatherLinearMulti")
            for number in range(3):
                wrong = [*types]
                wrong[number] = other if wrong[number] is not other else spmd.I
                with pytest.raises(spmd.SpmdTypeError):
                    call(wrong)


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
        patch.dict(sys.modules, {"torchtitan": None, HOOK: None}),
        patch.object(torchtitan, "version", side_effect=PackageNotFoundError),
        pytest.raises(ImportError, match=r"such as 0\.3\.0; found no torchtitan"),
    ):
        torchtitan.install()


needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan is not installed (make check-torchtitan installs it)"
)


@needs_torchtitan
@on_ranks(2)
def test_torchtitans_own_layers_are_its_unsharded_ones():
    """All three that `tp_gemm_backend="dist_gemm"` selects: outputs, and gradients of inputs and weights.

    As test_matches_stock_feed_forward, which looks at the feed-forward's output.
    """
    torchtitan.install()
    hook, common = import_module(HOOK), "torchtitan.models.common"
    stock_qkv = import_module(f"{common}.attention").FusedQKVLinear
    stock_mlp = import_module(f"{common}.feed_forward").FeedForward
    linear = import_module(f"{common}.linear").Linear
    up, down, qkv = (linear.Config(in_features=i, out_features=o) for i, o in [(8, 16), (16, 8), (8, 32)])
    heads = {"head_dim": 4, "n_heads": 4, "n_kv_heads": 2, "wqkv": qkv}
    layers = {"w1": up, "w2": down, "w3": up}
    columns = {"w1.weight": "0", "w3.weight": "0", "wqkv.weight": "0"}
    pairs = [  # stock, fused, features in; dimension by which inputs and outputs are split
        (stock_mlp.Config(**layers), hook.AllGatherFusedFeedForward.Config(**layers), 8, "1", "1"),
        (stock_qkv.Config(**heads), hook.AllGatherFusedQKVLinear.Config(**heads), 8, "1", "2"),
        (down, hook.RowParallelLinear.Config(in_features=16, out_features=8), 16, "2", "1"),
    ]
    for stock_config, fused_config, features, before, after in pairs:
        stock, fused = stock_config.build(), fused_config.build()
        torch.manual_seed(0)
        for name, parameter in stock.named_parameters():
            owner, _, last = name.rpartition(".")
            nn.init.normal_(parameter)
            (shard,) = shards(parameter, dims=columns.get(name, "1"))
            setattr(fused.get_submodule(owner), last, nn.Parameter(shard))
        x = torch.randn(2, 6, features, requires_grad=True)  # batch, tokens, features
        (x_shard,) = shards(x, dims=before)
        y, y_shard = as_list(stock(x)), on_its_mesh(fused, x_shard)
        expect_shards(y_shard, y, after * len(y))
        dy = [torch.randn_like(part) for part in y]
        torch.autograd.backward(y, dy)
        torch.autograd.backward(y_shard, [part.detach() for part in shards(*dy, dims=after * len(y))])
        expect_shards([x_shard.grad], [x.grad], before)
        for name, parameter in stock.named_parameters():
            expect_shards([fused.get_parameter(name).grad], [parameter.grad], columns.get(name, "1"))


@needs_torchtitan
@on_ranks(2)
def test_its_llama_is_the_stock_one_with_right_types():
    """Logits, and gradients of two blocks, embedding and head.

    As test_parallelize_preserves_the_fused_contracts.

    The checker follows kinds, not dimensions (`local=True`): by these, torchtitan 0.3.0 refuses the view of
    its own QKV layer, with its own functions as with ours.
    """
    torchtitan.install()
    spmd, checker = import_module("spmd_types"), import_module("spmd_types.checker")
    utils, hook = import_module("torchtitan.distributed.utils"), import_module(HOOK)
    annotate = import_module("torchtitan.distributed.spmd_types").annotate_input_spmd_types
    found = {}
    with backend_of_types():
        sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": 2}
        dims = import_module("torchtitan.distributed.parallel_dims").ParallelDims(**sizes)
        dims.build_mesh()
        context = utils.get_spmd_context(parallel_dims=dims)
        for backend in ("default", "dist_gemm"):
            torch.manual_seed(0)
            config = llama(backend)
            import_module("torchtitan.models.llama3.sharding").set_llama3_sharding_config(
                config, enable_sp=True
            )
            model = config.build()
            model.init_states()
            model.parallelize(dims)
            inputs = torch.randint(2048, (2, 2, 16))
            positions = torch.arange(16).expand(2, 16).clone()
            ids, _, others = annotate(dims, *inputs, {"positions": positions})
            with context(), checker.typecheck(local=True):
                logits = model(ids, **others)
                assert {spmd.V} == set(spmd.get_local_type(logits).values())
                with spmd.no_typecheck():  # as torchtitan's trainer does
                    logits.square().mean().backward()
            strict = pytest.raises(spmd.SpmdTypeError, match="sharded on dim 1 into multiple smaller")
            with context(), checker.typecheck(local=False), nullcontext() if backend == "default" else strict:
                model(ids, **others)
            parameters = {name: each.grad for name, each in model.named_parameters()}
            found[backend] = {"logits": logits.detach(), **parameters}
        tp, full, w = dims.get_mesh("tp").get_group(), torch.ones(4, 8), torch.ones(8, 8)
        with context(), checker.typecheck(local=True):
            spmd.assert_type(full, {tp: spmd.R})
            with pytest.raises(spmd.SpmdTypeError):
                hook.LinearReduceScatter.apply(full, w, None, tp, tp.group_name)
    assert found["default"].keys() == found["dist_gemm"].keys()
    for name, expected in found["default"].items():
        torch.testing.assert_close(
            found["dist_gemm"][name], expected, msg=lambda told, of=name: f"{of}: {told}"
        )


def llama(backend: str) -> Any:
    """Two layers of torchtitan's debug model; with attention of torch that a CPU computes."""
    registry = import_module("torchtitan.models.llama3").model_registry
    attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    config = registry("debugmodel", tp_gemm_backend=backend).model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = attention.Config()
    return config


@contextmanager
def backend_of_types(name: str = "spmd_types") -> Iterator[None]:
    utils = import_module("torchtitan.distributed.utils")
    previous = utils.get_spmd_backend()
    utils.set_spmd_backend(name)
    try:
        yield
    finally:
        utils.set_spmd_backend(previous)


def on_its_mesh(fused: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """A forward in the context in which torchtitan's trainer calls it: without, its layers take no group."""
    spmd = import_module("torchtitan.distributed.spmd_types")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with backend_of_types(), spmd.set_current_spmd_mesh(mesh):
        return as_list(fused(x))


def as_list(given: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)
