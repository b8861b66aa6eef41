"""Tries a plan and sequence parallelism on copies of a model; all ranks raise the same error.

Compares outputs and gradients of the split model with the unsharded model's.

Both compute in float64, or in float32 if the model does not run in float64: half precision would hide faults.
Both are made from a twin; the model does not change. Noise is added to the twin's weights first, because
zeros and ones hide terms and factors that are applied too often.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tpkernels.errors import warn
from tpkernels.interop.parallelize.changes import carry_out, planned
from tpkernels.interop.parallelize.hf_modules import ModuleChange
from tpkernels.interop.parallelize.plan import ParallelizePlan
from tpkernels.interop.parallelize.probe import (
    Inputs,
    ParameterNames,
    call_model,
    floating_tensors,
    graph_of_rank,
    made_up_inputs,
    partial_parameters,
    trial_context,
    twin_of,
)
from tpkernels.interop.parallelize.sequence import Sharing, share_tokens, sharing_of
from tpkernels.interop.parallelize.tokens import sum_gradients
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.replicas import agree_on, unlike_first_rank

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
    try:
        split = _run(model, reference.inputs)
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"
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


def _run(model: nn.Module, inputs: Inputs) -> ModelOutputs:
    outputs: dict[tuple[str, int], list[Tensor]] = {}
    calls: dict[str, int] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            outputs[name, calls[name]] = [x.detach() for x in floating_tensors(output)]

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules() if name]
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


Verify = Inputs | Literal["auto", False]

# A comparison takes 26 bytes for each parameter, with gradients of both models: 3.3 GiB.
VERIFIED_PARAMETERS = 2**27
GIVE_INPUTS = "Pass verify=example inputs (a tensor, a tuple, or a mapping of arguments by name)"


def require_verify(verify: object) -> None:
    """Raise unless `verify` is example inputs, "auto" or False."""
    named = verify in ("auto", False) if isinstance(verify, str | bool) else False
    if not named and not isinstance(verify, Tensor | tuple | Mapping):
        raise TypeError(
            "verify: expected example inputs (a tensor, a tuple, or a mapping of arguments by name), 'auto' "
            f"or False, got {verify!r}"
        )


class NotCompared(ValueError):
    """No plan can be compared with the unsharded model."""


@dataclass(frozen=True)
class Example:
    """Inputs with which the unsharded model runs, or the reason that it cannot be compared; or neither.

    fits: whether the model may be compared: it is small enough, or the caller gave the inputs
    lacking: why the model cannot be compared; refusal: the error if it must be
    """

    inputs: Inputs | None = None
    given: bool = False
    fits: bool = True
    lacking: str = ""
    refusal: NotCompared | None = None


@dataclass(frozen=True)
class PlanTrial:
    """Tries plans, and sequence parallelism, on copies of a model. All ranks call its methods."""

    model: nn.Module
    verify: Verify
    world: TensorWorld
    state: State

    def _twin(self, fits: bool) -> nn.Module:
        return twin_of(self.model, device=device_of(self.world) if fits else None)

    def example(self, *, divided: bool = False) -> Example:
        """Return the first inputs, given or made up, with which a copy of the model runs.

        divided: tokens will be sharded: make their number a multiple of the ranks
        """
        model, world = self.model, self.world
        if self.verify is False or world.size == 1:
            return Example()
        given = None if isinstance(self.verify, str | bool) else self.verify
        if given is not None:
            _require_same(given, world)
        size = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
        fits = given is not None or size <= VERIFIED_PARAMETERS
        failed: list[str] = []
        found: Inputs | None = None
        lacking, advice = "", GIVE_INPUTS
        try:
            twin = self._twin(fits)
        except Exception as error:
            lacking, advice = "no copy of it can be made", "Mend copy.deepcopy(model), or pass verify=False"
            failed.append(_said(error))
        else:
            made = made_up_inputs(model, world.size, divided=divided) if given is None else iter([given])
            try:
                found = next((inputs for inputs in made if _runs(twin, inputs, failed)), None)
            except Exception as error:  # an unusual config
                failed.append(f"making them up raises {_said(error)}")
            if found is None and given is not None:
                lacking = "the unsharded model does not run with these inputs"
                advice = "Call it with them, in eval mode, before parallelize, and pass those that it takes"
            elif found is None:
                lacking = "no inputs with which it runs could be made up"
            elif not fits:
                lacking = f"it has {size} numbers, and a comparison takes 26 bytes for each"
        refusal = self._not_compared(lacking, advice, "; ".join(failed)) if lacking else None
        raise_alike(refusal if given is not None else None, f"trying input {len(failed)}, {lacking}", world)
        return Example(found, given is not None, fits, lacking, refusal)

    def _not_compared(self, lacking: str, advice: str, details: str) -> NotCompared:
        return NotCompared(
            f"verify: {type(self.model).__name__} cannot be compared with its split copy: {lacking}. {advice}"
            f"{details and '. ' + details}"
        )

    def plan(self, plan: ParallelizePlan, example: Example, *, certain: bool) -> ParameterNames:
        """Try a plan on copies; return names of parameters with partial gradients.

        Raises if the split model computes something else, or if it is unknown for a parameter.

        certain: take a plan that cannot be compared, with a warning; False: refuse it
        """
        model, world = self.model, self.world
        if world.size == 1:
            return frozenset()
        if example.refusal and not certain:
            raise example.refusal
        partial: ParameterNames = frozenset()
        problem: ValueError | None = None
        try:
            seen: dict[str, bool] = {}
            if example.inputs is not None:
                twin = self._twin(example.fits)
                seen = graph_of_rank(twin, planned(twin, plan, world), example.inputs)
            partial = partial_parameters(model, planned(model, plan, world), seen)
        except ValueError as error:
            problem = error
            if example.refusal and example.inputs is None:
                problem = NotCompared(f"{example.refusal}. {error}")
        raise_alike(problem, f"partial gradients of {sorted(partial)}", world)
        is_wanted = example.inputs is not None or example.lacking
        if not is_wanted or dist.get_backend(world.group) == "fake":
            return partial
        obstacle = example.lacking or self._compared(example, plan, partial)
        if obstacle and not certain:
            with_these = "with the inputs that were made up it raises an error"
            raise self._not_compared(with_these, GIVE_INPUTS, obstacle)
        if obstacle and world.rank == 0:
            warn(
                f"parallelize: the split model was not compared with the unsharded one: {obstacle}; pass "
                "verify=example inputs, or verify=False",
                stacklevel=4,
            )
        return partial

    def sharing(self, plan: ParallelizePlan, partial: ParameterNames) -> Sharing | None:
        """Try sequence parallelism on copies; return the modules with sharded tokens, None on one rank.

        Raises if a module cannot compute on sharded tokens, or if the model then computes something else.

        partial: parameters with partial gradients without sequence parallelism, too
        """
        world = self.world
        if world.size == 1:
            return None
        example = self.example(divided=True)
        if example.inputs is None:
            assert example.refusal is not None
            raise example.refusal
        sharing: Sharing | None = None
        problem: ValueError | None = None
        try:
            twin = self._twin(example.fits)
            sharing = sharing_of(twin, planned(twin, plan, world), example.inputs, partial, world.size)
        except ValueError as error:
            problem = error
        raise_alike(problem, f"{sharing}", world)
        if example.fits and dist.get_backend(world.group) != "fake":
            self._compared(example, plan, partial, sharing)
        return sharing

    def _compared(
        self, example: Example, plan: ParallelizePlan, partial: ParameterNames, sharing: Sharing | None = None
    ) -> str:
        """Raise on all ranks if a rank's split model computes something else than the unsharded model.

        Returns why they were not compared, or "". If the caller gave the inputs, it raises instead.
        """
        assert example.inputs is not None
        world = self.world
        found: Reference | str
        try:
            found = reference_of(self.model, example.inputs, device_of(world))
        except Exception as error:
            found = f"in float64 and float32 it raises {_said(error)}"
        problem = None
        if isinstance(found, str) and example.given:
            problem = self._not_compared(
                "not on these inputs", "Pass others, with which it returns finite numbers", found
            )
        raise_alike(
            problem, "not compared" if isinstance(found, str) else f"compared in {found.dtype}", world
        )
        if isinstance(found, str):
            return found
        differences: list[str | None] = [None] * world.size
        own = difference(found, plan, partial, world, self.state, sharing)
        dist.all_gather_object(differences, own, group=world.group)
        subject, advice = (
            ("sequence_parallel", "Parallelize without it") if sharing else ("plan", "Mend the plan")
        )
        for rank, different in enumerate(differences):
            if different is not None:
                raise ValueError(
                    f"{subject}: the split model computes something else than the unsharded model. {advice}; "
                    f"the model is unchanged. On tensor rank {rank}, {different} ({found.tolerance:.0e} is "
                    f"allowed, in {found.dtype})"
                )
        return ""


def _runs(twin: nn.Module, inputs: Inputs, failed: list[str]) -> bool:
    """Whether the twin runs with these inputs; append the error to `failed`."""
    try:
        with trial_context(twin), torch.no_grad():
            call_model(twin, inputs)
    except Exception as error:
        failed.append(f"with {_shapes(inputs)} it raises {_said(error)}")
        return False
    return True


def device_of(world: TensorWorld) -> torch.device:
    """Return the device on which a model from the meta device is run."""
    return torch.device("cuda" if dist.get_backend(world.group) == "nccl" else "cpu")


def raise_alike(problem: ValueError | None, found: str, world: TensorWorld) -> None:
    """Raise the first rank's problem on all ranks; without a problem, raise unless all found the same."""
    if dist.get_backend(world.group) == "fake":
        if problem:
            raise problem
        return
    problems: list[ValueError | None] = [None] * world.size
    dist.all_gather_object(problems, problem, group=world.group)
    for each in problems:
        if each is not None:
            raise each from problem
    agree_on(f"parallelize: {found}", (), world.group)


def _require_same(inputs: Inputs, world: TensorWorld) -> None:
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    agree_on("parallelize: verify", [(f"input {i}", x) for i, x in enumerate(tensors)], world.group)
    real = [x.detach() for x in tensors if not x.is_meta]
    if real and bool(unlike_first_rank(real, world.group).any()):
        raise ValueError("verify: expected the same inputs on all tensor-parallel ranks, got different ones")


def _said(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 300)


def _shapes(inputs: Inputs) -> str:
    """Return shapes of inputs, such as {'input_ids': (3, 5)}."""
    return str(tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, inputs))
