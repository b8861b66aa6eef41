"""One layer of Megatron's and one of ours in a rank, built and called alike: what both give is compared."""

import re
import sys
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.interop.megatron_cpu import parallel_state_of
from tpkernels.tp_invariance import tp_invariant

Given = dict[str, Any]

IN, OUT, VOCAB, TOKENS, BATCH = 12, 20, 16, 6, 3


@dataclass(frozen=True)
class LayerCase:
    """kind: column, row or embedding; call: options of forward; given_weight: forward is given a weight"""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False
    given_weight: bool = False


def both(cases):
    """What Megatron's layer and ours give, of each case."""
    with parallel_state_of(dist.get_world_size()):
        return [(given(case, ours=False), given(case, ours=True)) for case in cases]


def config_of(**options):
    from megatron.core.transformer.transformer_config import TransformerConfig

    size = dist.get_world_size()
    plain = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    return TransformerConfig(**{**plain, "tensor_model_parallel_size": size, **options})


def built(case, ours):
    from megatron.core.tensor_parallel import layers as theirs

    from tpkernels.interop import megatron_core

    torch.manual_seed(5)
    home = megatron_core if ours else theirs
    config = config_of(**case.config)
    options = {"config": config, "init_method": config.init_method, **case.options}
    if case.kind == "column":
        return home.ColumnParallelLinear(IN, OUT, **options)
    if case.kind == "row":
        chosen = {"bias": True, "input_is_parallel": True, "skip_bias_add": False, **options}
        return home.RowParallelLinear(IN, OUT, **chosen)
    return home.VocabParallelEmbedding(VOCAB, OUT, **options)


def given(case, ours):
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = built(case, ours)
    draw = torch.Generator().manual_seed(9)
    fused = case.config.get("gradient_accumulation_fusion", False)
    given_weight = None
    if case.given_weight:
        given_weight = nn.Parameter(torch.randn(OUT, IN, generator=draw).chunk(size)[rank].clone())
    weight = layer.weight if given_weight is None else given_weight
    weight.requires_grad_(not case.frozen)
    if fused:
        weight.main_grad = torch.ones_like(weight)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
    if getattr(layer, "bias", None) is not None:
        with torch.no_grad():
            layer.bias.copy_(torch.randn(OUT, generator=draw)[: len(layer.bias)])
    x = _input(case, draw, rank, size)
    call = {**case.call, **({} if given_weight is None else {"weight": given_weight})}
    output = layer(x, **call)
    output, bias = output if isinstance(output, tuple) else (output, None)
    everything = torch.randn(BATCH * TOKENS * 2 * OUT * size, generator=draw)
    dy = everything[: output.numel() * size].view(size, *output.shape)[rank if _is_split(case) else 0]
    loss = (output * dy).sum()
    if bias is not None:
        loss = loss + (bias * torch.arange(1.0, len(bias) + 1)).sum()
    loss.backward()
    found = {"y": output, "bias": bias, "dx": x.grad if x.is_floating_point() else None}
    for name, parameter in [*layer.named_parameters(), ("given", given_weight)]:
        if parameter is not None:
            found |= {name: parameter, f"d {name}": parameter.grad, f"of {name}": _attributes(parameter)}
            found[f"main_grad of {name}"] = getattr(parameter, "main_grad", None)
    found["checkpoint"] = _checkpoint(layer)
    found["state"] = sorted(layer.state_dict())
    found["repr"] = repr(layer)
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in found.items()
    }


def _is_split(case):
    """Whether ranks hold different shards of the output."""
    if case.kind == "column":
        return not case.call.get("runtime_gather_output", case.options.get("gather_output", False))
    return bool(case.config.get("sequence_parallel") or case.options.get("is_expert"))


def _input(case, draw, rank, size):
    if case.kind == "embedding":
        return torch.randint(VOCAB, (BATCH, TOKENS), generator=draw)
    full = torch.randn(TOKENS, BATCH, IN, generator=draw)
    if case.kind == "row" and case.options.get("input_is_parallel", True):
        full = full.chunk(size, -1)[rank]
    if case.kind == "column" and case.config.get("sequence_parallel") and not case.options.get("is_expert"):
        full = full.chunk(size, 0)[rank]
    return full.clone().requires_grad_()


def _attributes(parameter):
    return {name: value for name, value in vars(parameter).items() if not isinstance(value, Tensor)}


def _checkpoint(layer):
    """What Megatron's distributed checkpoint is told of each tensor."""
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found = layer.sharded_state_dict("p.", metadata=metadata)
    names = ("key", "global_shape", "local_shape", "global_offset", "replica_id", "allow_shape_mismatch")
    return {key: {name: getattr(each, name, None) for name in names} for key, each in found.items()}


def deferred(limit):
    """main_grad of three microbatches, those of the first `limit` computed by Megatron afterwards; 0: of all.

    returns: with deferral and without
    """
    with parallel_state_of(dist.get_world_size()) as parallel_state:
        from megatron.core.utils import drain_embedding_wgrad_compute

        from tpkernels.interop import megatron_core

        results = []
        for defers in (True, False):
            config = config_of(gradient_accumulation_fusion=True, sequence_parallel=True)
            config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = defers, limit
            inputs = []
            dys = []
            torch.manual_seed(5)
            layer = megatron_core.ColumnParallelLinear(
                IN,
                OUT,
                config=config,
                init_method=config.init_method,
                bias=False,
                embedding_activation_buffer=inputs,
                grad_output_buffer=dys,
            )
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
            for _ in range(3):
                layer(torch.randn(TOKENS, BATCH, IN, requires_grad=True))[0].square().sum().backward()
            assert layer.weight.grad_added_to_main_grad
            assert len(dys) == len(inputs) == ((limit or 3) if defers else 0)
            if defers:
                group = parallel_state.get_tensor_model_parallel_group()
                drain_embedding_wgrad_compute(config, inputs, dys, layer.weight, group)
            results.append(layer.weight.main_grad.clone())
        return results[0], results[1]


