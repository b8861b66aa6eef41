"""NCCL's rules for messages, kept by a stand-in on the CPU that travels over gloo.

It takes tensors of its GPU only, contiguous ones. All that a rank starts together is one launch, and a launch
begins when the one before has ended. Messages of two ranks are told by their order: there are no tags. Here a
launch lasts until all of its messages have arrived: ranks whose orders do not fit wait for each other until
the time of gloo is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.comm.test_small import backend
from tpkernels.checkpoints import reshard_transfer
from tpkernels.comm import agreement
from tpkernels.comm.transports import c10d

GPU = torch.device("cpu", 1)  # a name of its own for the same memory
_TAGS = 2**24  # tags of our own, by which gloo tells messages


class _Memory(TorchFunctionMode):
    """Notes what is made on the GPU."""

    def __init__(self):
        super().__init__()
        self.storages = WeakSet()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        here = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
        is_like = func is torch.Tensor.new_empty and self.holds(args[0])
        if isinstance(made, torch.Tensor) and (is_like or any(device == GPU for device in here)):
            self.storages.add(made.untyped_storage())
        return made

    def holds(self, tensor):
        with torch._C.DisableTorchFunction():
            address = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == address for storage in self.storages)


class _Launch:
    """What is started together; stands for a group, and for what is waited for."""

    def __init__(self, memory, seen):
        self.memory, self.seen, self.posted = memory, seen, []

    def send(self, tensors, to, tag):
        self._post("send", tensors, dist.get_rank(), to)

    def recv(self, tensors, source, tag):
        self._post("recv", tensors, source, dist.get_rank())

    def _post(self, kind, tensors, sender, receiver):
        for tensor in tensors:
            assert self.memory.holds(tensor), "NCCL was given a tensor of the CPU"
            assert tensor.is_contiguous()
        number = self.seen[sender, receiver] = self.seen[sender, receiver] + 1
        peer = receiver if kind == "send" else sender
        self.posted.append((kind, tensors, peer, _TAGS + number))

    def run(self):
        group = dist.group.WORLD
        works = [getattr(group, kind)(tensors, peer, tag) for kind, tensors, peer, tag in self.posted]
        for work in works:
            work.wait()

    def wait(self):
        return True


@contextmanager
def over_nccl() -> Iterator[Counter]:
    """As if the default group were NCCL's. yields: how many messages there were, by sender and receiver"""
    memory, seen = _Memory(), Counter()

    def start_together(group, device, starts):
        launch = _Launch(memory, seen)
        for start in starts:
            start(launch)
        launch.run()
        return [launch]

    def start_all_gather(group, gathered, part):
        assert memory.holds(gathered), "NCCL was given a tensor of the CPU"
        assert memory.holds(part), "NCCL was given a tensor of the CPU"
        return all_gather(group, gathered, part)

    all_gather = c10d.start_all_gather
    with ExitStack() as patches:
        for where, name, new in (
            (reshard_transfer, "exchange_device", lambda group: GPU),
            (agreement, "exchange_device", lambda group: GPU),
            (c10d, "start_together", start_together),
            (c10d, "start_all_gather", start_all_gather),
        ):
            patches.enter_context(patch.object(where, name, new))
        patches.enter_context(backend(tags=False))
        patches.enter_context(memory)
        yield seen
