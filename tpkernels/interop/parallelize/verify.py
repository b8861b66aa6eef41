"""Compares outputs and gradients of the split model with the unsharded model's.

Both compute in float64, or in float32 if the model does not run in float64: half precision would hide faults.
Both are made from a twin; the model does not change. Noise is added to the twin's weights first, because
zeros and ones hide terms and factors that are applied too often.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.interop.parallelize.changes import carry_out, planned
from tpkernels.interop.parallelize.hf_modules import ModuleChange
from tpkernels.interop.parallelize.plan import ParallelizePlan
from tpkernels.interop.parallelize.probe import ParameterNames
from tpkernels.interop.parallelize.sequence import Sharing, share_tokens
from tpkernels.interop.parallelize.tokens import sum_gradients
from tpkernels.interop.parallelize.twins import (
    Inputs,
    call_model,
    floating_tensors,
    trial_context,
    twin_of,
)
from tpkernels.layers.world import State, TensorWorld

# Relative to a tensor's largest value.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Relative to tolerance x the largest gradient: some gradients, as of keys' biases, are zero except rounding.
NOISE = 1e-2


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of a model, and of each of its modules by name and number of the call."""

    returned: list[Tensor]
    outputs: dict[tuple[str, int], list[Tensor]]


@dataclass(frozen=True)
class Reference:
    """The unsharded model's twin, its inputs and outputs."""

    model: nn.Module
    inputs: Inputs
    run: ModelOutputs
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """The largest error allowed, relative to a tensor's largest value."""
        return TOLERANCE[self.dtype]


def reference_of(model: nn.Module, inputs: Inputs, device: torch.device) -> Reference:
    """Run the unsharded model's twin; raise what the model raises. No communication.

    device: tensors on the meta device get memory on it
    """
    try:
        return _reference(model, inputs, device, torch.float64)
    except Exception:
        return _reference(model, inputs, device, torch.float32)


