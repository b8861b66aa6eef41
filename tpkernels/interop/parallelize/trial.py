"""Tries a plan and sequence parallelism on copies of a model; all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tpkernels.errors import warn
from tpkernels.interop.parallelize.changes import planned
from tpkernels.interop.parallelize.plan import ParallelizePlan, listed
from tpkernels.interop.parallelize.probe import ParameterNames, graph_of_rank, partial_parameters
from tpkernels.interop.parallelize.sequence import Sharing, sharing_of
from tpkernels.interop.parallelize.smaller import Smaller, smaller_of, smaller_plan
from tpkernels.interop.parallelize.twins import (
    Inputs,
    call_model,
    made_up_inputs,
    trial_context,
    twin_of,
)
from tpkernels.interop.parallelize.verify import Reference, difference, reference_of
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.replicas import agree_on, unlike_first_rank

Verify = Inputs | Literal["auto", False]

# A comparison takes 26 bytes for each parameter, with gradients of both models: 3.3 GiB.
# Above, a smaller model is compared.
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
    smaller: is compared instead of a model that does not fit
    lacking: why the model cannot be compared; refusal: the error if it must be
    """

    inputs: Inputs | None = None
    fits: bool = True
    smaller: Smaller | None = None
    lacking: str = ""
    refusal: NotCompared | None = None


@dataclass(frozen=True)
class PlanTrial:
    """Tries plans, and sequence parallelism, on copies of a model. All ranks call its methods."""

    model: nn.Module
    verify: Verify
    world: TensorWorld
    state: State

    @property
    def given(self) -> Inputs | None:
        """The caller's example inputs."""
        return None if isinstance(self.verify, str | bool) else self.verify

    def _of(self, smaller: Smaller) -> PlanTrial:
        return PlanTrial(smaller.model, "auto", self.world, self.state)

    def _twin(self, fits: bool) -> nn.Module:
        return twin_of(self.model, device=device_of(self.world) if fits else None)

    def example(self, *, divided: bool = False, itself: bool = False) -> Example:
        """Return the first inputs, given or made up, with which a copy of the model runs.

        divided: tokens will be sharded: make their number a multiple of the ranks
        itself: no smaller model in place of a large one
        """
        model, world = self.model, self.world
        if self.verify is False or world.size == 1:
            return Example()
        given = self.given
        if given is not None:
            _require_same(given, world)
        size = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
        fits = given is not None or size <= VERIFIED_PARAMETERS
        unlike = ""
        if not fits and not itself:
            smaller: Smaller | None = None
            try:
                smaller = smaller_of(model, world.size, device_of(world))
            except ValueError as error:
                unlike = shorten(str(error), 300)
            raise_alike(None, f"a smaller model: {unlike}", world)
            if smaller is not None:
                unlike = self._of(smaller).example(divided=divided).lacking
                if not unlike:
                    return Example(fits=False, smaller=smaller)
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
            if unlike:
                lacking += f"; a smaller {type(model).__name__} does not stand for it: {unlike}"
        refusal = self._not_compared(lacking, advice, *failed) if lacking else None
        raise_alike(refusal if given is not None else None, f"trying input {len(failed)}, {lacking}", world)
        return Example(found, fits, None, lacking, refusal)

    def _not_compared(self, lacking: str, advice: str, *details: str) -> NotCompared:
        first = (
            f"verify: {type(self.model).__name__} cannot be compared with its split copy: {lacking}. {advice}"
        )
        return NotCompared(listed(first, *details))

    def plan(self, plan: ParallelizePlan, example: Example, *, certain: bool) -> ParameterNames:
        """Try a plan on copies; return names of parameters with partial gradients.

        Raises if the split model computes something else, or if it is unknown for a parameter.

        certain: take a plan that cannot be compared, with a warning; False: refuse it
        """
        model, world = self.model, self.world
        if world.size == 1:
            return frozenset()
        if example.smaller is not None:
            return self._plan_of_smaller(plan, example.smaller, certain=certain)
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
                problem = NotCompared(listed(str(example.refusal), str(error)))
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

    def _plan_of_smaller(self, plan: ParallelizePlan, smaller: Smaller, *, certain: bool) -> ParameterNames:
        """Do as `plan` on a smaller model; return names of the model's own parameters."""
        narrow, problem = self._narrow(plan, smaller)
        raise_alike(None, problem, self.world)
        if narrow is None:
            if not certain:
                raise self._not_compared(problem, GIVE_INPUTS)
            return self.plan(plan, self.example(itself=True), certain=True)
        trial = self._of(smaller)
        partial = trial.plan(narrow, trial.example(), certain=certain)
        return frozenset(
            name for name, _ in self.model.named_parameters() if smaller.name_of(name) in partial
        )

    def _narrow(self, plan: ParallelizePlan, smaller: Smaller) -> tuple[ParallelizePlan | None, str]:
        """Return the plan for a smaller model, or the reason that there is none."""
        try:
            narrow = smaller_plan(self.model, smaller.model, plan)
            planned(smaller.model, narrow, self.world)
        except ValueError as error:
            return None, f"the plan does not fit a smaller {type(self.model).__name__}: {error}"
        return narrow, ""

    def sharing(self, plan: ParallelizePlan, partial: ParameterNames) -> Sharing | None:
        """Try sequence parallelism on copies; return the modules with sharded tokens, None on one rank.

        Raises if a module cannot compute on sharded tokens, or if the model then computes something else.

        partial: parameters with partial gradients without sequence parallelism, too
        """
        world = self.world
        if world.size == 1:
            return None
        example = self.example(divided=True)
        if example.smaller is not None:
            narrow, problem = self._narrow(plan, example.smaller)
            raise_alike(None, problem, world)
            if narrow is None:
                raise self._not_compared(problem, GIVE_INPUTS)
            there = partial.intersection(name for name, _ in example.smaller.model.named_parameters())
            found = self._of(example.smaller).sharing(narrow, there)
            assert found is not None
            return found.extended(self.model, example.smaller.name_of)
        if example.inputs is None:
            assert example.refusal is not None
            raise example.refusal
        sharing: Sharing | None = None
        wrong: ValueError | None = None
        try:
            twin = self._twin(example.fits)
            sharing = sharing_of(twin, planned(twin, plan, world), example.inputs, partial, world.size)
        except ValueError as error:
            wrong = error
        raise_alike(wrong, f"{sharing}", world)
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
        if isinstance(found, str) and self.given is not None:
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
                first = (
                    f"{subject}: the split model computes something else than the unsharded model. {advice}; "
                    "the model is unchanged"
                )
                allowed = f"({found.tolerance:.0e} is allowed, in {found.dtype})"
                raise ValueError(listed(first, f"on tensor rank {rank}, {different} {allowed}"))
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


def raise_alike(problem: Exception | None, found: str, world: TensorWorld) -> None:
    """Raise the first rank's problem on all ranks; without a problem, raise unless all found the same."""
    if dist.get_backend(world.group) == "fake":
        if problem:
            raise problem
        return
    problems: list[Exception | None] = [None] * world.size
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