def refusals():
    """What our layers do not do is refused by name."""
    with parallel_state_of(dist.get_world_size()) as parallel_state:
        from tpkernels.interop import megatron_core

        def refused(words, call, *args, **options):
            with pytest.raises((NotImplementedError, ValueError), match=re.escape(words)):
                call(*args, **options)

        x = torch.randn(TOKENS, BATCH, IN)
        group = parallel_state.get_tensor_model_parallel_group()
        product = megatron_core.linear_with_grad_accumulation_and_async_allreduce
        weight = nn.Parameter(torch.randn(OUT, IN))
        for option in ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm"):
            refused(f"{option}=False", megatron_core.build_norm, config_of(**{option: True}), OUT)
        config = config_of()
        config.normalization = "L2Norm"
        refused("LayerNorm or RMSNorm, got 'L2Norm'", megatron_core.build_norm, config, OUT)
        offloading = built(LayerCase("column"), ours=True)
        offloading.config._cpu_offloading_context = SimpleNamespace(inside_context=True)
        refused("cpu_offloading=False", offloading, x)
        given = built(LayerCase("row", {"is_expert": True}), ours=True)
        refused("skip_bias_add=True", given, x.chunk(group.size(), -1)[group.rank()])
        sharded = built(LayerCase("column"), ours=True)
        sharded.gtp_remat_size = 2
        refused("gtp_weight_remat_size 1, got 2", sharded, x)
        off, plain = (False, False, False), partial(product, x, weight, None)
        refused("torch.float32, got torch.float64", plain, *off, output_dtype=torch.float64)
        refused("weight.main_grad", plain, True, False, False)
        refused("wgrad_deferral_limit 0", plain, *off, [], 2)
        refused("gradient_accumulation_fusion with a grad_output_buffer", plain, *off, [])
        frozen = partial(megatron_core.linear_with_frozen_weight, x, weight, None)
        refused("no grad_output_buffer", frozen, *off, None, [])
        weight.__fsdp_param__ = True
        refused("Megatron-FSDP", plain, True, False, False)
        tp_invariant(8)
        try:
            for kind, inputs in (("column", x), ("embedding", torch.tensor([[1]]))):
                refused("no TP-invariance inside Megatron", built(LayerCase(kind), ours=True), inputs)
        finally:
            tp_invariant(0)
        del sys.modules["fused_weight_gradient_mlp_cuda"]
        config = config_of()
        config.defer_embedding_wgrad_compute = True
        column = partial(megatron_core.ColumnParallelLinear, IN, OUT, init_method=torch.nn.init.ones_)
        refused("defer_embedding_wgrad_compute=False", column, config=config)


def inside_and_after_layers():
    """Modules of what is built inside `layers()`, and after it."""
    with parallel_state_of(dist.get_world_size()):
        from megatron.core.extensions import transformer_engine
        from megatron.core.tensor_parallel import layers as theirs
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from tpkernels.interop import megatron_core

        class Subclass(theirs.ColumnParallelLinear):
            pass

        class TELinear(nn.Module):
            def __init__(self):
                super().__init__()

        def built_of(kind):
            config = config_of()
            if kind is WrappedTorchNorm:
                return type(kind(config, OUT)).__module__
            layer = kind(IN, OUT, config=config, init_method=config.init_method)
            assert isinstance(layer, theirs.ColumnParallelLinear)
            return type(layer).__module__

        kinds = (theirs.ColumnParallelLinear, Subclass, WrappedTorchNorm)
        inside = []

        def build_and_fail():
            with megatron_core.layers():
                inside.extend(built_of(kind) for kind in kinds)
                TELinear()

        with (
            patch.object(transformer_engine, "HAVE_TE", True),
            patch.object(transformer_engine, "TELinear", TELinear),
            patch.object(transformer_engine, "TELayerNormColumnParallelLinear", None),
            pytest.raises(NotImplementedError, match=r"TELinear: .* get_gpt_layer_local_spec"),
        ):
            build_and_fail()
        TELinear()
        return [*inside, *(built_of(kind) for kind in kinds)]


def named_by_spec_provider():
    with parallel_state_of(dist.get_world_size()):
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend

        from tpkernels.interop import megatron_core

        provider = megatron_core.spec_provider()
        experts = get_moe_module_spec_for_backend(provider, num_experts=2, moe_grouped_gemm=False)
        parts = experts.keywords["submodules"] if isinstance(experts, partial) else experts.submodules
        built = parts.experts  # partials in later sources than 0.16
        submodules = built.keywords["submodules"] if isinstance(built, partial) else built.submodules
        named = [
            provider.column_parallel_linear(),
            provider.row_parallel_linear(),
            provider.layer_norm(rms_norm=True, for_qk=True),
            submodules.linear_fc1,
            submodules.linear_fc2,
        ]
        return [f"{each.__module__}.{each.__name__}" for each in named]
