"""Streams next to those that compute. A CPU has none: it does everything at once, in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A stream of high priority next to those that compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device, priority=-1)

    def wait_for(self, other: torch.Stream | None) -> None:
        """Make later work of this stream wait for all work of `other` so far; the host does not wait."""
        if self._stream is not None and other is not None:
            self._stream.wait_stream(other)

    def let(self, other: torch.Stream | None) -> None:
        """Make later work of `other` wait for all work of this stream so far."""
        if self._stream is not None and other is not None:
            other.wait_stream(self._stream)

    def mark(self) -> torch.Event | None:
        """Return an event after all work of this stream so far."""
        return None if self._stream is None else self._stream.record_event()

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which this stream is the current one."""
        return nullcontext() if self._stream is None else self._stream


class StreamOrder:
    """Calls of one group take effect in the order in which the host makes them, in whichever streams.

    Kernels that wait for rows fill a GPU. Were those of two calls free to start in either order, one rank
    might start with the first and another with the second, and each would keep the other from computing
    what it waits for. So a call in another stream than the one before waits for what that stream has so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computes_in_order, self._can_capture = device.type == "cpu", device.type == "cuda"
        self._last: torch.Stream | None = None

    def current(self) -> torch.Stream | None:
        """Return this thread's current stream, made to wait for the streams of earlier calls."""
        if self._computes_in_order:
            return None
        current = torch.accelerator.current_stream(self._device)
        last, self._last = self._last, current
        if last is not None and last != current and self._captures(last) == self.capturing():
            current.wait_stream(last)  # whoever replays a graph orders it
        return current

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self._can_capture and torch.cuda.is_current_stream_capturing()

    def _captures(self, stream: torch.Stream) -> bool:
        with stream:
            return self.capturing()
