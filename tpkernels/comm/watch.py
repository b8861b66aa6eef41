"""A thread that looks after ranks which have waited for long: have all of them made the same calls?

It costs nothing while no rank is seen in one call twice, about a second apart. Then it compares calls through
the group's store. Ranks whose calls of one number differ will wait for ever: the group fails, with
an error on all of them that names both calls.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence

INTERVAL = 1.0  # seconds between two looks


def shown(recent: Sequence[tuple[int, str]]) -> str:
    return json.dumps(recent)


def parting(rank: int, recent: Sequence[tuple[int, str]], others: Mapping[int, bytes]) -> str:
    """Describe the first call in which another rank differs; return an empty text if there is none."""
    ours = dict(recent)
    found: list[tuple[int, int, str]] = []
    for other, text in others.items():
        theirs: dict[int, str] = dict(json.loads(text))
        differing = [number for number in ours.keys() & theirs.keys() if ours[number] != theirs[number]]
        if differing:
            found.append((min(differing), other, theirs[min(differing)]))
    if not found:
        return ""
    number, other, theirs_is = min(found)
    return (
        f"ranks have left the common order of calls: call {number} is '{ours[number]}' on rank {rank}, "
        f"'{theirs_is}' on rank {other}; every rank must make the same calls, with equal requires_grad, "
        "shapes, options and ids (TPKERNELS_DEBUG=1 compares them before each)"
    )


class Watcher:
    """Calls a function about once a second, in a thread that keeps no process alive."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs in this process already."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="tpkernels watch", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._look()

    def end(self) -> None:
        """End the thread, before the interpreter ends: a thread in torch's store would abort the process."""
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(5.0)
