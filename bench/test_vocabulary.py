"""Embedding, loss, and head with loss, of one rank's part of a vocabulary, against plain torch.

On a GPU Llama-3 8B's sizes, whole and an eighth of them; on a CPU small ones, to show that the harness works.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from bench.cases.local import Local
from bench.conftest import Bench

ON_GPU = torch.cuda.is_available()
LOCAL = Local(torch.bfloat16 if ON_GPU else torch.float32, "cuda" if ON_GPU else "cpu")
ROUNDS = 21
FEATURES = 4096 if ON_GPU else 64
SMOKE = [(8192, 128256), (8192, 16032)] if ON_GPU else [(256, 2048)]  # tokens, columns
LARGER = [] if ON_GPU else [(2048, 2048), (256, 16384)]


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    """A rank alone: what is timed is computation."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.gpu_set
@pytest.mark.parametrize(
    ("tokens", "columns"),
    [*(pytest.param(*sizes, marks=pytest.mark.smoke, id=str(sizes[1])) for sizes in SMOKE), *LARGER],
)
@pytest.mark.parametrize("build", ["embedding", "loss", "head"])
def test_vocabulary(bench: Bench, group: ProcessGroup, build: str, tokens: int, columns: int) -> None:
    torch.manual_seed(0)
    bench.case(getattr(LOCAL, build)(group, tokens, FEATURES, columns), ROUNDS)
