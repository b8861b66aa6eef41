"""SMs that products leave to collectives in flight: torch's settings for them, and which libraries obey.

NCCL runs a kernel of some blocks, each on an SM of its own. A persistent product counts on these SMs, too: it
takes a second full wave if NCCL came first, else it keeps NCCL out until it ends. torch has a setting of how
many SMs products leave free. Which libraries read it, by torch's sources from 2.11 to 2.15:

    library    products                                                      reads the setting
    cublas     mm, addmm of matrices, bmm, by torch's default                no
    cublaslt   the same where torch prefers cuBLASLt; linear with a bias     yes
    scaled     products in fp8                                               yes
    ours       every kernel of ours (`kernels.target.left_free`)             yes

Reading it is not obeying it, and only a GPU can show that: `python -m tpkernels qualify` measures each
library next to busy SMs, and what it finds replaces this table on GPUs of that name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple, get_args

import torch

from tpkernels.extension import ExtensionState, extension
from tpkernels.files import cache_folder, make_folder, parsed, read_own, replace_text

_log = logging.getLogger(__name__)

ProductLibrary = Literal["cublas", "cublaslt", "scaled", "ours"]
LIBRARIES: tuple[ProductLibrary, ...] = get_args(ProductLibrary)
MODEL: Mapping[ProductLibrary, bool] = {"cublas": False, "cublaslt": True, "scaled": True, "ours": True}


class Reservation(NamedTuple):
    """What collectives of one group reserve."""

    sms: int = 0  # 0: nothing
    most: int = 0  # of all reservations together: products need some SMs
    prefers_lt: bool = False  # cuBLASLt leaves them free, cuBLAS does not


class ReservedSms:
    """Writes torch's settings, as `csrc/reserved_sms.h` does, where the extension is not built.

    What the user has set stays, and comes back with the last reservation.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._reserved = 0  # by collectives in flight
        self._most = 0  # of the latest reservation
        self._begun = 0  # so many reservations
        self._pauses = 0
        self._added = 0  # of these, to what the user has set
        self._unset: int | None = None  # how the user says that none are reserved
        self._prefer_lt = 0  # reservations that prefer cuBLASLt
        self._switched = False  # from the user's cuBLAS

    def begin(self, more: Reservation) -> None:
        self._change(more, 1)

    def end(self, less: Reservation) -> None:
        self._change(less, -1)

    def pause(self, paused: bool) -> None:
        """Write what the user has set, whatever is reserved, until the pause ends."""
        with self._lock:
            self._pauses = max(self._pauses + (1 if paused else -1), 0)
            self._write()

    def begun(self) -> int:
        """Return how many reservations have begun so far."""
        return self._begun

    def _change(self, by: Reservation, sign: int) -> None:
        if by.sms <= 0:
            return
        with self._lock:
            self._reserved = max(self._reserved + sign * by.sms, 0)
            self._prefer_lt = max(self._prefer_lt + sign * by.prefers_lt, 0)
            self._most, self._begun = by.most, self._begun + (sign > 0)
            self._write()

    def _write(self) -> None:
        now = torch._C._get_sm_carveout_experimental()
        value = now or 0
        if not self._added:
            self._unset = now if now == 0 else None
        # smaller: set by the user meanwhile
        users = value if value < self._added else value - self._added
        self._added = 0 if self._pauses else min(max(self._most - users, 0), self._reserved)
        torch._C._set_sm_carveout_experimental(users + self._added or self._unset)
        self._prefer(self._prefer_lt > 0 and not self._pauses)

    def _prefer(self, lt: bool) -> None:
        kinds, preferred = torch._C._BlasBackend, torch._C._get_blas_preferred_backend()
        if lt and not self._switched and preferred == kinds.Cublas and not _limits_half_sums():
            with suppress(RuntimeError):  # a torch without CUDA
                torch._C._set_blas_preferred_backend(kinds.Cublaslt)
                self._switched = True
        if not lt and self._switched:
            self._switched = False
            if preferred == kinds.Cublaslt:
                torch._C._set_blas_preferred_backend(kinds.Cublas)


def _limits_half_sums() -> bool:
    """Whether the user limits sums in half precision, which torch's way through cuBLASLt may not know."""
    settings = (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
    return not all(all(setting) if isinstance(setting, tuple) else setting for setting in settings)


class _InExtension:
    """The same, in C++: gradient buckets reserve from threads that do not hold Python's lock."""

    def begin(self, more: Reservation) -> None:
        torch.ops.tpkernels.reserve_sms(*more)

    def end(self, less: Reservation) -> None:
        torch.ops.tpkernels.reserve_sms(-less.sms, less.most, less.prefers_lt)

    def pause(self, paused: bool) -> None:
        torch.ops.tpkernels.pause_reserved_sms(paused)

    def begun(self) -> int:
        return int(torch.ops.tpkernels.sm_reservations_begun())


_IN_PYTHON, _IN_EXTENSION = ReservedSms(), _InExtension()


def torchs_settings() -> ReservedSms | _InExtension:
    """Return the writer of torch's settings; a reservation ends where it began."""
    return _IN_EXTENSION if extension().state is ExtensionState.LOADED else _IN_PYTHON


def way_beside_collectives(gpu: str) -> Literal["as usual", "cublaslt", "ours"]:
    """Return how products leave reserved SMs free on GPUs of a name.

    as usual: by torch's default; cublaslt: by torch, which is to prefer it; ours: by a kernel of ours
    """
    obeys = {**MODEL, **measured(gpu)}
    if obeys["cublas"] or torch.version.hip is not None:  # no library of AMD's reads the setting
        return "as usual"
    return "cublaslt" if obeys["cublaslt"] else "ours"


@cache
def measured(gpu: str) -> Mapping[ProductLibrary, bool]:
    """Return which libraries `qualify` has seen to obey on GPUs of this name, with this torch; read once."""
    path = _path_for(gpu)
    try:
        found = parsed(read_own(path, path.parents[1])) if path is not None else None
    except PermissionError as error:
        _log.warning("%s: products follow torch's sources beside collectives", error)
        return {}
    except (OSError, ValueError):
        return {}
    listed = found if isinstance(found, dict) else {}
    return {name: listed[name] for name in LIBRARIES if isinstance(listed.get(name), bool)}


def keep(gpu: str, obeys: Mapping[ProductLibrary, bool]) -> Path | None:
    """Write the answers of a GPU where `measured` finds them; None without a folder to write into."""
    path = _path_for(gpu)
    if path is not None:
        make_folder(path.parent)
        replace_text(path, json.dumps(dict(obeys), indent=1) + "\n")
        path.chmod(path.stat().st_mode & ~0o022)  # what others can write is not read again
        measured.cache_clear()
    return path


def _path_for(gpu: str) -> Path | None:
    folder = cache_folder()
    name = re.sub(r"[^\w.+-]+", "-", f"{gpu}_torch-{torch.__version__}")
    return None if folder is None else folder / "reserved-sms" / f"{name}.json"
