"""Splits a model of torch's own layers over tensor-parallel ranks, in place.

default_plan  the plan if the caller gives none: from the model of `transformers` (transformers_plan), or by
          names of layers (layer_names); both are made of entries
plan      patterns of module names, and how matching modules are split
changes   the plan on this rank: modules replaced (hf_modules) or kept; which layers compute in fp8
lora      which layers of peft's adapters an entry of the plan splits
trial     the plan on copies of the model (twins), with made-up inputs: finds partial gradients (probe), and
          compares outputs and gradients with the unsharded model's (verify); sequence parallelism
smaller   a smaller model of the same class, for the trial of a large one
sequence  which modules compute on shards of the tokens (tokens): sequence_parallel
loading   a checkpoint straight into the shards of a model on the meta device
saving    parameters as DTensors of the unsharded ones; full weights for save_pretrained
buffers   tied weights and buffers of a model on the meta device, for when it gets memory
guards    refused calls of the split model, and random numbers in training
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from tpkernels.interop.parallelize.buffers import keep_ties, remember_buffers
from tpkernels.interop.parallelize.changes import carry_out, planned, quantizable, quantize_products
from tpkernels.interop.parallelize.default_plan import PossiblePlan, first_that_works, possible_plans
from tpkernels.interop.parallelize.guards import (
    refuse_shards_of_heads,
    refuse_tp_invariance,
    refuse_wrapped,
    require_equal_draws,
)
from tpkernels.interop.parallelize.loading import open_checkpoint
from tpkernels.interop.parallelize.lora import base_model
from tpkernels.interop.parallelize.plan import ParallelizePlan
from tpkernels.interop.parallelize.saving import (
    hold_dtensors,
    refuse_copies_of_shards,
    require_mesh,
    save_full_weights,
)
from tpkernels.interop.parallelize.sequence import share_tokens
from tpkernels.interop.parallelize.tokens import sum_gradients
from tpkernels.interop.parallelize.transformers_plan import DistributedConfig, requested_plan
from tpkernels.interop.parallelize.trial import PlanTrial, Verify, require_verify
from tpkernels.layers.batches import compare_inputs
from tpkernels.layers.world import State, TensorWorld, tensor_world
from tpkernels.layers.wrappers import mark_replaced
from tpkernels.ops.quantize import Recipe, require_recipe
from tpkernels.ops.replicas import agree_on, copy_first_rank_, unlike_first_rank


def parallelize(
    model: nn.Module,
    state: State = None,
    *,
    plan: ParallelizePlan | DistributedConfig | Literal["auto"] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    weights: Literal["check", "broadcast"] = "check",
    verify: Verify = "auto",
    sequence_parallel: bool = False,
    as_dtensor: bool = False,
    quantize: Recipe | None = None,
) -> nn.Module:
    """Split a model in place over tensor-parallel ranks; return the same model.

    Layers are replaced by layers that hold this rank's shard of the weights. Called by all ranks of the
    tensor-parallel group. First ranks compare names, shapes and plan, and a split copy is compared with the
    model; if the plan does not fit, all ranks raise an error that names the module. Build the optimizer, wrap
    the model and register hooks afterwards: its parameters are new.

    state: the tensor-parallel group: a ParallelState, process group or device mesh; None: the current state
    plan: how each module is split: see `.plan`; a `tp_plan` of `transformers` or its DistributedConfig: see
        `.transformers_plan`; None: the DistributedConfig in the model's config; without one, or "auto": the
        plan of the model of `transformers`, or a plan by names of layers: see `.default_plan`
    checkpoint: a file or folder of the unsharded model's safetensors, for a model on the meta device: each
        rank gets memory for its shards, and reads them: see `.loading`
    weights: "check" that all ranks have the same weights, or "broadcast" those of the first rank; weights on
        the meta device are neither checked nor sent
    verify: example inputs, the same on all ranks: a tensor, a tuple, or a mapping of arguments by name.
        Outputs and gradients of the split model are compared with the unsharded one's in float64. "auto":
        inputs are made up for models of `transformers`, or that take ids or features; above 2**27 parameters
        a smaller model of the class is compared: see `.smaller`. False: no comparison
    sequence_parallel: also shard the tokens of hidden states from the first layer to the last
    as_dtensor: parameters become DTensors over the tensor-parallel dimension of `state`, a DeviceMesh, so
        that torch's own clipping, checkpoints and optimizers see the unsharded model
    quantize: compute the products of split linear layers in fp8, except the head: see `.changes`;
        `print(model)` shows which. The comparison above is made without fp8
    """
    refuse_tp_invariance("parallelize")
    base = base_model(model)  # the plan's names are names in it
    world = tensor_world(state)
    named = [*base.named_parameters(), *base.named_buffers()]
    request = _Request(plan, checkpoint, weights, verify, sequence_parallel, as_dtensor, quantize)
    possible = request.agreed(base, named, world, state)
    opened = None
    if checkpoint is not None:
        opened = open_checkpoint(base, checkpoint, compare=weights == "check", world=world)
    real = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    if world.size > 1:
        # a checkpoint replaces numbers that some models draw on the meta device, too
        (_require_equal if weights == "check" and not opened else _make_equal)(real, world)
    trial = PlanTrial(base, verify, world, state)
    chosen, partial = first_that_works(trial, possible, as_dtensor=as_dtensor)
    sharing = trial.sharing(chosen, partial) if sequence_parallel else None
    changes = planned(base, chosen, world)
    in_fp8 = quantizable(base, changes, quantize) if quantize else []
    carry_out(base, changes, world, state)
    sum_gradients(base, partial, world)
    require_equal_draws(base, world)
    refuse_shards_of_heads(base, changes)
    if as_dtensor:
        hold_dtensors(base, state, world)
    if sharing:
        share_tokens(base, sharing, world)
    if quantize:
        quantize_products(base, in_fp8, quantize)
    remember_buffers(base)
    keep_ties(base)
    if opened:
        opened.load_into(base, state, world)
    refuse_copies_of_shards(base)
    save_full_weights(model)
    own = set(map(id, model.parameters()))
    old = ((name, tensor) for name, tensor in named if isinstance(tensor, nn.Parameter))
    mark_replaced(((name, parameter) for name, parameter in old if id(parameter) not in own), "parallelize")
    compare_inputs(model, world)
    return model


@dataclass(frozen=True)
class _Request:
    """The caller's request, the same on all ranks."""

    plan: object
    checkpoint: object
    weights: object
    verify: object
    sequence_parallel: bool
    as_dtensor: bool
    quantize: Recipe | None

    def agreed(
        self, model: nn.Module, named: list[tuple[str, Tensor]], world: TensorWorld, state: State
    ) -> list[PossiblePlan]:
        """Return the possible plans; all ranks raise alike if requests differ or cannot be fulfilled."""
        problem: Exception | None = None
        possible: list[PossiblePlan] = []
        try:
            possible = self._possible(model, world, state)
        except (ValueError, TypeError) as error:
            problem = error
        # example inputs are compared by the trial
        asked = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name != "verify")
        plans = [one.plan for one in possible]
        words = f"parallelize({asked}, refused={str(problem or '')!r}, plans={plans})"
        agree_on(words, named, world.group)
        if problem:  # the same on all ranks
            raise problem
        return possible

    def _possible(self, model: nn.Module, world: TensorWorld, state: State) -> list[PossiblePlan]:
        """Return the possible plans; raise if the first does not fit."""
        if self.weights not in ("check", "broadcast"):
            raise ValueError(f"weights: expected 'check' or 'broadcast', got {self.weights!r}")
        require_verify(self.verify)
        if self.sequence_parallel and self.verify is False:
            raise ValueError(
                "sequence_parallel: expected a verify that is not False, because a copy of the model is "
                "called to find which modules need all tokens"
            )
        if self.sequence_parallel and self.as_dtensor:
            raise ValueError("sequence_parallel: expected as_dtensor=False: both were never tried together")
        require_recipe("parallelize", self.quantize, next((p.device for p in model.parameters()), None))
        refuse_wrapped(model)
        whole: list[str] = []
        plan = requested_plan(model, self.plan, world.size, whole.append)
        given = plan is not None and PossiblePlan("the plan", plan, whole=whole)
        possible = [given] if given else possible_plans(model, world.size)
        planned(model, possible[0].plan, world)
        if self.as_dtensor:
            require_mesh(state)
        return possible


def _require_equal(named: list[tuple[str, Tensor]], world: TensorWorld) -> None:
    for name, tensor in named:  # one by one: each is copied for a moment
        if bool(unlike_first_rank([tensor.detach()], world.group).any()):
            raise ValueError(
                f"'{name}': expected the same weights on all tensor-parallel ranks, got different ones; load "
                "or draw them alike, or pass weights='broadcast'"
            )


def _make_equal(named: list[tuple[str, Tensor]], world: TensorWorld) -> None:
    for _, tensor in named:
        copy_first_rank_([tensor.detach()], world.group)
