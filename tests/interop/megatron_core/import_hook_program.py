"""A program of its own, for `install` comes before Megatron is imported: prints what it finds, as JSON."""

import json
import sys
import warnings

from tests.checks import error_of
from tests.fake_world import fake_rank
from tpkernels.interop.megatron_core import import_hook as hook


def home(function):
    return str(getattr(function, "__module__", "")).removeprefix("tpkernels.interop.megatron_core.")


def found():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import layers, mappings, random
    from megatron.core.transformer import dot_product_attention

    without = random.CheckpointWithoutOutput.checkpoint.__globals__
    random.get_cuda_rng_tracker, kept = len, random.get_cuda_rng_tracker
    replaced = without["get_cuda_rng_tracker"] is len
    random.get_cuda_rng_tracker = kept
    with fake_rank(3, 8):
        parallel_state.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        sizes = {name: getattr(groups, name).size() for name in ("tp", "pp", "dp", "mp", "tp_ep_pp")}
        scratch = type(parallel_state.get_global_memory_buffer()).__name__
        parallel_state.destroy_model_parallel()
    return {
        "state": [home(parallel_state.initialize_model_parallel), parallel_state._MODEL_PARALLEL_GROUP],
        "left": [home(parallel_state.RankGenerator), home(mappings.all_to_all)],
        "scratch": [scratch, error_of(parallel_state.get_global_memory_buffer)[0]],
        "tensor_parallel": [
            home(tensor_parallel.checkpoint),
            home(tensor_parallel.vocab_parallel_cross_entropy),
        ],
        "streams": [home(random.CudaRNGStatesTracker), home(without["_fork_rng"]), replaced],
        "layers": [home(layers.set_tensor_model_parallel_attributes), home(layers.ColumnParallelLinear)],
        "attention": home(dot_product_attention.DotProductAttention),
        "groups": sizes,
        "twice": error_of(hook.install)[0],
    }


def main():
    warnings.simplefilter("ignore")
    with hook.installed():
        inside = found()
    left = [name for name in sys.modules if name.startswith("megatron.core")]
    from megatron.core import parallel_state

    after = home(parallel_state.initialize_model_parallel)
    late = error_of(hook.install)
    print(
        json.dumps({**inside, "imported": left, "after": after, "late": [late[0], "first lines" in late[1]]})
    )


if __name__ == "__main__":
    main()
