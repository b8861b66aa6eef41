"""Two ranks joined by a slow network, so that communication takes time on one machine without a GPU.

    if reason := why_not():
        pytest.skip(reason)
    with SlowLink(bits_per_second=1e9) as link:
        seconds = link.run(time_a_step)  # at module level, because it travels by name; one answer a rank
        link.set_rate(5e8)

Each rank lives in a network namespace of its own; a veth pair joins the two, with a token bucket at either
end. The namespaces have no names: they belong to the ranks, and the system takes them back with the last
process in them, whatever ends it. The ranks end with the process that started them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from tests.ranks import RankPool
from tpkernels.comm.transports import select

T = TypeVar("T")

_DEVICE = "tpk0"  # the name of either end, each in its own namespace
_CLONE_NEWNET = 0x40000000
_BURST = 128 * 1024  # bytes: two of the largest packets
_QUEUE = 16 * 2**20  # bytes: nothing is dropped, senders are held back


@cache
def why_not() -> str | None:
    """Why this machine cannot make a slow link; None if it can."""
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"a slow link needs the commands {', '.join(tools)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "a slow link needs root: network namespaces and tc are not for others"
    attempt = f"ip link add {_DEVICE} type veth peer name tpk1 && {' '.join(_bucket('add', 1e6))}"
    probe = subprocess.run(["unshare", "--net", "sh", "-c", attempt], capture_output=True, text=True)
    if probe.returncode:
        return f"this machine does not let us make a slow link: {probe.stderr.strip()}"
    return None


class SlowLink:
    """Two ranks, one thread each, that talk over the link for as long as the context lasts."""

    def __init__(self, bits_per_second: float) -> None:
        self._rate = bits_per_second
        self._ranks = RankPool(2, enter=_leave_the_network)

    def __enter__(self) -> SlowLink:
        if reason := why_not():
            raise RuntimeError(reason)
        try:
            first, second = self._ranks.start()
            name = ["name", _DEVICE, "netns"]
            _call("ip", "link", "add", *name, str(first), "type", "veth", "peer", *name, str(second))
            for rank, pid in enumerate((first, second)):
                inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]
                _call(*inside, "ip", "link", "set", "lo", "up")
                _call(*inside, "ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", _DEVICE)
                _call(*inside, "ip", "link", "set", _DEVICE, "up")
                _call(*inside, *_bucket("add", self._rate))
        except BaseException:
            self._ranks.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Call `function(*args)` on both ranks; the results in rank order. A failure ends the ranks."""
        if not self._ranks.is_running:
            raise RuntimeError("the link is closed: one of its ranks failed before, or the context has ended")
        try:
            return self._ranks.run(function, *args, timeout=timeout)
        except BaseException:  # also Ctrl-C
            self._ranks.close()
            raise

    def set_rate(self, bits_per_second: float) -> None:
        """Change the rate of either direction."""
        self.run(throttle, bits_per_second)


def throttle(bits_per_second: float) -> None:
    """On a rank: change the rate of what it sends. For timings at several rates within one call."""
    _call(*_bucket("change", bits_per_second))


def _leave_the_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    os.environ["GLOO_SOCKET_IFNAME"] = _DEVICE
    select.requested_transport = "c10d"  # ranks of one machine share memory, which no link slows down


def _bucket(verb: str, bits_per_second: float) -> list[str]:
    bucket = f"tbf rate {round(bits_per_second)}bit burst {_BURST} limit {_QUEUE}"
    return ["tc", "qdisc", verb, "dev", _DEVICE, "root", *bucket.split()]


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
