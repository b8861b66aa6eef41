"""What kernels that wait need: flags, and shards that arrive while an interpreted kernel looks at them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tpkernels.kernels.waits import Arrivals

EPOCH = 5
PATIENCE = 50  # looks at a flag: for tests in which nothing will come

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the host cannot reach a running kernel")


def arrivals(device: torch.device, *flags: int, spin_limit: int | None = None) -> Arrivals:
    epoch, status = (torch.tensor([value], dtype=torch.int32, device=device) for value in (EPOCH, 0))
    return Arrivals(
        torch.tensor(flags, dtype=torch.int32, device=device), epoch, status, spin_limit=spin_limit
    )


@contextmanager
def at_each_look(steps: Iterable[Callable[[], object]]) -> Iterator[deque[Callable[[], object]]]:
    """Before each look of an interpreted kernel at a flag the next of these steps is taken."""
    upstream, left = InterpreterBuilder.create_atomic_rmw, deque(steps)

    def create_atomic_rmw(builder, *look):
        if left:
            left.popleft()()
        return upstream(builder, *look)

    with patch.object(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw):
        yield left
