"""A model of torch's own layers, split over tensor-parallel ranks in place.

plan      patterns of module names, and what becomes of the modules that match
swaps     the plan on this rank: which modules are replaced, by layers of hf_modules
trial     the plan on copies (twins) of the model: which gradients are partial (probe), and whether outputs
          and gradients are the unsharded model's (verify)
as_dtensor  parameters as DTensors of the unsharded ones
buffers   what a model on the meta device needs when it gets memory
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from tpkernels.interop.parallelize.as_dtensor import hold_dtensors, require_dtensors
from tpkernels.interop.parallelize.buffers import keep_ties, remember_buffers
from tpkernels.interop.parallelize.plan import Plan
from tpkernels.interop.parallelize.swaps import carry_out, planned, sum_gradients
from tpkernels.interop.parallelize.trial import Verify, require_verify, tried
from tpkernels.layers.foreign import refuse_wrapped
from tpkernels.layers.world import State, TensorWorld, tensor_world
from tpkernels.ops.replicas import agree_on, copy_first_rank_, unlike_first_rank
from tpkernels.tp_invariance import mode


def parallelize(
    model: nn.Module,
    state: State = None,
    *,
    plan: Plan,
    weights: Literal["check", "broadcast"] = "check",
    verify: Verify = "auto",
    as_dtensor: bool = False,
) -> nn.Module:
    """Replace layers by those that hold this rank's shard of the weights; returns the same model.

    Called by all ranks of the tensor-parallel group. Before anything is replaced, ranks compare names, shapes
    and plan, and a copy of the model is split and compared with the model; a plan that does not fit is an
    error that names the module, on all of them. Build the optimizer, wrap the model and register hooks
    afterwards: the parameters are new ones.

    state: whose tensor group: a ParallelState, process group or device mesh; None: the current state
    plan: what becomes of which module: see `.plan`; `tpkernels.interop.huggingface` has some
    weights: "check" that all ranks have the same weights, or "broadcast" those of the first rank; weights on
        the meta device are neither checked nor sent
    verify: example inputs, the same on all ranks: a tensor, a tuple, or a mapping of arguments by name.
        Outputs and gradients of the split model are compared with the unsharded one's in float64. "auto": a
        few ids or features if the model takes these, and for models of up to 2**27 parameters. False: no
        comparison
    as_dtensor: parameters become DTensors over the tensor-parallel dimension of `state`, a DeviceMesh, so
        that torch's own clipping, checkpoints and optimizers see the unsharded model
    """
    if mode.fix("parallelize"):
        raise ValueError(
            "parallelize: expected TP-invariance to be off, for it does not reach what the model computes "
            "between its layers; use tpkernels.GPT or the parallel layers, or turn it off"
        )
    world = tensor_world(state)
    named = [*model.named_parameters(), *model.named_buffers()]
    _require_request(model, plan, weights, verify, named, world, state if as_dtensor else False)
    real = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    if world.size > 1:
        (_require_equal if weights == "check" else _make_equal)(real, world)
    partial = tried(model, plan, verify, world, state)
    carry_out(model, planned(model, plan, world), state)
    sum_gradients(model, partial, world)
    if as_dtensor:
        hold_dtensors(model, state, world)
    remember_buffers(model)
    keep_ties(model)
    return model


def _require_request(
    model: nn.Module,
    plan: Plan,
    weights: object,
    verify: object,
    named: list[tuple[str, Tensor]],
    world: TensorWorld,
    dtensors: State | Literal[False],
) -> None:
    """All ranks ask for the same, and it can be done; or all ranks raise the same error.

    dtensors: over what parameters are to be DTensors
    """
    request = f"parallelize(plan={plan}, weights={weights!r}, as_dtensor={dtensors is not False})"
    problem: Exception | None = None
    try:
        if weights not in ("check", "broadcast"):
            raise ValueError(f"weights: expected 'check' or 'broadcast', got {weights!r}")
        require_verify(verify)
        refuse_wrapped("parallelize", model)
        planned(model, plan, world)
        if dtensors is not False:
            require_dtensors(plan, dtensors)
    except (ValueError, TypeError) as error:
        problem = error
    agree_on(f"{request}: {problem}" if problem else request, named, world.group)
    if problem:  # the same on all ranks
        raise problem


def _require_equal(named: list[tuple[str, Tensor]], world: TensorWorld) -> None:
    for name, tensor in named:  # one by one: each is copied for a moment
        if bool(unlike_first_rank([tensor.detach()], world.group).any()):
            raise ValueError(
                f"'{name}': expected the same weights on all tensor-parallel ranks, got others; load or draw "
                "them alike, or pass weights='broadcast'"
            )


def _make_equal(named: list[tuple[str, Tensor]], world: TensorWorld) -> None:
    for _, tensor in named:
        copy_first_rank_([tensor.detach()], world.group)
