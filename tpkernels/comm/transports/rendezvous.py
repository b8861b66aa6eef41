"""How ranks with GPUs on one machine find each other's memory, by torch's symmetric memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tpkernels.errors import cause_of
from tpkernels.extension import ExtensionState, extension

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_LONGEST_SOCKET = 107  # bytes of an address; torch writes beyond them
_NVLINK, _ATOMICS = 2, 3  # what `nvmlDeviceGetP2PStatus` is asked for


class Handle(Protocol):
    """The part of torch's `_SymmetricMemory` that exchanges use."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory of a rank as a tensor."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Make the current streams of all ranks wait for each other."""

    def stream_write_value32(self, tensor: Tensor, offset: int, val: int) -> object:
        """Write a word of a flat uint32 tensor, after all that came before in the current stream.

        A fence for the whole system comes first: whoever sees the word sees what was written before.
        """


def why_not(device: torch.device) -> str:
    """Return what this rank lacks to take part, or an empty text."""
    if device.type != "cuda":
        return f"TPKERNELS_TRANSPORT=symmetric exchanges memory of GPUs, got {device}; use shared or c10d"
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    try:
        memory = import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this torch ({torch.__version__}) has no symmetric memory ({error}); use c10d"
    if len(os.fsencode(socket := own_socket())) > _LONGEST_SOCKET:
        return f"torch's socket {socket} has too long a name: set TMPDIR to a shorter folder"
    backend = memory.get_backend(device)
    if backend in ("NVSHMEM", "NCCL"):  # whose memory of other ranks is not always a tensor of ours
        return f"torch's symmetric memory is set to {backend}; call its set_backend('CUDA') before it is used"
    return ""


def sockets_folder() -> str:
    """Where torch's processes of one machine hand each other memory, by sockets that bear their numbers."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return next((folder for folder in named if folder is not None), "/tmp")


def own_socket() -> str:
    """Where torch waits for memory of the other ranks."""
    return _socket_of(os.getpid())


def _socket_of(process: int) -> str:
    return f"{sockets_folder()}/symm_mem-{process}"


def sockets_place() -> str:
    """Return a text that is equal for processes of a machine that find each other's sockets."""
    try:
        folder = os.stat(sockets_folder())
    except OSError as error:
        return f" {error}"
    return f" {folder.st_dev}:{folder.st_ino}"


def require_gpu_each(name: str, gpus: list[str], rank: int) -> bool:
    """Whether ranks share a GPU, which is for tests: these ask torch for it by name.

    gpus: of all ranks
    """
    shared = [peer for peer, gpu in enumerate(gpus) if gpus.count(gpu) > 1]  # the same on all ranks
    if shared and os.environ.get(OVERLAPPING, "0") != "1":
        raise RuntimeError(
            f"{name} on rank {rank}: expected a GPU for each rank, got one for {shared}: "
            f"call torch.cuda.set_device(local_rank) first, or set {OVERLAPPING}=1 to test on one GPU"
        )
    return bool(shared)


def why_no_barrier(gpus: Mapping[int, str]) -> str:
    """Return why torch's barrier would not end between these ranks, or an empty text if nothing says so.

    It swaps words in the memory of other GPUs, which NVLink does, and PCIe not everywhere. After its time-out
    it takes the whole context with it. The driver's management library knows all GPUs of the machine, also
    those that this process does not see.

    gpus: the UUID of each rank's
    """
    if (library := _management_library()) is None:
        return ""
    for (rank, gpu), (peer, other) in combinations(gpus.items(), 2):
        if gpu != other and _swap_words(library, gpu, other) is False:
            return (
                f"the GPUs of ranks {rank} and {peer} have neither NVLink nor atomics over PCIe between "
                "them, of which torch's symmetric memory needs one; use c10d"
            )
    return ""


def why_no_stream_writes(memory: Tensor) -> str:
    """Return why a stream cannot write words, as flags are, or an empty text.

    memory: zeroed bytes on a GPU, where it tries
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    word = memory[:4].view(torch.uint32)
    try:
        _SymmetricMemory.stream_write_value32(word, 0, 1)
        written = word.tolist()
    except RuntimeError as error:
        return f"the driver writes no words from a stream ({cause_of(error)}); use c10d"
    word.zero_()
    return "" if written == [1] else f"a stream wrote 1, and the word is {written[0]}; use c10d"


@cache
def _management_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        _ = library.nvmlDeviceGetHandleByUUID, library.nvmlDeviceGetP2PStatus
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):  # another vendor, or a container without it
        return None


def _swap_words(library: ctypes.CDLL, gpu: str, other: str) -> bool | None:
    """Whether two GPUs can, by their UUIDs; None if they are not known, as a part of a GPU is not."""
    handles = ctypes.c_void_p(), ctypes.c_void_p()
    for handle, uuid in zip(handles, (gpu, other), strict=True):
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return None
    known = False
    for ability in (_NVLINK, _ATOMICS):
        status = ctypes.c_uint()
        if not library.nvmlDeviceGetP2PStatus(*handles, ability, ctypes.byref(status)):
            if not status.value:
                return True
            known = known or ability == _ATOMICS
    return False if known else None


@contextmanager
def waiting_for(processes: Mapping[int, int], seconds: float) -> Iterator[None]:
    """Run torch's rendezvous with a time limit: an error names the rank that has ended, or the time.

    It holds Python's lock meanwhile, so that this takes a thread of the extension's. Without that one, torch
    waits.

    processes: of the other ranks
    """
    if extension().state is not ExtensionState.LOADED:
        yield
        return
    handover = torch.classes.tpkernels.Handover(own_socket(), list(processes.values()), seconds)
    try:
        yield
    except Exception as error:
        if (place := handover.end()) < 0:
            raise
        what = f"waited {seconds:g} s for GPU memory of other ranks"
        # a rank has its socket from its arrival until all have each other's memory
        if away := [
            str(rank) for rank, number in processes.items() if not os.path.exists(_socket_of(number))
        ]:
            what += f", of which {' and '.join(away)} did not come"
        if place < len(processes):
            rank = list(processes)[place]
            what = f"the process of rank {rank} has ended before it gave others its GPU memory"
        raise RuntimeError(what) from error
    finally:
        handover.end()


def new_memory(count: int, device: torch.device) -> Tensor:
    """Return zeroed bytes in an allocation of their own, not in a part of a pool's."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, device).zero_()


def rendezvous(memory: Tensor, group_name: GroupName) -> Handle:
    """After `require_gpu_each`, which knows GPUs by their UUIDs.

    Torch compares indices, and would refuse ranks that see one GPU each: they all call theirs device 0.
    """
    from torch.distributed import _symmetric_memory

    before = os.environ.get(OVERLAPPING)
    os.environ[OVERLAPPING] = "1"  # torch reads it in each rendezvous
    try:
        handle: Handle = _symmetric_memory.rendezvous(memory, group_name)
    finally:
        if before is None:
            del os.environ[OVERLAPPING]
        else:
            os.environ[OVERLAPPING] = before
    return handle
