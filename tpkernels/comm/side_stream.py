"""A stream beside the one that computes. Devices without streams do everything at once, in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """csrc/side_stream.h in Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device, priority=-1)

    def note_current(self, streams: list[torch.Stream]) -> None:
        """Add the stream that is current in this thread to `streams`, once."""
        if self._stream is None:
            return
        current = torch.accelerator.current_stream(self._device)
        if current not in streams:
            streams.append(current)

    def wait_for(self, streams: list[torch.Stream]) -> None:
        """What is enqueued here from now on waits for what is in `streams` so far. The host does not."""
        for stream in streams:
            assert self._stream is not None
            self._stream.wait_stream(stream)

    def let_current_wait(self) -> None:
        """The reverse: the current stream waits for what is enqueued here so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def entered(self) -> AbstractContextManager[object]:
        """Makes this stream the current one."""
        return nullcontext() if self._stream is None else self._stream
