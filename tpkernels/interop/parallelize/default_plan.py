"""Chooses the plan that splits a model if the caller gives none.

The own plan of a model of `transformers` comes first, completed by names of layers; then plans by names of
layers, from the plan that splits most to the plan that splits least. The first plan that passes its trial is
taken, and a warning says why earlier plans failed. A plan by names must be compared with the unsharded model,
except for models in docs/models-supported.md, which were compared before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from torch import nn

from tpkernels.errors import warn
from tpkernels.interop.parallelize.changes import planned
from tpkernels.interop.parallelize.layer_names import Depth, plan_by_names
from tpkernels.interop.parallelize.plan import (
    ParallelizePlan,
    listed,
)
from tpkernels.interop.parallelize.probe import ParameterNames
from tpkernels.interop.parallelize.saving import require_dtensors
from tpkernels.interop.parallelize.transformers_plan import own_plan, styles_of
from tpkernels.interop.parallelize.trial import NotCompared, PlanTrial

DEPTHS: tuple[Depth, ...] = ("heads", "heads and features", "gathered attention", "gathered", "mlp")
BROUGHT = "the plan that the model brings"
# Types of models of `transformers` whose plans by names were compared with the unsharded model.
# fmt: off
KNOWN = {
    "bart", "bert", "bloom", "camembert", "codegen", "distilbert", "electra", "falcon", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_oss", "gptj", "granitemoe", "granitemoeshared", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "lfm2", "lfm2_moe", "mbart", "mpt", "opt", "persimmon", "phimoe", "qwen2_moe",
    "roberta", "t5", "umt5", "vit", "whisper", "xlm-roberta",
}
# fmt: on


@dataclass(frozen=True)
class PossiblePlan:
    """A plan that can be tried.

    certain: it need not be compared with the unsharded model
    whole: the layers that it leaves unsplit on every rank, in words
    """

    name: str
    plan: ParallelizePlan
    certain: bool = True
    whole: list[str] = field(default_factory=list)


def possible_plans(model: nn.Module, ranks: int) -> list[PossiblePlan]:
    """Return the plans to try, in order; raise if there is none."""
    found: list[PossiblePlan] = []
    config: Any = getattr(model, "config", None)
    known = getattr(config, "model_type", None) in KNOWN
    if styles_of(model):
        whole: list[str] = []
        brought = own_plan(model, ranks, whole.append)
        more: list[str] = []
        completed = plan_by_names(model, ranks, "heads", more.append, brought)
        if completed != brought:
            found.append(PossiblePlan(f"{BROUGHT}, and names of layers", completed, known, whole + more))
        if brought:
            found.append(PossiblePlan(BROUGHT, brought, True, whole))
    for depth in DEPTHS:
        whole = []
        plan = plan_by_names(model, ranks, depth, whole.append)
        if plan and all(plan != other.plan for other in found):
            certain = known and depth == DEPTHS[0]
            found.append(PossiblePlan(f"a plan by names of layers ({depth})", plan, certain, whole))
    if not found:
        raise ValueError(
            "plan: expected one, for the model brings none and none of its layers is known by name; see "
            "docs/huggingface.md"
        )
    return found


def first_that_works(
    trial: PlanTrial, possible: list[PossiblePlan], *, as_dtensor: bool
) -> tuple[ParallelizePlan, ParameterNames]:
    """Try the plans in turn; return the first that passes, and the parameters with partial gradients."""
    example = trial.example()
    failed: list[tuple[PossiblePlan, Exception]] = []
    for one in possible:
        try:
            planned(trial.model, one.plan, trial.world)  # the same error on all ranks
            if as_dtensor:
                require_dtensors(one.plan)  # so is this
            partial = trial.plan(one.plan, example, certain=one.certain)
        except (ValueError, TypeError) as error:
            failed.append((one, error))
            continue
        if trial.world.rank == 0:
            _tell(one, failed)
        return one.plan, partial
    raise _refusal(trial.model, failed)


def _refusal(model: nn.Module, failed: list[tuple[PossiblePlan, Exception]]) -> Exception:
    """Return the error that no plan works, with advice and the reason for each plan."""
    for _, error in failed:
        if len(failed) == 1 or isinstance(error, NotCompared):
            return error
    first = (
        f"plan: none of the {len(failed)} that were tried splits {type(model).__name__} correctly. Pass a "
        "plan (docs/huggingface.md says how); the model is unchanged"
    )
    return ValueError(listed(first, *(f"{one.name}: {shorten(str(error), 400)}" for one, error in failed)))


def _tell(one: PossiblePlan, failed: list[tuple[PossiblePlan, Exception]]) -> None:
    for other, error in failed:
        warn(listed(f"parallelize: {other.name} does not work; {one.name} does", str(error)), stacklevel=4)
    if one.whole:
        more = f"; and {len(one.whole) - 1} more like it" if len(one.whole) > 1 else ""
        warn(f"parallelize: {one.name}: {one.whole[0]}{more}", stacklevel=4)
