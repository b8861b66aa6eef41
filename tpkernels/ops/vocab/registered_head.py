"""`linear_cross_entropy` under torch.compile: both directions as operators, which name their group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels.ops.main_grad import with_main_grad
from tpkernels.ops.registered import dtype_of_sums, or_empty
from tpkernels.ops.vocab.chunked_head import (
    HeadCall,
    Reduction,
    reduced_loss,
    scaled,
    token_gradients,
    token_losses,
)


def _or_none(tensor: Tensor, needed: bool) -> Tensor | None:
    return tensor if needed else None


def _dtype_of_gradient(weight: Tensor, needs: Sequence[bool], wide: bool) -> torch.dtype:
    """wide: dweight as it was summed"""
    return dtype_of_sums(weight) if wide and needs[1] else weight.dtype


@torch.library.custom_op("tpkernels::linear_cross_entropy", mutates_args=())
def registered_reduced_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    reduction: str,
    needs: Sequence[bool],
    group_name: str,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
    sequence_parallel: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = HeadCall.of_options(
        weight, group_name, vocab_size, label_smoothing, ignore_index, sequence_parallel, chunk_tokens
    )
    loss, share, dhidden, dweight = reduced_loss(
        call, cast("Reduction", reduction), hidden, weight, target, *needs
    )
    return loss, share, or_empty(dhidden, hidden), or_empty(dweight, loss)


@registered_reduced_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    reduction: str,
    needs: Sequence[bool],
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return (
        loss,
        torch.empty_like(loss),
        hidden.new_empty((target.shape[0], hidden.shape[1]) if needs[0] else 0),
        loss.new_empty(weight.shape if needs[1] else 0),
    )


@torch.library.custom_op("tpkernels::linear_cross_entropy_backward", mutates_args=())
def registered_reduced_loss_backward(
    scale: Tensor,
    dhidden: Tensor,
    dweight: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    wide: bool,
    group_name: str,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
    sequence_parallel: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    call = HeadCall.of_options(
        weight, group_name, vocab_size, label_smoothing, ignore_index, sequence_parallel, chunk_tokens
    )
    results = scaled(
        call,
        scale,
        _or_none(dhidden, needs[0]),
        _or_none(dweight, needs[1]),
        _dtype_of_gradient(weight, needs, wide),
    )
    return or_empty(results[0], dhidden), or_empty(results[1], weight)


@registered_reduced_loss_backward.register_fake
def _(
    scale: Tensor,
    dhidden: Tensor,
    dweight: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    wide: bool,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    call = HeadCall.of_options(weight, *options)
    rows = dhidden.shape[0] // (call.loss.shard.group.size() if call.sequence_parallel else 1)
    return (
        dhidden.new_empty((rows, dhidden.shape[1]) if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=_dtype_of_gradient(weight, needs, wide)),
    )


def _save_reduced(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, _, ctx.needs, *ctx.options = inputs
    ctx.wide = False
    ctx.save_for_backward(*output[1:], weight)


def _reduced_backward(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    share, dhidden, dweight, weight = ctx.saved_tensors
    results = registered_reduced_loss_backward(
        dloss * share, dhidden, dweight, weight, ctx.needs, ctx.wide, *ctx.options
    )
    found = [_or_none(result, need) for result, need in zip(results, ctx.needs, strict=True)]
    return *found, None, None, None, *(None for _ in ctx.options)


registered_reduced_loss.register_autograd(_reduced_backward, setup_context=_save_reduced)
accumulating_reduced_loss = with_main_grad(registered_reduced_loss, _save_reduced, _reduced_backward)


@torch.library.custom_op("tpkernels::linear_token_losses", mutates_args=())
def registered_token_losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group_name: str,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
    sequence_parallel: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = HeadCall.of_options(
        weight, group_name, vocab_size, label_smoothing, ignore_index, sequence_parallel, chunk_tokens
    )
    loss, counted, maximum, total = token_losses(call, hidden, weight, target)
    return loss.clone(), counted, maximum.clone(), total.clone()  # an operator's results share no memory


@registered_token_losses.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty(target.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    return loss, torch.empty_like(target), torch.empty_like(loss), torch.empty_like(loss)


@torch.library.custom_op("tpkernels::linear_token_losses_backward", mutates_args=())
def registered_token_losses_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    needs: Sequence[bool],
    wide: bool,
    group_name: str,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
    sequence_parallel: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    call = HeadCall.of_options(
        weight, group_name, vocab_size, label_smoothing, ignore_index, sequence_parallel, chunk_tokens
    )
    dhidden, dweight = token_gradients(
        call,
        dloss,
        hidden,
        weight,
        target,
        maximum,
        total,
        *needs,
        dtype=_dtype_of_gradient(weight, needs, wide),
    )
    return or_empty(dhidden, hidden), or_empty(dweight, weight)


@registered_token_losses_backward.register_fake
def _(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    needs: Sequence[bool],
    wide: bool,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=_dtype_of_gradient(weight, needs, wide)),
    )


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, *ctx.options = inputs
    ctx.wide = False
    ctx.save_for_backward(hidden, weight, *output[1:])


def _tokens_backward(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:2])
    results = registered_token_losses_backward(dloss, *ctx.saved_tensors, needs, ctx.wide, *ctx.options)
    found = [_or_none(result, need) for result, need in zip(results, needs, strict=True)]
    return *found, None, *(None for _ in ctx.options)


registered_token_losses.register_autograd(_tokens_backward, setup_context=_save_tokens)
accumulating_token_losses = with_main_grad(registered_token_losses, _save_tokens, _tokens_backward)
