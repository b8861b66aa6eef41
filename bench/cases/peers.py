"""Ours against the libraries that run on a CPU, with the same weights, compared before anything is timed.

On one rank torch's own functions, eager and compiled. On tensor-parallel ranks a whole Llama of transformers,
split by torch's `parallelize_module` and by transformers' own tensor parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bench.case import Case, Computation, Work
from bench.cases.local import Local
from tpkernels import create_parallel_state, parallelize, plan_groups

LOCAL_SIZES = {
    "linear": (512, 96, 256),
    "linear_gelu": (512, 96, 256),
    "swiglu": (512, 96, 256),
    "mlp": (512, 96, 256),
    "gated_mlp": (512, 96, 256),
    "rms_norm": (2048, 256),
    "layer_norm": (2048, 256),
    "embedding": (2048, 64, 2048),
    "loss": (2048, 64, 2048),
    "head": (2048, 64, 2048),
}
TOKENS, BATCH = 256, 2
LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def local_case(name: str) -> Case:
    """An op of `LOCAL_SIZES`, forward and backward, on a rank alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    of_a_vocabulary = name in ("embedding", "loss", "head")
    build = getattr(Local(torch.float32, "cpu", compiles=True), name)
    case: Case = build(*[dist.group.WORLD] * of_a_vocabulary, *LOCAL_SIZES[name])
    return case


def llama_case() -> Case:
    """A whole LlamaForCausalLM with its loss, forward and backward, on all ranks."""
    torch.manual_seed(0)
    transformers = import_module("transformers")
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    ids = torch.randint(LLAMA["vocab_size"], (BATCH, TOKENS))
    ranks = dist.get_world_size()
    state = create_parallel_state(plan_groups(world_size=ranks, tensor=ranks))
    models = {
        "ours": parallelize(deepcopy(whole), state),
        "naive": parallelize_module(deepcopy(whole), init_device_mesh("cpu", (ranks,)), LLAMA_PLAN),
        "transformers": _split_by_transformers(whole),
    }
    shapes = {name: parameter.shape for name, parameter in models["ours"].named_parameters()}

    def way(model: nn.Module, shard: Callable[[str, Tensor], Tensor]) -> Computation:
        parameters = dict(model.named_parameters())

        def run() -> list[Tensor]:
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return [loss.detach(), *(shard(name, _gradient(parameters[name])) for name in shapes)]

        return run

    def own_shard(name: str, gradient: Tensor) -> Tensor:
        """A view of what this rank holds of a full gradient."""
        for dim, (held, full) in enumerate(zip(shapes[name], gradient.shape, strict=True)):
            if held != full:
                return gradient.chunk(ranks, dim)[dist.get_rank()]
        return gradient

    ways = {name: way(model, lambda _, gradient: gradient) for name, model in models.items()}
    return Case(
        Work(
            "llama",
            f"{TOKENS}x{BATCH}x{LLAMA['hidden_size']}-{LLAMA['num_hidden_layers']}_layers-world{ranks}",
            "forward_backward",
            "parallelize_module",
            world=ranks,
            wire_bytes=None,
        ),
        {**ways, "unsharded": way(whole, own_shard)},
    )


# What transformers' own plan says, in torch's classes
LLAMA_PLAN: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **dict.fromkeys(
        [
            f"model.layers.*.{name}_proj"
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
        ],
        ColwiseParallel(),
    ),
    **dict.fromkeys(
        [f"model.layers.*.{name}_proj" for name in ("self_attn.o", "mlp.down")], RowwiseParallel()
    ),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def _split_by_transformers(model: Any) -> nn.Module:
    """From a folder, as it splits only what it loads."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())  # read as torchrun's
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    config = import_module("transformers.distributed").DistributedConfig(tp_size=dist.get_world_size())
    with TemporaryDirectory() as own:
        folder: list[Any] = [own]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            model.save_pretrained(own)
        dist.barrier()
        split: nn.Module = type(model).from_pretrained(
            folder[0], dtype=torch.float32, distributed_config=config
        )
        dist.barrier()
    return split.train()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's shard, with the sums that torch leaves to the optimizer: of norms and tables."""
    gradient = _present(parameter.grad)
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return gradient


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
