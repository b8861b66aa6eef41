"""Functions of Megatron-Core 0.16, and of today's `parallel_state`, are here, by argument and default."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.interop.megatron_core.megatrons_groups import LISTED
from tpkernels import parallel_state as todays
from tpkernels.interop.megatron_core import parallel_state, rng, utilities
from tpkernels.parallel_state import _ONLY

OURS = {
    "parallel_state": parallel_state,
    "tensor_parallel.cross_entropy": utilities,
    "tensor_parallel.random": rng,
    "tensor_parallel.utils": utilities,
}
LEFT = """
create_group create_hierarchical_groups create_hybrid_dp_cp_groups RankGenerator is_unitialized
generate_masked_orthogonal_rank_groups default_embedding_ranks default_position_embedding_ranks
overwrite_nccl_comm_cfgs get_data_modulo_expert_parallel_group get_global_memory_buffer
get_global_symmetric_memory_buffer destroy_global_memory_buffer destroy_global_symmetric_memory_buffer
convert_cuda_rng_state get_expert_parallel_rng_tracker_name get_data_parallel_rng_tracker_name
is_graph_safe_cuda_rng_tracker split_tensor_along_last_dim
"""  # stay Megatron's own under the import hook


def arguments_of(function):
    """Names and defaults, but for keyword-only arguments: those of newer Megatrons."""
    return [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]


def call(name, function):
    return f"{name}({', '.join(arguments_of(function))})"


HERE = [line for line in LISTED if line.partition("(")[0].rpartition(".")[2] not in LEFT.split()]


@pytest.mark.parametrize("listed", HERE, ids=[line.partition("(")[0] for line in HERE])
def test_function_is_here_with_its_arguments(listed):
    full = listed.partition("(")[0]
    module, _, name = full.rpartition(".")
    ours = call(full, getattr(OURS[module], name))
    # further arguments, of newer Megatrons, have defaults
    assert ours == listed or (ours.startswith(listed[:-1] + ", ") and ours.count("=") > listed.count("="))


def test_the_list_is_that_of_the_installed_megatron():
    theirs = pytest.importorskip("megatron.core", reason="needs megatron-core, for its own names")
    if not theirs.__version__.startswith("0.16."):
        pytest.skip(f"the list is of megatron-core 0.16, this is {theirs.__version__}")
    found = []
    for name in OURS:
        module = import_module(f"megatron.core.{name}")
        for each, function in vars(module).items():
            own = getattr(function, "__module__", "") == module.__name__ and each[0] != "_"
            if own and (inspect.isfunction(function) or each in ("RankGenerator", "CudaRNGStatesTracker")):
                found.append(call(f"{name}.{each}", function))
    assert sorted(found) == sorted(LISTED)


def test_every_public_name_of_the_face_exists():
    for module in set(OURS.values()):
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), name


def test_a_difference_in_arguments_is_seen():
    assert call("f", lambda a, b=1, *, c=2: None) == "f(a, b=1)"
    assert call("f", lambda a, b=2: None) != "f(a, b=1)"


# Today's `core.parallel_state`, by what changed in it since 0.16: in `tpkernels.parallel_state`, or a row of
# the docs says why not.

GONE = """
is_unitialized has_separate_all_gather_group get_data_modulo_expert_parallel_group
get_global_symmetric_memory_buffer destroy_global_symmetric_memory_buffer initialize_model_parallel
"""
CHANGED = """
create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None)
get_gtp_weight_remat_group(check_initialized=True)
get_gtp_weight_remat_world_size()
get_gtp_weight_remat_rank()
get_gtp_weight_remat_global_ranks(check_initialized=True)
get_data_parallel_group(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)
get_data_parallel_world_size(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)
get_data_parallel_rank(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)
get_expert_gtp_weight_remat_group(check_initialized=True)
get_expert_gtp_weight_remat_world_size()
get_expert_gtp_weight_remat_rank()
get_expert_gtp_weight_remat_global_ranks(check_initialized=True)
get_expert_tensor_model_pipeline_parallel_group(check_initialized=True, with_egtp_remat=False)
get_expert_data_parallel_group(check_initialized=True, with_gtp_remat=True,
    partial_expert_data_parallel=False)
get_expert_data_parallel_rank(with_gtp_remat=True, partial_expert_data_parallel=False)
get_expert_data_parallel_world_size(with_gtp_remat=True, partial_expert_data_parallel=False)
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
OWN_DEFAULT = "ignore_virtual=False"  # as in early sources


def rows_of_the_docs():
    """Names in the first column of the docs' tables, and what is said of them."""
    docs = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    found = {}
    for names, said in re.findall(r"^\| (.*?) \| (.*) \|$", docs, re.M):
        found |= dict.fromkeys(re.findall(r"`(\w+)[`(]", names), said)
    return found


def todays_functions():
    """Arguments by name."""
    text = "\n".join(line.removeprefix("parallel_state.") for line in LISTED)
    text += CHANGED.replace(",\n    ", ", ")
    calls = dict(re.findall(r"^(\w+)\((.*)\)$", text, re.M))
    return {
        name: said.split(", ") if said else [] for name, said in calls.items() if name not in GONE.split()
    }


def is_here(name, arguments):
    found = arguments_of(getattr(todays, name))[: len(arguments)]
    return ["ignore_virtual=True" if each == OWN_DEFAULT else each for each in found] == arguments


def test_todays_functions_are_here_with_their_arguments_or_in_the_docs():
    functions, rows = todays_functions(), rows_of_the_docs()
    assert len(functions) == 90
    here = {name: arguments for name, arguments in functions.items() if name in todays.__all__}
    assert len(here) >= 77
    assert [name for name, arguments in here.items() if not is_here(name, arguments)] == []
    assert [name for name in functions if name not in here and not rows.get(name)] == []


def test_every_argument_of_todays_initialize_is_taken_by_keyword():
    ours = inspect.signature(todays.initialize_model_parallel).parameters
    assert set(INITIALIZE.split()) <= set(ours)
    assert set(_ONLY) <= set(rows_of_the_docs())
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*INITIALIZE.split()[:3], "pipeline_model_parallel_split_rank"]
