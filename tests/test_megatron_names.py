"""Every function of today's Megatron `core.parallel_state` is here, or a row of the docs says why not."""

import inspect
import re
from functools import cache
from pathlib import Path

from tpkernels import parallel_state as ps
from tpkernels.parallel_state.start import _ONLY

DOCS = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text()
MEGATRONS = """
get_nccl_options(pg_name, nccl_comm_cfgs)
update_pg_timeout(timeout, pg=None)
create_group(ranks=None, timeout=None, backend=None, pg_options=None,
    use_local_synchronization=False, group_desc=None)
generate_masked_orthogonal_rank_groups(world_size, parallel_size, mask)
create_hierarchical_groups(rank, ranks, hierarchical_group_sizes, create_gloo_process_groups=False,
    pg_options=None, timeout=None, group_desc=None)
create_hybrid_dp_cp_groups(rank, ranks, pg_options)
RankGenerator()
default_embedding_ranks(pp_ranks)
default_position_embedding_ranks(pp_ranks)
overwrite_nccl_comm_cfgs(nccl_comm_cfgs, pg_name, key_value_pair)
create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None)
is_initialized()
model_parallel_is_initialized()
get_model_parallel_group(check_initialized=True)
get_tensor_model_parallel_group(check_initialized=True)
get_gtp_weight_remat_group(check_initialized=True)
get_gtp_weight_remat_world_size()
get_gtp_weight_remat_rank()
get_gtp_weight_remat_global_ranks(check_initialized=True)
get_pipeline_model_parallel_group(check_initialized=True)
get_data_parallel_group(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)
get_data_parallel_group_gloo(with_context_parallel=False, partial_data_parallel=False)
get_context_parallel_group(check_initialized=True)
get_context_parallel_global_ranks(check_initialized=True)
get_hierarchical_context_parallel_groups(check_initialized=True)
get_hybrid_data_context_parallel_groups(check_initialized=True, group_size=None)
get_embedding_group(check_initialized=True)
get_position_embedding_group(check_initialized=True)
get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False)
get_tensor_and_data_parallel_group(check_initialized=True, with_context_parallel=False)
get_tensor_and_context_parallel_group(check_initialized=True)
set_tensor_model_parallel_world_size(world_size)
set_pipeline_model_parallel_world_size(world_size)
set_virtual_pipeline_model_parallel_world_size(world_size)
get_tensor_model_parallel_world_size()
get_pipeline_model_parallel_world_size()
set_tensor_model_parallel_rank(rank)
set_pipeline_model_parallel_rank(rank)
get_tensor_model_parallel_rank()
get_pipeline_model_parallel_rank()
is_pipeline_first_stage(ignore_virtual=True, vp_stage=None)
is_pipeline_last_stage(ignore_virtual=True, vp_stage=None)
is_rank_in_embedding_group(ignore_virtual=True, vp_stage=None)
is_rank_in_position_embedding_group()
get_virtual_pipeline_model_parallel_rank()
set_virtual_pipeline_model_parallel_rank(rank)
get_virtual_pipeline_model_parallel_world_size()
get_tensor_model_parallel_src_rank()
get_model_parallel_src_rank()
get_data_parallel_src_rank(with_context_parallel=False)
get_pipeline_model_parallel_first_rank()
get_pipeline_model_parallel_last_rank()
get_pipeline_model_parallel_next_rank()
get_pipeline_model_parallel_prev_rank()
get_data_parallel_world_size(with_context_parallel=False, with_gtp_remat=True,
    partial_data_parallel=False)
set_data_parallel_rank(rank)
get_data_parallel_rank(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)
get_context_parallel_world_size()
get_context_parallel_rank()
get_tensor_and_context_parallel_world_size()
get_tensor_and_context_parallel_rank()
get_expert_gtp_weight_remat_group(check_initialized=True)
get_expert_gtp_weight_remat_world_size()
get_expert_gtp_weight_remat_rank()
get_expert_gtp_weight_remat_global_ranks(check_initialized=True)
get_expert_model_parallel_group(check_initialized=True)
get_expert_model_parallel_src_rank()
get_expert_model_parallel_world_size()
set_expert_model_parallel_world_size(world_size)
get_expert_model_parallel_rank()
set_expert_model_parallel_rank(rank)
get_expert_tensor_parallel_group(check_initialized=True)
get_expert_tensor_parallel_world_size()
set_expert_tensor_parallel_world_size(world_size)
get_expert_tensor_parallel_rank()
set_expert_tensor_parallel_rank(rank)
get_expert_tensor_and_model_parallel_group(check_initialized=True)
get_expert_tensor_and_model_parallel_world_size()
get_expert_tensor_and_model_parallel_rank()
get_expert_tensor_model_pipeline_parallel_group(check_initialized=True, with_egtp_remat=False)
get_expert_data_parallel_group(check_initialized=True, with_gtp_remat=True,
    partial_expert_data_parallel=False)
get_expert_data_parallel_group_gloo(partial_expert_data_parallel=False)
get_expert_data_parallel_rank(with_gtp_remat=True, partial_expert_data_parallel=False)
get_expert_data_parallel_world_size(with_gtp_remat=True, partial_expert_data_parallel=False)
get_intra_distributed_optimizer_instance_group(check_initialized=True)
get_inter_distributed_optimizer_instance_group(check_initialized=True)
get_global_memory_buffer()
destroy_global_memory_buffer()
get_all_ranks()
destroy_model_parallel()
"""
INITIALIZE = """
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
pipeline_model_parallel_comm_backend use_sharp context_parallel_size
hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size
gtp_remat_size expert_gtp_remat_size num_distributed_optimizer_instances expert_tensor_parallel_size
nccl_communicator_config_path distributed_timeout_minutes order get_embedding_ranks
get_position_embedding_ranks create_gloo_process_groups high_priority_stream_groups
sharp_enabled_group rank_offset local_world_size
"""
# Where this is None, what is not said is looked at: today's default and that of early sources differ.
OWN_DEFAULTS = {"ignore_virtual"}


