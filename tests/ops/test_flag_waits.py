"""How kernels add what ranks sent, where bits may not depend on how many there are."""

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from tpkernels import tp_invariance
from tpkernels.comm.transports.mailbox import MailboxExchange
from tpkernels.kernels import invariance
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.ops.numerics import ProductSum
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_SUMS, kernel_pushes
from tpkernels.ops.tensor_parallel.ways import _why_not_timed


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("segments", [8, 0], ids=["tree", "in_order"])
def test_slots_of_ranks_are_added_in_the_tree_of_the_mode(segments, bias, monkeypatch):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots, b = torch.randn(8, 6, 40, device=device), torch.randn(40, device=device) if bias else None
    plan, memory = SimpleNamespace(ranks=8, rows=48), slots.view(48, 40)
    delivery = SimpleNamespace(slots=slots, memory=memory, plan=plan, await_rows=lambda rows: None)
    monkeypatch.setattr(tp_invariance.mode, "segments", segments)
    total = KERNEL_SUMS.total(delivery, b)
    assert torch.equal(total, reduce_slots_ref(slots, b, tree=segments > 0))
    assert not torch.equal(total, reduce_slots_ref(slots, b, tree=segments == 0)), "the orders differ"


@pytest.mark.parametrize(
    ("segments", "batch", "why"),
    [(0, False, ""), (8, False, "TPKERNELS_TP_INVARIANT=8"), (0, True, "TPKERNELS_BATCH_INVARIANT=1")],
)
def test_no_kernel_pushes_and_no_way_is_timed_where_bits_are_fixed(segments, batch, why, monkeypatch):
    monkeypatch.delenv("TPKERNELS_TUNE", raising=False)
    monkeypatch.setattr(tp_invariance.mode, "segments", segments)
    monkeypatch.setattr(invariance, "batch_invariant", batch)
    exchange = create_autospec(MailboxExchange, instance=True)
    exchange.kernels_can_push, exchange.dtype = True, torch.float32
    partial_of = ProductSum([(torch.ones(4, 8), torch.ones(2, 8))], transposed=True)
    assert kernel_pushes(exchange, partial_of) is (why == "")
    assert _why_not_timed() == why
