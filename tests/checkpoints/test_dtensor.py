"""What ranks hold, as DTensors: torch puts the whole together from them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.interop.models import built
from tests.layers.worlds import posing
from tpkernels import ColumnParallelLinear, VocabParallelEmbedding, initialize_model_parallel, parallel_state
from tpkernels.checkpoints.dtensor import as_dtensors
from tpkernels.checkpoints.shards import shards_of


def wholes(kind):
    """The whole of each tensor that torch can put together, all placements, and whether memory is shared."""
    initialize_model_parallel(4)
    model = built(kind, 1)
    found = as_dtensors(model)
    parameters = dict(model.named_parameters())
    computes = {name: tensor for name, tensor in found.items() if type(tensor.to_local()) is torch.Tensor}
    shared = all(
        not tensor.to_local().numel() or tensor.to_local().data_ptr() == parameters[name].data_ptr()
        for name, tensor in computes.items()
        if name in parameters
    )
    placements = {name: str(tensor.placements[0]) for name, tensor in found.items()}
    return {name: tensor.full_tensor() for name, tensor in computes.items()}, placements, shared


@pytest.mark.parametrize("kind", ["llama", "gpt2", "odd"])
def test_torch_puts_the_whole_together(kind, ranks4):
    with posing(0, 1):
        expected = built(kind, 1).state_dict()
    for whole, placements, shared in ranks4.run(wholes, kind):
        assert shared
        assert whole
        for name, value in whole.items():
            assert torch.equal(value, expected[name]), name
        for name, placement in placements.items():
            split = {"back.weight": "S(1)", "attention.output.weight": "S(1)", "mlp.down.weight": "S(1)"}
            copied = ("norm", "positions", "output.bias", "down.bias", "back.bias", "plain", "steps")
            wanted = next((way for end, way in split.items() if name.endswith(end)), "S(0)")
            if any(part in name for part in copied):
                wanted = "R"
            assert placement == wanted, name
    unchunked = {"table.weight", "fused.weight", "fused.bias", "back.weight"} if kind == "odd" else set()
    assert placements.keys() - whole.keys() == unchunked


def test_offsets_are_those_of_the_whole():
    with posing(1, 2):
        model = built("odd", 1)
        parts = shards_of(model)
        starts = {name: [chunk.offsets for chunk in part.chunks()] for name, part in parts.items()}
        assert starts["fused.weight"] == [(4, 0), (12, 0), (20, 0)]
        assert starts["back.weight"] == [(0, 4), (0, 12), (0, 20)]
        assert starts["table.weight"] == [(6, 0)]  # 6 rows a rank, padded to 12
        assert [len(chunk.view) for chunk in parts["table.weight"].chunks()] == [1]
        assert starts["steps"] == [()]
        assert isinstance(as_dtensors(model)["steps"], DTensor)
        assert as_dtensors(model)["steps"].placements == (Replicate(),)
        assert as_dtensors(model)["table.weight"].placements == (Shard(0),)
        assert as_dtensors(model)["table.weight"].shape == (7, 4)


def test_wrappers_do_not_change_names():
    with posing(0, 1):
        model = built("odd", 1)
        names = list(shards_of(model))
        assert list(shards_of(torch.compile(model))) == names
        assert list(shards_of(nn.parallel.DistributedDataParallel(model))) == names


def test_models_of_other_sizes_and_kinds_are_refused():
    with posing(0, 2) as state:
        model = nn.ModuleDict({"inner": built("odd", 1)})
        parallel_state.set_tensor_model_parallel_world_size(4)
        model["other"] = ColumnParallelLinear(4, 8)
        with pytest.raises(
            ValueError, match="'other' was built as rank 0 of 4, but in the tensor-parallel group"
        ):
            shards_of(model)
        assert shards_of(model["inner"], state)
        strange = nn.Linear(2, 2)
        strange.weight.tensor_model_parallel, strange.weight.partition_dim = True, 2
        with pytest.raises(ValueError, match="'weight': expected a partition_dim from 0 to 1, got 2"):
            shards_of(strange, state)
        with pytest.raises(ValueError, match="'weight' is on the meta device"):
            shards_of(VocabParallelEmbedding(7, 4, device="meta", state=state))
