"""What is planned of a move between layouts is what a model has, and what is moved."""

from collections import Counter

import pytest

from tests.layers.worlds import posing
from tests.models.small import CONFIGS
from tests.products import once
from tpkernels import GPT
from tpkernels.checkpoints.moves import elements
from tpkernels.checkpoints.shards import shards_of
from tpkernels.cli import main
from tpkernels.models.config import model_config
from tpkernels.planning.memory import weights_of
from tpkernels.planning.reshard import Holders, blocks_of, traffic


@once(kind=[*CONFIGS], tensor=[2, 4, 1])
def test_weights_and_blocks_are_those_of_a_model(kind, tensor):
    planned = {weight.name: weight for weight in weights_of(CONFIGS[kind])}
    for rank in range(tensor):
        with posing(rank, tensor):
            shards = shards_of(GPT(CONFIGS[kind]))
        first_layer = {name: shard for name, shard in shards.items() if "blocks.1" not in name}
        assert first_layer.keys() == planned.keys()
        assert Counter(name.replace("blocks.1", "blocks.0") for name in shards) == {
            name: weight.count for name, weight in planned.items()
        }
        for name, shard in first_layer.items():
            assert planned[name].shape == shard.shape
            held = blocks_of(planned[name], Holders(tensor, range(1, 1 + tensor)), tensor + 2)[1 + rank]
            assert [block for block in held if elements(block)] == [
                chunk.block for chunk in shard.chunks() if elements(chunk.block)
            ]


def test_bytes_are_those_of_all_layers():
    model = model_config("llama3-8b")
    found = traffic(model, 12, Holders(4, range(4)), Holders(2, range(4, 12)), gpus_per_node=4)
    assert found.held == 2 * 8_030_261_248
    norms = 2 * 4096 * (2 * 32 + 1)  # replicated
    assert found.sent == 4 * (found.held - norms) + 8 * norms
    assert found.between_nodes == found.sent
    assert found.most_received == found.sent // 8
    back = traffic(model, 4, Holders(4, range(4)), Holders(2, range(4)))
    quarter = (found.held - norms) // 4  # of ranks 0 and 3 one stays, the others need two of others
    assert (back.sent, back.between_nodes) == (6 * quarter, 0)


def test_command_prints_bytes(capsys):
    command = "plan --world-size 1024 --model llama3-8b --reshard tp=8,ranks=0-511 tp=4,ranks=512-1023"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "llama3-8b: 16.06 GB of weights in bfloat16"
    assert printed[1:3] == [
        "from   tp=8 on ranks 0 to 511, 64 times",
        "to     tp=4 on ranks 512 to 1023, 128 times",
    ]
    assert printed[3].startswith("sent   2055.95 GB")


BAD = {
    "tp=3 tp=8": "tp: expected a divisor of 16 ranks, got 3",
    "8 tp=8": "expected tp=N or tp=N,ranks=FIRST-LAST, got '8'",
    "tp=8,0-511 tp=8": "expected tp=N or tp=N,ranks=FIRST-LAST, got 'tp=8,0-511'",
    "tp=8,ranks=3 tp=4": "expected tp=N or tp=N,ranks=FIRST-LAST, got 'tp=8,ranks=3'",
    "tp=0 tp=4": "tp: expected a divisor of 16 ranks, got 0",
    "tp=8,ranks=12-19 tp=4": "ranks: expected some of 0 to 15, got tp=8 on ranks 12 to 19, 1 times",
    "tp=16 tp=8 --size num_kv_heads=5": "num_kv_heads",
}


@pytest.mark.parametrize("layouts", BAD)
def test_bad_layouts_are_told_in_a_line(layouts, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--world-size", "16", "--model", "llama3-8b", "--reshard", *layouts.split()])
    assert exit_.value.code == 2
    assert BAD[layouts] in capsys.readouterr().err
