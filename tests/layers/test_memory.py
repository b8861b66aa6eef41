"""What a block keeps for backward, to the byte: the formula that docs/models.md gives."""

import pytest
import torch

from tpkernels import TransformerBlock, initialize_model_parallel
from tpkernels.layers.world import tensor_world

TOKENS, BATCH, HIDDEN, HEADS, FFN = 32, 2, 64, 8, 192
GPT2 = {"norm": "layer_norm", "rotary": False}
LLAMA = {"norm": "rms_norm", "rotary": True, "activation": "swiglu", "bias": False, "num_kv_heads": 2}
SHAPES = {"gpt2": GPT2, "llama": LLAMA}


def formula(shape, dtype, sequence_parallel, recompute):
    """Bytes on each rank."""
    ranks = tensor_world().size
    part = 1 / ranks if sequence_parallel else 1
    tokens, element = TOKENS * BATCH, dtype.itemsize
    if recompute == "full":
        return tokens * part * HIDDEN * element
    kv_heads = SHAPES[shape].get("num_kv_heads", HEADS)
    between = 4 * tokens * part * HIDDEN  # inputs of two norms and of two products
    heads = tokens / ranks * (2 * HEADS + 2 * kv_heads) * (HIDDEN // HEADS)  # Q, K, V and what comes of them
    mlp = tokens / ranks * FFN * (2 if shape == "llama" else 1)
    of_norms = 2 * tokens * part * (1 if shape == "llama" else 2)
    of_attention = 0 if recompute == "selective" else tokens / ranks * HEADS
    rotary = 2 * TOKENS * (HIDDEN // HEADS // 2) if shape == "llama" else 0
    return (between + heads + mlp) * element + 4 * (of_norms + of_attention + rotary)


def kept(block, x):
    """Bytes that autograd holds besides parameters, memory that is shared counted once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(x)
    assert y.requires_grad
    return sum(storages.values())


def differences(shape, dtype):
    initialize_model_parallel(torch.distributed.get_world_size())
    found = {}
    for sequence_parallel in (False, True):
        for recompute in ("none", "selective", "full"):
            block = TransformerBlock(
                HIDDEN,
                HEADS,
                FFN,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                dtype=dtype,
                **SHAPES[shape],
            )
            tokens = TOKENS // tensor_world().size if sequence_parallel else TOKENS
            x = torch.randn(tokens, BATCH, HIDDEN, dtype=dtype, requires_grad=True)
            expected = formula(shape, dtype, sequence_parallel, recompute)
            if kept(block, x) != expected:
                found[sequence_parallel, recompute] = kept(block, x), expected
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_block_keeps_what_the_formula_says(ranks, dtype, shape, request):
    for found in request.getfixturevalue(f"ranks{ranks}").run(differences, shape, dtype):
        assert found == {}
