"""A parallel state made of groups that Megatron has made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.groups.kinds import GroupKind
from tpkernels.groups.plan import ListedPlan
from tpkernels.groups.state import ParallelState, ParallelStateError

# Megatron's names of groups in a ProcessGroupCollection, and our kinds.
KINDS_BY_NAME: Mapping[str, GroupKind] = {
    "tp": "tp",
    "pp": "pp",
    "mp": "model",
    "embd": "embedding",
    "pos_embd": "position_embedding",
    "cp": "cp",
    "tp_cp": "tp_cp",
    "ep": "ep",
    "expt_tp": "expert_tp",
    "tp_ep": "expert_tp_ep",
    "tp_ep_pp": "expert_tp_ep_pp",
    "tp_dp_cp": "tp_dp_cp",
    "dp": "dp",
    "dp_cp": "dp_cp",
    "expt_dp": "expert_dp",
}


class HasTensorGroup(Protocol):
    """An object with a tensor-parallel group, such as Megatron's ProcessGroupCollection."""

    @property
    def tp(self) -> ProcessGroup: ...


def from_megatron(collection: HasTensorGroup | None = None) -> ParallelState:
    """Return a parallel state of groups that Megatron has made, for layers or for `use(state)`.

    It knows this rank's groups only. They stay Megatron's: `destroy_parallel_state` does not destroy them.

    collection: Megatron's ProcessGroupCollection; None: the groups of `megatron.core.parallel_state`
    """
    found: dict[GroupKind, ProcessGroup] = {}
    virtual = None
    if collection is None:
        module = import_module("megatron.core.parallel_state")
        if not module.model_parallel_is_initialized():
            raise ParallelStateError("megatron.core.parallel_state is not initialized: initialize it first")
        config = import_module("megatron.core.process_groups_config")
        collection = config.ProcessGroupCollection.use_mpu_process_groups(list(KINDS_BY_NAME))
        found["tp_dp"] = module.get_tensor_and_data_parallel_group()
        virtual = module.get_virtual_pipeline_model_parallel_world_size()
    for name, kind in KINDS_BY_NAME.items():
        group = getattr(collection, name, None)
        if isinstance(group, ProcessGroup):
            found[kind] = group
    if "tp" not in found:
        raise ParallelStateError(f"expected a tensor-parallel group of this rank, got {collection!r}")
    ranks = {kind: dist.get_process_group_ranks(group) for kind, group in found.items()}
    known_not_in = {KINDS_BY_NAME[name] for name in ("embd", "pos_embd") if hasattr(collection, name)}

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
