"""Process groups by Megatron's short names, and a parallel state made of Megatron's groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.groups.kinds import GroupKind
from tpkernels.groups.plan import ListedPlan
from tpkernels.groups.state import ParallelState, ParallelStateError
from tpkernels.interop.megatron_core import parallel_state


@dataclass(init=False, repr=False)
class ProcessGroupCollection:
    """Groups of one model, to pass to Megatron's functions, or to tpkernels' layers as `state=`.

    A group that was not set is no attribute; a group without this rank may be None.
    """

    tp: ProcessGroup
    pp: ProcessGroup
    mp: ProcessGroup
    embd: ProcessGroup | None
    pos_embd: ProcessGroup | None
    cp: ProcessGroup
    tp_cp: ProcessGroup
    hcp: list[ProcessGroup] | None
    ep: ProcessGroup
    expt_tp: ProcessGroup
    tp_ep: ProcessGroup
    tp_ep_pp: ProcessGroup
    tp_dp_cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    expt_dp: ProcessGroup
    intra_dp_cp: ProcessGroup
    intra_expt_dp: ProcessGroup
    inter_dist_opt: ProcessGroup | None
    intra_dist_opt: ProcessGroup

    def __init__(self, **groups: ProcessGroup | list[ProcessGroup] | None) -> None:
        known = {each.name for each in fields(self)}
        for name, group in groups.items():
            if name not in known:
                raise ValueError(f"no group is called {name!r}; known are {', '.join(sorted(known))}")
            setattr(self, name, group)

    def __repr__(self) -> str:
        said = []
        for each in fields(self):
            if hasattr(self, each.name):
                group = getattr(self, each.name)
                size = [one.size() for one in group] if isinstance(group, list) else group and group.size()
                said.append(f"{each.name}({size})")
        return f"ProcessGroupCollection({', '.join(said) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Iterable[str] | None = None) -> ProcessGroupCollection:
        """Return the groups of the current parallel state. required_pgs: their names; None: all"""
        names = [each.name for each in fields(cls)] if required_pgs is None else list(required_pgs)
        unknown = set(names) - _GETTERS.keys()
        if unknown:
            raise ValueError(f"no groups are called {sorted(unknown)}; known are {', '.join(_GETTERS)}")
        return cls(**{name: _GETTERS[name].of(parallel_state) for name in names})


@dataclass(frozen=True)
class _Getter:
    """The function of a module like Megatron's `parallel_state` that returns a group, and its arguments.

    kind: our kind of group; None: none in a plan
    """

    name: str
    arguments: Mapping[str, bool]
    kind: GroupKind | None

    def of(self, module: Any) -> Any:
        return getattr(module, self.name)(**self.arguments)


def _get(name: str, kind: GroupKind | None = None, **arguments: bool) -> _Getter:
    return _Getter(name, arguments, kind)


_if_any = partial(_get, check_initialized=False)
_GETTERS: Mapping[str, _Getter] = {
    "tp": _if_any("get_tensor_model_parallel_group", "tp"),
    "pp": _if_any("get_pipeline_model_parallel_group", "pp"),
    "mp": _if_any("get_model_parallel_group", "model"),
    "embd": _if_any("get_embedding_group", "embedding"),
    "pos_embd": _if_any("get_position_embedding_group", "position_embedding"),
    "cp": _if_any("get_context_parallel_group", "cp"),
    "tp_cp": _if_any("get_tensor_and_context_parallel_group", "tp_cp"),
    "hcp": _if_any("get_hierarchical_context_parallel_groups"),
    "ep": _if_any("get_expert_model_parallel_group", "ep"),
    "expt_tp": _if_any("get_expert_tensor_parallel_group", "expert_tp"),
    "tp_ep": _if_any("get_expert_tensor_and_model_parallel_group", "expert_tp_ep"),
    "tp_ep_pp": _if_any("get_expert_tensor_model_pipeline_parallel_group", "expert_tp_ep_pp"),
    "tp_dp_cp": _if_any("get_tensor_and_data_parallel_group", "tp_dp_cp", with_context_parallel=True),
    "dp": _get("get_data_parallel_group", "dp"),
    "dp_cp": _get("get_data_parallel_group", "dp_cp", with_context_parallel=True),
    "expt_dp": _if_any("get_expert_data_parallel_group", "expert_dp"),
    "intra_dp_cp": _get("get_data_parallel_group", with_context_parallel=True, partial_data_parallel=True),
    "intra_expt_dp": _if_any("get_expert_data_parallel_group", partial_expert_data_parallel=True),
    "inter_dist_opt": _if_any("get_inter_distributed_optimizer_instance_group"),
    "intra_dist_opt": _if_any("get_intra_distributed_optimizer_instance_group"),
}


class HasTensorGroup(Protocol):
    """An object with a tensor-parallel group, such as Megatron's ProcessGroupCollection, or ours."""

    @property
    def tp(self) -> ProcessGroup: ...


def from_megatron(collection: HasTensorGroup | None = None) -> ParallelState:
    """Return a parallel state of groups that Megatron has made, for layers or for `use(state)`.

    It knows this rank's groups only. They stay Megatron's: `destroy_parallel_state` does not destroy them.

    collection: Megatron's ProcessGroupCollection, or ours; None: the groups of `megatron.core.parallel_state`
    """
    found: dict[GroupKind, ProcessGroup] = {}
    virtual = None
    if collection is None:
        module = import_module("megatron.core.parallel_state")
        if not module.model_parallel_is_initialized():
            raise ParallelStateError("megatron.core.parallel_state is not initialized: initialize it first")
        collection = ProcessGroupCollection(**{name: get.of(module) for name, get in _GETTERS.items()})
        found["tp_dp"] = module.get_tensor_and_data_parallel_group()
        virtual = module.get_virtual_pipeline_model_parallel_world_size()
    for name, getter in _GETTERS.items():
        group = getattr(collection, name, None)
        if getter.kind is not None and isinstance(group, ProcessGroup):
            found[getter.kind] = group
    if "tp" not in found:
        raise ParallelStateError(f"expected a tensor-parallel group of this rank, got {collection!r}")
    ranks = {kind: dist.get_process_group_ranks(group) for kind, group in found.items()}
    known_not_in = {_GETTERS[name].kind for name in ("embd", "pos_embd") if hasattr(collection, name)}

    def lists(kind: GroupKind) -> list[list[int]]:
        if kind == "alone":
            return [[dist.get_rank()]]
        if kind not in ranks and kind in known_not_in:
            return []  # of other stages
        if kind not in ranks:
            raise ParallelStateError(f"Megatron's {kind} group is not known: it is not in {collection!r}")
        return [ranks[kind]]

    sizes = {kind: len(its) for kind, its in ranks.items()}
    plan = ListedPlan(
        world_size=dist.get_world_size(),
        tensor=sizes["tp"],
        pipeline=sizes.get("pp", 1),
        context=sizes.get("cp", 1),
        expert=sizes.get("ep", 1),
        virtual_pipeline=virtual,
        split_rank=None,
        order=(),
        lists=lists,
    )
    return ParallelState(rank=dist.get_rank(), plan=plan, process_groups=found)
