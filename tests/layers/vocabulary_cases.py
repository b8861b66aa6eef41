"""What ranks run to compare embedding and losses as layers with the unsharded model of the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checks import error_of
from tests.layers.parity import cut, drawn
from tpkernels import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    initialize_model_parallel,
    linear_cross_entropy,
    ops,
    vocab_parallel_cross_entropy,
)
from tpkernels.comm import schedule
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region

VOCAB, FEATURES, STEPS = 11, 8, 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, target = (torch.randint(VOCAB, (8, 3), generator=generator) for _ in range(2))
    target[0] = -100
    return ids, target


def trained(loss_of: Callable[[Tensor, Tensor], Tensor], parameters: list[nn.Parameter]) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def unsharded(tied: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(11)
    table, head = (nn.Parameter(nn.init.xavier_normal_(torch.empty(VOCAB, FEATURES))) for _ in range(2))
    weights = [table] if tied else [table, head]

    def loss_of(ids: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(F.embedding(ids, table).tanh(), weights[-1])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return trained(loss_of, weights), [weight.detach() for weight in weights]


def sharded(tied: bool, fused: bool, sequence_parallel: bool) -> tuple[list[float], list[Tensor]]:
    """fused: head and loss by chunks; otherwise logits, and then their loss"""
    torch.manual_seed(11)
    options = {"divisible_by": 2, "sequence_parallel": sequence_parallel}
    table, head = (VocabParallelEmbedding(VOCAB, FEATURES, **options) for _ in range(2))
    layers = [table] if tied else [table, head]
    weight = layers[-1].weight
    output = ColumnParallelLinear(
        FEATURES,
        table.split.padded_size,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=True,
        sequence_parallel=sequence_parallel,
    )

    def loss_of(ids: Tensor, target: Tensor) -> Tensor:
        hidden = table(ids).tanh()
        if fused:
            return linear_cross_entropy(
                hidden, weight, target, vocab_size=VOCAB, sequence_parallel=sequence_parallel, chunk_tokens=7
            )
        logits, _ = output(hidden, weight)
        losses = vocab_parallel_cross_entropy(logits, target, vocab_size=VOCAB)
        return losses.sum() / (target != -100).sum()

    losses = trained(loss_of, [layer.weight for layer in layers])
    whole = []
    for layer in layers:
        everybody = gather_from_sequence_region(layer.weight.detach(), layer.world.group)
        assert not everybody[VOCAB:].any(), "padding learns"
        whole.append(everybody[:VOCAB])
    return losses, whole


def training_is_the_unsharded_one(tensor: int) -> list[str]:
    """The ways of training that come to other losses or weights."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(tensor)
    wrong = []
    for tied in (False, True):
        losses, weights = unsharded(tied)
        for fused in (False, True):
            for sequence_parallel in (False, True):
                ours, found = sharded(tied, fused, sequence_parallel)
                close = torch.allclose(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=0)
                for a, b in zip(found, weights, strict=True):
                    close &= torch.allclose(a, b, rtol=1e-5, atol=1e-6)
                if not close:
                    wrong.append(f"{tied=} {fused=} {sequence_parallel=}: losses {ours}, not {losses}")
    return wrong


def behaviour() -> dict[str, bool]:
    """Promises of the layer, by name, and whether each is kept on this rank."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    layer = VocabParallelEmbedding(VOCAB, FEATURES, padding_idx=-1, dtype=torch.bfloat16)
    ids = batch(0)[0]
    y = layer(ids)
    copied = copy.deepcopy(layer)
    y.float().sum().backward()
    start, stop = layer.vocab_start_index, layer.vocab_end_index
    inside = start <= VOCAB - 1 < stop
    kind, message = error_of(layer, ids + VOCAB)
    split = VocabParallelEmbedding(VOCAB, FEATURES, sequence_parallel=True, state=layer.world.group)
    with torch.no_grad():
        split.weight.copy_(layer.weight)
    target = batch(0)[1]

    fused = copy.deepcopy(split)
    fused.weight.main_grad = torch.ones_like(fused.weight)
    fused.weight.grad_added_to_main_grad = False
    hidden = drawn((8, 3, FEATURES), 1, torch.float32)
    for weight, fusion in ((split.weight, False), (fused.weight, True)):
        linear_cross_entropy(
            hidden, weight, target, vocab_size=VOCAB, gradient_accumulation_fusion=fusion
        ).backward()

    def model(ids: Tensor, target: Tensor) -> Tensor:
        hidden = split(ids)
        logits = ops.column_linear(hidden, split.weight, None, split.world.group, sequence_parallel=True)
        losses = vocab_parallel_cross_entropy(logits, target, 0.1, vocab_size=VOCAB)
        return losses.sum() + linear_cross_entropy(
            hidden, split.weight, target, vocab_size=VOCAB, sequence_parallel=True
        )

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    return {
        "compiled": torch.allclose(compiled(ids, target), model(ids, target)),
        "fused": torch.allclose(fused.weight.main_grad - 1, split.weight.grad, atol=1e-6)
        and fused.weight.grad_added_to_main_grad,
        "dtype": y.dtype == torch.bfloat16 == layer.weight.grad.dtype,
        "padding row": not inside
        or not (layer.weight[VOCAB - 1 - start].any() or layer.weight.grad[VOCAB - 1 - start].any()),
        "padding output": not y[ids == VOCAB - 1].any(),
        "copy": torch.equal(copied(ids), y) and bool(copied.weight.tensor_model_parallel),
        "error": kind == "ValueError" and "expected ids from 0 to 10" in message,
        "sequence parallel": torch.equal(split(ids), cut(0)(y.float())),
        "state dict": list(layer.state_dict()) == ["weight"],
    }
