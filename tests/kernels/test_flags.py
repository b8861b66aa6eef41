"""The count of calls on the device."""

import pytest
import torch

from tpkernels.kernels.flags import advance


def words(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_advance_counts_calls_past_2_to_the_31(device):
    word, awaited = words(device, 2**31 - 2 * 2**20), words(device, 0)
    for expected in (2**31 - 2**20, -(2**31), -(2**31) + 2**20):
        advance(word, awaited, 2**20, 5)
        assert (word.tolist(), awaited.tolist()) == ([expected], [expected + 5])


def test_flags_refuse_what_cannot_work(device):
    word, table = words(device, 1), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"advance: expected word of \(1,\).* in torch.int64"):
        advance(table[:1], word, 1, 1)
    with pytest.raises(ValueError, match=r"advance: expected awaited on .* got meta"):
        advance(word, word.to("meta"), 1, 1)
