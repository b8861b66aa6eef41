"""Models to save, load, rename and split, and what of them is compared."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from tests.models.small import CONFIGS, IDS, TARGETS
from tpkernels import GPT, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


class Odd(nn.Module):
    """What GPT has not: strides, padding to a unit, buffers, tied and frozen parameters, a plain layer."""

    def __init__(self):
        super().__init__()
        self.table = VocabParallelEmbedding(7, 4, divisible_by=3)  # the last ranks hold nothing but padding
        self.fused = ColumnParallelLinear(4, 24, stride=3, gather_output=False)
        self.back = RowParallelLinear(24, 4, stride=3, input_is_parallel=True)
        self.plain = nn.Linear(4, 4)
        self.again = self.plain
        self.back.bias.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids):
        return self.plain(self.back(self.fused(self.table(ids))[0])[0])


def built(kind, seed):
    """The same model for every number of ranks."""
    torch.manual_seed(seed)
    return Odd() if kind == "odd" else GPT(CONFIGS[kind])


def loss_of(model):
    if isinstance(model, GPT):
        return model(IDS, TARGETS)
    return model(IDS % 7).square().sum()
