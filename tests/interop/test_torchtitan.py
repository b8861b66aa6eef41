"""torchtitan's `tp_gemm_backend="dist_gemm"` on our ops: with a stand-in of its hook, and with its layers.

torchtitan's own tests of it (`test_distributed_linear.py`, `test_dist_gemm.py`) are in none of its packages.
The tests here name the cases whose contracts they hold.
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


@on_ranks(2)
@pytest.mark.parametrize("layer", ["AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"])
def test_bf16_is_as_accurate_as_without_ranks(layer):
    """As test_{all_gather_linear,all_gather_linear_multi,linear_reduce_scatter}_matches_..., with biases.

    Theirs asks the row layer's weight gradient for the bits of one product. On a CPU ours is a sum over the
    rows as they arrive: its error is at most twice that of the one product.
    """
    row, pair = layer == "LinearReduceScatter", layer == "AllGatherLinearMulti"
    sizes = [(16, 32), (64, 32), (64, 32) if pair else (64,), (16, 64), (16, 64)]
    torch.manual_seed(0)
    *full, dy, dz = [torch.randn(size, dtype=torch.bfloat16) for size in sizes]

    def unsharded(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in full]
        x, w, b = leaves
        ys = [F.linear(x, w), F.linear(x, b)] if pair else [F.linear(x, w, b)]
        dys = [dy.to(dtype), dz.to(dtype)][: len(ys)]
        return [*ys, *torch.autograd.grad(ys, leaves, dys)]

    split, given = ("11-", "0") if row else ("000", "1")
    mine = shards(*full, dims=split)
    group = dist.group.WORLD
    with stand_in() as hook:
        torchtitan.install()
        ys = as_list(getattr(hook, layer).apply(*mine, group, group.group_name))
    dys = [part.detach() for part in shards(dy, dz, dims=given * 2)][: len(ys)]
    found = [*ys, *torch.autograd.grad(ys, mine, dys)]
    theirs, exact = unsharded(torch.bfloat16), unsharded(torch.float64)
    dims = given * len(ys) + split
    for ours, torchs, truth in zip(found, shards(*theirs, dims=dims), shards(*exact, dims=dims), strict=True):
        assert (ours.double() - truth).norm() <= 2 * (torchs.double() - truth).norm()
    of_one_product = [len(ys)] if row else [len(ys) + 1]  # gradient of x; of w
    for number in of_one_product:
        assert torch.equal(found[number], shards(*theirs, dims=dims)[number])


@on_ranks(2)
def test_a_row_bias_is_added_once():
    """As test_bias_is_applied_once; theirs shows, too, that two biases would be noticed."""
    torch.manual_seed(1)
    x, w, b = (torch.randn(size, dtype=torch.bfloat16) for size in [(16, 32), (64, 32), (64,)])
    x_shard, w_shard, b_shard = shards(x, w, b, dims="11-")
    group = dist.group.WORLD
    with stand_in() as hook:
        torchtitan.install()
        y = hook.LinearReduceScatter.apply(x_shard, w_shard, b_shard, group, group.group_name)
    once, twice = (shards(F.linear(x, w, times * b), dims="0")[0].detach() for times in (1, 2))
    torch.testing.assert_close(y.detach(), once, atol=2e-2, rtol=2e-2)
    assert (twice - once).abs().max() > 0.2


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
def test_its_llama_is_the_one_without_our_functions_and_has_the_right_types():
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


@needs_torchtitan
def test_its_configurations_select_its_layers_of_the_same_sizes():
    """As test_tp_gemm_backend_selects_the_fused_configs, test_default_tp_gemm_backend_is_untouched,
    test_stock_parameter_shapes_survive and test_sharding_setup_declares_the_fused_contracts.
    """
    torchtitan.install()
    hook = import_module(HOOK)
    shard = import_module("torchtitan.models.common.decoder_sharding").set_gqa_attention_sharding
    fused, stock = (llama(backend).layers[0].attention for backend in ("dist_gemm", "default"))
    assert isinstance(fused.qkv_linear, hook.AllGatherFusedQKVLinear.Config)
    assert isinstance(fused.wo, hook.RowParallelLinear.Config)
    assert not isinstance(stock.wo, hook.RowParallelLinear.Config)
    for ours, theirs in [(fused.wo, stock.wo), (fused.qkv_linear.wqkv, stock.qkv_linear.wqkv)]:
        assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
    with backend_of_types():
        shard(fused, enable_sp=True), shard(stock, enable_sp=True)
    assert fused.sharding_config is None
    assert stock.sharding_config is not None
    assert "weight" in fused.wo.sharding_config.state_shardings
    assert fused.wo.sharding_config.out_src_shardings is None
    assert stock.wo.sharding_config.out_src_shardings is not None


@needs_torchtitan
def test_what_its_layers_cannot_do_is_still_refused():
    """As test_unfused_qkv_is_, test_dtensor_backend_is_, test_sequence_parallel_disabled_is_ and
    test_bias_on_w1_w3_is_rejected.
    """
    torchtitan.install()
    hook, linear = import_module(HOOK), import_module("torchtitan.models.common.linear").Linear
    shard = import_module("torchtitan.models.common.decoder_sharding").set_gqa_attention_sharding
    attention = llama("dist_gemm").layers[0].attention
    with (
        backend_of_types("partial_dtensor"),
        pytest.raises(ValueError, match=r"requires parallelism\.spmd_backend"),
    ):
        shard(attention, enable_sp=True)
    with backend_of_types(), pytest.raises(ValueError, match="enable_sequence_parallel"):
        shard(attention, enable_sp=False)
    up, down = ({"in_features": i, "out_features": o} for i, o in [(8, 16), (16, 8)])
    with pytest.raises(ValueError, match="does not support a bias"):
        hook.AllGatherFusedFeedForward.Config(
            w1=linear.Config(**up, bias=True), w2=linear.Config(**down), w3=linear.Config(**up)
        )
    make = import_module("torchtitan.models.common.config_utils").make_gqa_config
    inner = {"inner_attention": attention.inner_attention, "rope": attention.rope}
    inits: dict[str, dict] = {"wqkv_param_init": {}, "wo_param_init": {}}
    with pytest.raises(ValueError, match="requires fuse_qkv=True"):
        make(dim=256, n_heads=8, **inits, **inner, fuse_qkv=False, tp_gemm_backend="dist_gemm")


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