@cache
def rows() -> dict[str, str]:
    """Names in the first column of the docs' tables, and what is said of them."""
    found = {}
    for row in re.findall(r"^\| (.*?) \| (.*) \|$", DOCS, re.M):
        found |= dict.fromkeys(re.findall(r"`(\w+)[`(]", row[0]), row[1])
    return found


def calls() -> list[tuple[str, list[tuple[str, str]]]]:
    """(name, [(argument, default)]) of each."""
    text = re.sub(r"\n    ", " ", MEGATRONS.strip())
    found = []
    for name, arguments in re.findall(r"^(\w+)\((.*)\)$", text, re.M):
        pairs = [argument.partition("=")[::2] for argument in arguments.split(", ") if argument]
        found.append((name, pairs))
    return found


def mistake(name: str, arguments: list[tuple[str, str]]) -> str:
    """What is wrong with ours, "" if nothing."""
    if name not in ps.__all__:
        return "" if rows().get(name) else "neither in parallel_state nor in a table of docs/megatron.md"
    ours = list(inspect.signature(getattr(ps, name)).parameters.values())[: len(arguments)]
    if [parameter.name for parameter in ours] != [argument for argument, _ in arguments]:
        return f"takes {ours}"
    wrong = [
        argument
        for parameter, (argument, default) in zip(ours, arguments, strict=True)
        if argument not in OWN_DEFAULTS and default and repr(parameter.default) != default
    ]
    return f"has other defaults of {wrong}" if wrong else ""


def test_functions_are_here_with_their_arguments_or_in_the_docs():
    mistakes = {name: mistake(name, arguments) for name, arguments in calls()}
    assert {name: text for name, text in mistakes.items() if text} == {}


def test_the_list_is_todays():
    assert len(calls()) == 90
    assert sum(name in ps.__all__ for name, _ in calls()) >= 77


def test_every_argument_of_initialize_is_taken_by_keyword():
    ours = inspect.signature(ps.initialize_model_parallel).parameters
    assert set(INITIALIZE.split()) <= set(ours)
    assert set(_ONLY) <= set(rows())
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[:3] == INITIALIZE.split()[:3]
    assert positional[3:] == ["pipeline_model_parallel_split_rank"]
