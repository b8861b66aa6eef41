"""Megatron-Core's GPTModel, trained by its own loop in ranks on the CPU: with its layers, and with ours."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.checks import error_of
from tests.interop.megatron_cpu import parallel_state_of
from tpkernels import check_replicas
from tpkernels.layers.attributes import Attributes

STEPS = 20
VOCAB, TOKENS, BATCH = 64, 16, 2


@dataclass(frozen=True)
class Case:
    """ddp: options of Megatron's DistributedDataParallel; None: none, and an optimizer of torch"""

    tp: int = 2
    pp: int = 1
    vpp: int | None = None
    microbatches: int = 1
    tied: bool = False
    rope: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] | None = None

    @property
    def stages(self):
        return [None] if self.vpp is None else list(range(self.vpp))


@dataclass
class Training:
    """losses: of the last stage's ranks, else empty; parameters: of this rank, at the end"""

    losses: list[float]
    parameters: dict[str, Tensor]


@dataclass
class Comparison:
    """apart: the largest difference of a parameter at the end"""

    theirs: list[float]
    ours: list[float]
    apart: float


def compare(case, steps=STEPS, plant=None):
    """Train with Megatron's layers and with ours, in this rank. plant: changes our model"""
    with parallel_state_of(case.tp, case.pp, case.vpp):
        theirs = train(case, steps, ours=False)
        ours = train(case, steps, ours=True, plant=plant)
    assert theirs.parameters.keys() == ours.parameters.keys()
    pairs = [(theirs.parameters[name], ours.parameters[name]) for name in ours.parameters]
    apart = max((one - other).abs().max().item() for one, other in pairs)
    return Comparison(theirs.losses, ours.losses, apart)


def replicas_after_training(case, ours):
    """The error of `check_replicas`, and the marks of softmax offsets: whether a shard, and its axis."""
    from megatron.core import parallel_state

    models = []
    with parallel_state_of(case.tp):
        train(case, 3, ours=ours, plant=models.append)
        group = parallel_state.get_tensor_model_parallel_group()
        error, _ = error_of(check_replicas, *models, state=group)
    named = dict(models[0].named_parameters())
    offsets = [Attributes.of(p) for name, p in named.items() if "softmax_offset" in name]
    marks = {(marked.tensor_model_parallel, marked.partition_dim) for marked in offsets}
    return [error, *marks]


def train(case, steps, ours, plant=None):
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7 + parallel_state.get_pipeline_model_parallel_rank())
    config = _config(case)
    chunks = [_model(config, case, ours, stage) for stage in case.stages]
    for chunk in chunks:
        _require_kind(chunk, ours)
        if plant is not None:
            plant(chunk)
    chunks, zero, step = (_without_wrapper if case.ddp is None else _wrapped)(config, chunks, case)
    schedule = get_forward_backward_func()
    draw = torch.Generator().manual_seed(3 + parallel_state.get_data_parallel_rank())
    losses = []
    for _ in range(steps):
        batches = [_counting(draw) for _ in range(case.microbatches)]
        zero()
        done = schedule(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in chunks] if case.vpp else iter(batches),
            model=chunks if case.vpp else chunks[0],
            num_microbatches=case.microbatches,
            seq_length=TOKENS,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        step()
        if done:
            losses.append(sum(each["loss"] for each in done) / case.microbatches)
    found = {
        f"{i}.{name}": parameter.detach().clone()
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    return Training(losses, found)


def _config(case):
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = {
        "num_layers": max(2, case.pp * (case.vpp or 1)),
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**plain, **case.config})


def _model(config, case, ours, stage):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from tpkernels.interop import megatron_core

    with megatron_core.layers() if ours else _marked_norms():
        return GPTModel(
            config,
            get_gpt_layer_local_spec(
                config.num_moe_experts, normalization=config.normalization, qk_layernorm=config.qk_layernorm
            ),
            VOCAB,
            TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope" if case.rope else "learned_absolute",
            vp_stage=stage,
        )


def _marked_norms():
    """Megatron's local norm refuses sequence parallelism, so that ours is compared with torch's, marked."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def marked(_, config, hidden_size, eps):
        norm = getattr(nn, config.normalization)(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return patch.object(WrappedTorchNorm, "__new__", marked)


def _require_kind(model, ours):
    """All of its linear layers, embeddings and norms are ours, or none is: else nothing would be compared."""
    kinds = ("ParallelLinear", "VocabParallelEmbedding", "LayerNorm", "RMSNorm")
    found = [type(module) for module in model.modules() if type(module).__name__.endswith(kinds)]
    assert len(found) >= 6
    for kind in found:
        assert kind.__module__.startswith("tpkernels.interop.megatron_core.") == ours, kind


def _without_wrapper(config, chunks, case):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    for chunk in chunks:
        chunk.ddp_config = DistributedDataParallelConfig()
    parameters = [each for chunk in chunks for each in chunk.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)  # to which the size of a gradient matters

    def step():
        group = parallel_state.get_tensor_model_parallel_group()
        _allreduce_non_tensor_model_parallel_grads(chunks, config, group)
        optimizer.step()

    return chunks, optimizer.zero_grad, step


def _wrapped(config, chunks, case):
    """In Megatron's DistributedDataParallel, with its optimizer and clipping."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(case.ddp or {}))
    wrapped = [DistributedDataParallel(config, options, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    wanted = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        clip_grad=1.0,
        weight_decay=0.0,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(wanted, wrapped)

    def zero():
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

    def step():
        succeeded, *_ = optimizer.step()
        assert succeeded

    return wrapped, zero, step


def _counting(draw):
    """Ids that follow one another, so that losses fall."""
    starts = torch.randint(VOCAB, (BATCH, 1), generator=draw)
    return (starts + torch.arange(TOKENS + 1)) % VOCAB


def _forward(batches, model):
    tokens = next(batches)
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, _loss


def _loss(losses):
    loss = losses.mean()
    return loss, {"loss": loss.item()}
