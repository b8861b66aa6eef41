"""What a block keeps for backward, to the byte: the formula that docs/models.md gives."""

import pytest
import torch

from tpkernels import GPTConfig, TransformerBlock, initialize_model_parallel
from tpkernels.layers.world import tensor_world
from tpkernels.planning.job import Job
from tpkernels.planning.memory import kept_by_block, kept_by_rotation

TOKENS, BATCH = 32, 2
SIZES = {"vocab_size": 1, "num_layers": 1, "hidden_size": 64, "num_heads": 8, "ffn_hidden_size": 192}
SHAPES = {
    "gpt2": GPTConfig(**SIZES, max_positions=TOKENS),
    "llama": GPTConfig(**SIZES, num_kv_heads=2, activation="swiglu", norm="rms_norm", bias=False),
}


def formula(job):
    """Bytes on each rank."""
    return kept_by_block(job, tensor_world().size) + (job.recompute != "full") * kept_by_rotation(job)


def kept(module, *inputs):
    """Bytes that autograd holds besides parameters, memory that is shared counted once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(*inputs)
    assert y.requires_grad
    return sum(storages.values())


def differences(shape, dtype):
    initialize_model_parallel(torch.distributed.get_world_size())
    found = {}
    for sequence_parallel in (False, True):
        for recompute in ("none", "selective", "full"):
            model = SHAPES[shape]
            block = TransformerBlock(
                model.hidden_size,
                model.num_heads,
                model.ffn_hidden_size,
                num_kv_heads=model.num_kv_heads,
                rotary=model.max_positions is None,
                activation=model.activation,
                norm=model.norm,
                bias=model.bias,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                dtype=dtype,
            )
            tokens = TOKENS // tensor_world().size if sequence_parallel else TOKENS
            x = torch.randn(tokens, BATCH, model.hidden_size, dtype=dtype, requires_grad=True)
            expected = formula(
                Job(
                    model=model,
                    tokens=TOKENS,
                    batch=BATCH,
                    micro_batch=BATCH,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                    element=dtype.itemsize,
                )
            )
            if kept(block, x) != expected:
                found[sequence_parallel, recompute] = kept(block, x), expected
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_block_keeps_what_the_formula_says(ranks, dtype, shape, request):
    for found in request.getfixturevalue(f"ranks{ranks}").run(differences, shape, dtype):
        assert found == {}
