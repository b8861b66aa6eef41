"""When tasks of our operators run, against the model of calls, which writes the same operators once more."""

from unittest.mock import patch

import pytest
import torch

from tests.products import SWEEP
from tpkernels.comm.schedule import collective_rounds
from tpkernels.comm.transports import symmetric
from tpkernels.gpus import gpu_named
from tpkernels.planning.timeline.node import Host, Node
from tpkernels.planning.timeline.operators import Sizes
from tpkernels.planning.timeline.prediction import predict
from tpkernels.streams.cases import NARROW, SHARD, WIDE, calls_of
from tpkernels.streams.record import Machine
from tpkernels.streams.times import call_seconds, times_of

SCALE = 128  # a rank has 2048 tokens; matrices are 2048 and 8192 wide
NODE = Node.of(gpu_named("h100")).with_host(Host(*[0.0] * 6))
RANKS = [pytest.param(ranks, marks=pytest.mark.sweep) for ranks in (4, 8)] if SWEEP else [2]


def sizes_of(op: str, ranks: int) -> Sizes:
    narrow, wide = NARROW * SCALE, WIDE * SCALE * ranks
    features = (narrow, wide) if op == "column_linear" else (wide, narrow)
    return Sizes(SHARD * SCALE * ranks, *features, ranks)


def seconds(op: str, direction: str, transport: str, ranks: int) -> float:
    sizes = sizes_of(op, ranks)
    hiding = {  # the width of the product that hides a transfer
        ("column_linear", "forward"): sizes.features_out // ranks,
        ("column_linear", "backward"): 0,
        ("row_linear", "forward"): sizes.features_out,
        ("row_linear", "backward"): sizes.features_in // ranks,
    }[op, direction]
    rounds = collective_rounds(sizes.tokens, hiding, ranks, NODE.gpu.processors)
    name = f"{op.removesuffix('_linear')}, sequence-parallel"
    program, calls = calls_of(
        name, Machine(ranks), transport, backward=direction == "backward", rounds=rounds
    )
    return call_seconds(times_of(program, NODE, SCALE), calls)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("transport", ["c10d", "symmetric"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", ["column_linear", "row_linear"])
def test_calls_take_as_long_as_the_model_says(op, direction, transport, ranks):
    expected = predict(op, direction, transport, sizes_of(op, ranks), NODE).seconds
    assert seconds(op, direction, transport, ranks) == pytest.approx(expected, rel=0.01)


def test_pushes_in_the_stream_that_computes_are_seen_in_the_time():
    """As where torch gives out a stream of its pool again."""
    right = seconds("column_linear", "forward", "symmetric", 2)

    def aliased(device: torch.device) -> symmetric.GroupStreams:
        found = of(device)
        found.side._stream = torch.cuda.current_stream()
        return found

    of = symmetric.GroupStreams.of
    with patch.object(symmetric.GroupStreams, "of", aliased):
        assert seconds("column_linear", "forward", "symmetric", 2) > 1.05 * right
