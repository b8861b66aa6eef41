"""Every group of a parallel state by Megatron's getters: of Megatron's own module, or of ours."""

import re
from pathlib import Path

import torch.distributed as dist

LISTED = Path(__file__).with_name("megatrons_names.txt").read_text().splitlines()
# names of functions that need no argument, with their arguments
_ASKED = {
    name: arguments
    for name, arguments in re.findall(r"^parallel_state\.(\w+)\((.*)\)$", "\n".join(LISTED), re.M)
    if all("=" in each for each in arguments.split(", ") if each)
    and re.match("get_|is_pipeline|is_rank|model_parallel_is|has_separate", name)
    and not re.search("memory|gloo|modulo|hybrid|hierarchical", name)
}
MEASURES = [name for name in _ASKED if not (name.startswith("get_") and name.endswith("_group"))]
GETTERS = [
    (name, {"check_initialized": False} if "check_initialized" in _ASKED[name] else {})
    for name in _ASKED
    if name not in MEASURES
]
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
