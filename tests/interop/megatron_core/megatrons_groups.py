"""Every group of a parallel state by Megatron's getters: of Megatron's own module, or of ours."""

import torch.distributed as dist

_GROUPS = (
    "model_parallel tensor_model_parallel pipeline_model_parallel data_parallel context_parallel "
    "amax_reduction tensor_and_data_parallel tensor_and_context_parallel expert_model_parallel "
    "expert_tensor_parallel expert_tensor_and_model_parallel expert_tensor_model_pipeline_parallel "
    "expert_data_parallel intra_distributed_optimizer_instance"
)
GETTERS = [(f"get_{name}_group", {}) for name in _GROUPS.split()]
for name in ("embedding", "position_embedding", "inter_distributed_optimizer_instance"):
    GETTERS.append((f"get_{name}_group", {"check_initialized": False}))
for name, *options in (
    ("data_parallel", "with_context_parallel"),
    ("data_parallel", "with_context_parallel", "partial_data_parallel"),
    ("amax_reduction", "with_context_parallel"),
    ("amax_reduction", "tp_only_amax_red"),
    ("amax_reduction", "with_context_parallel", "tp_only_amax_red"),
    ("tensor_and_data_parallel", "with_context_parallel"),
    ("expert_data_parallel", "partial_expert_data_parallel"),
):
    GETTERS.append((f"get_{name}_group", dict.fromkeys(options, True)))
_MEASURES = (  # without arguments
    "model_parallel_is_initialized get_tensor_model_parallel_world_size "
    "get_pipeline_model_parallel_world_size get_tensor_model_parallel_rank "
    "get_pipeline_model_parallel_rank is_pipeline_first_stage is_pipeline_last_stage "
    "is_rank_in_embedding_group is_rank_in_position_embedding_group get_virtual_pipeline_model_parallel_rank "
    "get_virtual_pipeline_model_parallel_world_size get_tensor_model_parallel_src_rank "
    "get_model_parallel_src_rank get_data_parallel_src_rank get_pipeline_model_parallel_first_rank "
    "get_pipeline_model_parallel_last_rank get_pipeline_model_parallel_next_rank "
    "get_pipeline_model_parallel_prev_rank get_data_parallel_world_size get_data_parallel_rank "
    "get_context_parallel_world_size get_context_parallel_rank get_context_parallel_global_ranks "
    "get_tensor_and_context_parallel_world_size get_tensor_and_context_parallel_rank "
    "get_expert_model_parallel_src_rank get_expert_model_parallel_world_size "
    "get_expert_model_parallel_rank get_expert_tensor_parallel_world_size get_expert_tensor_parallel_rank "
    "get_expert_tensor_and_model_parallel_world_size get_expert_tensor_and_model_parallel_rank "
    "get_expert_data_parallel_rank get_expert_data_parallel_world_size has_separate_all_gather_group "
    "get_all_ranks"
)
MEASURES = _MEASURES.split()


def answers(module, sizes):
    """All that `module` says after initialize_model_parallel(**sizes) on this rank, or that it refuses."""
    try:
        module.initialize_model_parallel(**sizes)
        found = {name: getattr(module, name)() for name in MEASURES}
        for name, arguments in GETTERS:
            found[f"{name}({arguments})"] = ranks_of(getattr(module, name)(**arguments))
        if "hierarchical_context_parallel_sizes" in sizes:  # else Megatron answers with an earlier state's
            found["hierarchical"] = ranks_of(module.get_hierarchical_context_parallel_groups())
        if sizes.get("hybrid_context_parallel"):
            ranks = module.get_data_parallel_world_size(with_context_parallel=True)
            for size in (size for size in (2, 4) if 2 * size <= ranks):
                group = module.get_hybrid_data_context_parallel_groups(group_size=size)
                found[f"hybrid {size}"] = ranks_of(group)
        return found
    except (RuntimeError, AssertionError) as error:
        return {"refused": True, "why": str(error)}
    finally:
        module.destroy_model_parallel()


def ranks_of(group):
    if isinstance(group, list):
        return [ranks_of(each) for each in group]
    return None if group is None else dist.get_process_group_ranks(group)
