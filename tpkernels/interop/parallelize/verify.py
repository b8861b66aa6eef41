"""The split model against the unsharded one: what they return, and gradients.

Both compute in float64, or in float32 where the model cannot: half precision would hide what is wrong.
Both are made from a twin, so that the model is left alone. Its weights are moved off their values first, for
zeros and ones hide what is added or multiplied too often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.interop.parallelize.partial import sum_gradients
from tpkernels.interop.parallelize.plan import Plan
from tpkernels.interop.parallelize.probe import Names
from tpkernels.interop.parallelize.swaps import Swap, carry_out, planned
from tpkernels.interop.parallelize.twins import Inputs, aside, call, floating_tensors, twin_of
from tpkernels.layers.world import State, TensorWorld

# Of a tensor's largest value.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Of the largest gradient, in tolerances: gradients of keys' biases, for instance, are zero but for rounding.
NOISE = 1e-2


@dataclass(frozen=True)
class Run:
    """What a model returns, and each of its modules, by name and number of the call."""

    returned: list[Tensor]
    outputs: dict[tuple[str, int], list[Tensor]]


@dataclass(frozen=True)
class Reference:
    model: nn.Module
    inputs: Inputs
    run: Run
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]


def reference_of(model: nn.Module, inputs: Inputs, device: torch.device) -> Reference:
    """The unsharded model; whatever it raises where it does not run. Nothing is sent.

    device: for what is on the meta device
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
        raise ValueError("expected finite numbers from the unsharded model, got others")
    return Reference(twin, inputs, run, dtype)


def difference(
    reference: Reference, plan: Plan, partial: Names, world: TensorWorld, state: State
) -> str | None:
    """What the split model does differently, in words. Called by all ranks; uses the reference up."""
    model, whole, tolerance = reference.model, reference.run, reference.tolerance
    work, old = planned(model, plan, world), dict(model.named_parameters())
    swaps = {id(swap.old): swap for swap in work.swaps}
    swap_of = {n: swaps[id(m)] for n, m in model.named_modules(remove_duplicate=False) if id(m) in swaps}
    carry_out(model, work, state)
    sum_gradients(model, partial, world)
    try:
        split = _run(model, reference.inputs)
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"
    located = _first_output(whole, split, swap_of, tolerance)
    if len(whole.returned) != len(split.returned) or whole.returned[0].shape != split.returned[0].shape:
        return f"it returns {_shapes(split.returned)} instead of {_shapes(whole.returned)}{located}"
    alike = [pair for pair in zip(whole.returned, split.returned, strict=True) if _same_shape(*pair)]
    for expected, found in alike:  # caches of keys and values are of each rank's heads
        if not _close(found, expected, tolerance):
            return f"what it returns is off by {_off(found, expected)} of the largest value{located}"
    new = dict(model.named_parameters())
    expected_gradients = _gradients([expected for expected, _ in alike], old)
    gradients = _gradients([found for _, found in alike], new)
    order = [name for name, _ in split.outputs]
    return _wrong_gradient(expected_gradients, gradients, swap_of, order, tolerance)


def _run(model: nn.Module, inputs: Inputs) -> Run:
    outputs: dict[tuple[str, int], list[Tensor]] = {}
    calls: dict[str, int] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            outputs[name, calls[name]] = [x.detach() for x in floating_tensors(output)]

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules() if name]
    try:
        with aside(model):
            returned = floating_tensors(call(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return Run(returned, outputs)


def _first_output(whole: Run, split: Run, swap_of: Mapping[str, Swap], tolerance: float) -> str:
    """Where the two part: the first module that returns something else, in the order of execution."""
    before = ""
    for (name, number), found in split.outputs.items():
        expected = whole.outputs.get((name, number), [])
        if name in swap_of and swap_of[name].kind == "column":
            expected = [swap_of[name].part(x, x.ndim - 1) for x in expected]
        pairs = [pair for pair in zip(expected, found, strict=False) if _same_shape(*pair)]
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
    whole: Mapping[str, Tensor],
    split: Mapping[str, Tensor],
    swap_of: Mapping[str, Swap],
    order: list[str],
    tolerance: float,
) -> str | None:
    """The wrong gradient that backward comes to first."""
    largest = max((float(x.abs().max()) for x in whole.values() if x.numel()), default=0.0)
    place = {name: index for index, name in enumerate(order)}
    wrong = []
    for name, found in split.items():
        owner, _, short = name.rpartition(".")
        expected = swap_of[owner].held(short, whole[name]) if owner in swap_of else whole[name]
        if not _close(found, expected, tolerance, NOISE * tolerance * largest):
            wrong.append((place.get(owner, len(order)), name, _off(found, expected)))
    if not wrong:
        return None
    _, name, off = max(wrong)
    more = f"; so are {len(wrong) - 1} more gradients" if len(wrong) > 1 else ""
    return f"the gradient of '{name}' is off by {off} of its largest value{more}"


def _close(found: Tensor, expected: Tensor, tolerance: float, noise: float = 1e-12) -> bool:
    """All numbers within tolerance; not if one is NaN."""
    if not found.numel():
        return True
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max() + noise)


def _off(found: Tensor, expected: Tensor) -> str:
    off = (found - expected).detach().abs().max() / expected.detach().abs().max()
    return f"{float(off):.1e}"


def _same_shape(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors) or "nothing"
