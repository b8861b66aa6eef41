"""How kernels add what ranks sent, where bits may not depend on how many there are."""

import pytest
import torch

from tests.loopback import open_loopback, start
from tests.segments import in_op
from tpkernels.comm.transports.memory import Layout
from tpkernels.kernels import invariance
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.ops.matmul import PLAIN
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS
from tpkernels.ops.tensor_parallel.segments import Segmented
from tpkernels.ops.tensor_parallel.ways import _why_not_timed


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "in_order"])
def test_slots_of_ranks_are_added_in_the_order_that_terms_ask_for(tree, bias):
    """Slots that collectives have filled, and those of memory, in the interpreter."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots, b = torch.randn(8, 6, 40, device=device), torch.randn(40, device=device) if bias else None
    total = FLAG_KERNELS.sum_of(slots, b, None, tree=tree)
    assert torch.equal(total, reduce_slots_ref(slots, b, tree=tree))
    assert not torch.equal(total, reduce_slots_ref(slots, b, tree=not tree)), "the orders differ"
    if device.type == "cpu":
        ends = open_loopback("sum", Layout(8, (6, 40), torch.float32), 20.0)
        deliveries = [start(end, [slots[end.rank]] * 8, reducing=True) for end in ends]
        assert total.equal(FLAG_KERNELS.sum_of(deliveries[0].slots, b, deliveries[0], tree=tree))
        for end, delivery in zip(ends, deliveries, strict=True):
            delivery.end(), end.close()


def test_terms_of_segments_are_added_in_a_tree():
    pairs = [(torch.ones(4, 8), torch.ones(2, 8))]
    assert Segmented(8, 4).terms(pairs, True, torch.float32).tree
    assert not PLAIN.terms(pairs, True, torch.float32).tree


@pytest.mark.parametrize(
    ("segments", "batch", "why"),
    [(0, False, ""), (8, False, "TPKERNELS_TP_INVARIANT=8"), (0, True, "TPKERNELS_BATCH_INVARIANT=1")],
)
def test_no_kernel_pushes_and_no_way_is_timed_where_bits_are_fixed(segments, batch, why, monkeypatch):
    monkeypatch.delenv("TPKERNELS_TUNE", raising=False)
    monkeypatch.setattr(invariance, "batch_invariant", batch)
    terms = PLAIN.terms([(torch.ones(4, 8), torch.ones(2, 8))], True, torch.float32)
    with in_op(segments):
        assert FLAG_KERNELS.pushes(terms, torch.float32) is (why == "")
        assert _why_not_timed() == why