def _reference(model: nn.Module, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Reference:
    twin = twin_of(model, dtype, device)
    noise = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                moved = torch.randn(parameter.shape, generator=noise, device="cpu", dtype=torch.float32)
                parameter.add_(moved.to(parameter.device), alpha=0.02)
    run = _run(twin, inputs)
    if not any(x.requires_grad for x in run.returned):
        raise ValueError("expected floating tensors with gradients from the unsharded model, got none")
    if not all(bool(x.isfinite().all()) for x in run.returned):
        raise ValueError("expected finite numbers from the unsharded model, got infinity or NaN")
    return Reference(twin, inputs, run, dtype)


def difference(
    reference: Reference,
    plan: ParallelizePlan,
    partial: ParameterNames,
    world: TensorWorld,
    state: State,
    sharing: Sharing | None = None,
) -> str | None:
    """Return the split model's first difference, in words, or None. Called by all ranks; splits the twin."""
    model, full, tolerance = reference.model, reference.run, reference.tolerance
    changes, old = planned(model, plan, world), dict(model.named_parameters())
    by_id = {id(change.old): change for change in changes.modules}
    change_of = {n: by_id[id(m)] for n, m in model.named_modules(remove_duplicate=False) if id(m) in by_id}
    carry_out(model, changes, world, state)
    sum_gradients(model, partial, world)
    if sharing:
        share_tokens(model, sharing, world)
    running: list[str] = []
    try:
        split = _run(model, reference.inputs, running)
    except Exception as error:
        return f"it raises in '{running[-1] or type(model).__name__}', {type(error).__name__}: {error}"
    shares = {name for name, module in model.named_modules() if module in changes.shared}
    located = _first_output(full, split, change_of, shares, tolerance)
    if len(full.returned) != len(split.returned) or full.returned[0].shape != split.returned[0].shape:
        shapes, full_shapes = _returned_shapes(split.returned), _returned_shapes(full.returned)
        return f"it returns {shapes} instead of {full_shapes}{located}"
    alike = _of_one_shape(full.returned, split.returned)
    for expected, found in alike:  # except caches of keys and values: each rank has its own heads'
        if not _close(found, expected, tolerance):
            return f"what it returns is off by {_off(found, expected)} of the largest value{located}"
    new = dict(model.named_parameters())
    expected_gradients = _gradients([expected for expected, _ in alike], old)
    gradients = _gradients([found for _, found in alike], new)
    order = [name for name, _ in split.outputs]
    return _wrong_gradient(expected_gradients, gradients, change_of, order, tolerance)


def _run(model: nn.Module, inputs: Inputs, running: list[str] | None = None) -> ModelOutputs:
    """Call a model. running: gets the names of the modules that are being called"""
    names = [] if running is None else running
    outputs: dict[tuple[str, int], list[Tensor]] = {}
    calls: dict[str, int] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            outputs[name, calls[name]] = [x.detach() for x in floating_tensors(output)]

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules() if name]
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(lambda *_, name=name: names.append(name), prepend=True)
        )
        handles.append(module.register_forward_hook(lambda *_: names.__delitem__(-1)))
    try:
        with trial_context(model):
            returned = floating_tensors(call_model(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return ModelOutputs(returned, outputs)


def _first_output(
    full: ModelOutputs,
    split: ModelOutputs,
    change_of: Mapping[str, ModuleChange],
    shares: Set[str],
    tolerance: float,
) -> str:
    """Name the first module, in order of execution, whose output is wrong; skip modules in `shares`."""
    before = ""
    for (name, number), found in split.outputs.items():
        if name in shares:
            continue
        expected = full.outputs.get((name, number), [])
        if name in change_of:
            expected = [change_of[name].own_output(x) for x in expected]
        pairs = _of_one_shape(expected, found)
        if not all(_close(found, expected, tolerance) for expected, found in pairs):
            return f"; the first module whose output differs is '{name}'{before}"
        if pairs:
            before = f", and the last before it that agrees is '{name}'"
    return ""


def _gradients(returned: list[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    loss = torch.zeros((), dtype=torch.float64, device=returned[0].device)
    for x in returned:
        if x.requires_grad:
            weights = torch.arange(x.numel(), device=x.device).add_(1).double().cos()
            loss = loss + (x.double().reshape(-1) * weights).sum()
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(trainable, found, strict=True))


def _wrong_gradient(
    full: Mapping[str, Tensor],
    split: Mapping[str, Tensor],
    change_of: Mapping[str, ModuleChange],
    order: list[str],
    tolerance: float,
) -> str | None:
    """Describe the first wrong gradient in the order of backward; None if all are right."""
    largest = max((float(x.abs().max()) for x in full.values() if x.numel()), default=0.0)
    place = {name: index for index, name in enumerate(order)}
    wrong = []
    for name, found in split.items():
        owner, _, short = name.rpartition(".")
        expected = change_of[owner].shard_of(short, full[name]) if owner in change_of else full[name]
        if not _close(found, expected, tolerance, NOISE * tolerance * largest):
            wrong.append((place.get(owner, len(order)), name, _off(found, expected)))
    if not wrong:
        return None
    _, name, off = max(wrong)
    more = f"; so are {len(wrong) - 1} more gradients" if len(wrong) > 1 else ""
    return f"the gradient of '{name}' is off by {off} of its largest value{more}"


def _close(found: Tensor, expected: Tensor, tolerance: float, noise: float = 1e-12) -> bool:
    """Whether all numbers are within tolerance, and none is NaN."""
    if not found.numel():
        return True
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max() + noise)


def _of_one_shape(expected: list[Tensor], found: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(one, other) for one, other in zip(expected, found, strict=False) if one.shape == other.shape]


def _off(found: Tensor, expected: Tensor) -> str:
    off = (found - expected).detach().abs().max() / expected.detach().abs().max()
    return f"{float(off):.1e}"


def _returned_shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors) or "nothing"
