"""Ours against the libraries that run on a CPU, with the same weights, compared before anything is timed.

On one rank torch's own functions, eager and compiled. On tensor-parallel ranks a Llama's block by torch's
`parallelize_module`, eager and compiled, and a whole Llama of transformers, split by that and by
transformers' own tensor parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
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
from bench.cases import plain_llama
from bench.cases.local import Local
from bench.cases.plain_llama import block_plan
from tpkernels import (
    GPTConfig,
    TransformerBlock,
    create_parallel_state,
    finalize_gradients,
    parallelize,
    plan_groups,
)
from tpkernels.checkpoints.full_state_dict import load_full_state_dict
from tpkernels.layers.attention import rotation

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
LLAMA = GPTConfig(
    vocab_size=1024,
    hidden_size=256,
    ffn_hidden_size=704,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    tied=False,
)


def local_case(name: str) -> Case:
    """An op of `LOCAL_SIZES`, forward and backward, on a rank alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    of_a_vocabulary = name in ("embedding", "loss", "head")
    build = getattr(Local(torch.float32, "cpu", compiles=True), name)
    case: Case = build(*[dist.group.WORLD] * of_a_vocabulary, *LOCAL_SIZES[name])
    return case


def block_case(sequence_parallel: bool) -> Case:
    """Attention and MLP of a Llama with their norms, forward and backward, on all ranks."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    state = create_parallel_state(plan_groups(world_size=ranks, tensor=ranks))
    by = rotation(TOKENS, LLAMA.hidden_size // LLAMA.num_heads)
    hidden = torch.randn(TOKENS, BATCH, LLAMA.hidden_size)
    dy = torch.randn_like(hidden)
    if sequence_parallel:
        hidden, dy = (part.chunk(ranks)[dist.get_rank()].contiguous() for part in (hidden, dy))
    hidden.requires_grad_()

    plain = plain_llama.Block(LLAMA)
    block = TransformerBlock(
        LLAMA.hidden_size,
        LLAMA.num_heads,
        LLAMA.ffn_hidden_size,
        num_kv_heads=LLAMA.num_kv_heads,
        activation="swiglu",
        norm="rms_norm",
        norm_eps=LLAMA.norm_eps,
        bias=False,
        sequence_parallel=sequence_parallel,
        state=state,
    )
    names = {name: name.replace(".qkv", "") for name, _ in block.named_parameters()}
    weights = plain.state_dict()
    load_full_state_dict(block, {name: weights[plainly] for name, plainly in names.items()}, state=state)
    split = parallelize_module(plain, init_device_mesh("cpu", (ranks,)), block_plan(sequence_parallel))
    compiled = torch.compile(split)

    def way(
        compute: Callable[[], Tensor],
        parameters: Sequence[nn.Parameter],
        finalize: Callable[[], None] = lambda: None,
    ) -> Computation:
        def run() -> list[Tensor]:
            for leaf in (hidden, *parameters):
                leaf.grad = None
            y = compute()
            y.backward(dy)
            finalize()
            return [y.detach(), _present(hidden.grad), *map(_gradient, parameters)]

        return run

    by_name = dict(split.named_parameters())
    theirs = [by_name[name] for name in names.values()]
    part = "sequence_parallel" if sequence_parallel else "plain"
    return Case(
        Work(
            "llama_block",
            f"{TOKENS}x{BATCH}x{LLAMA.hidden_size}x{LLAMA.ffn_hidden_size}-{part}-world{ranks}",
            "forward_backward",
            "parallelize_module",
            world=ranks,
            wire_bytes=None,
        ),
        {
            "ours": way(
                lambda: block(hidden, rotary=by),
                list(block.parameters()),
                partial(finalize_gradients, block, state=state),
            ),
            "naive": way(lambda: split(hidden, by), theirs),
            "compiled": way(lambda: compiled(hidden, by), theirs),
        },
    )


def llama_case() -> Case:
    """A whole LlamaForCausalLM with its loss, forward and backward, on all ranks."""
    torch.manual_seed(0)
    transformers = import_module("transformers")
    whole = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=LLAMA.vocab_size,
            hidden_size=LLAMA.hidden_size,
            intermediate_size=LLAMA.ffn_hidden_size,
            num_hidden_layers=LLAMA.num_layers,
            num_attention_heads=LLAMA.num_heads,
            num_key_value_heads=LLAMA.num_kv_heads,
        )
    )
    ids = torch.randint(LLAMA.vocab_size, (BATCH, TOKENS))
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
            f"{TOKENS}x{BATCH}x{LLAMA.hidden_size}-{LLAMA.num_layers}_layers-world{ranks}",
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
