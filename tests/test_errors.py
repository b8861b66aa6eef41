"""What is left of a backend's words."""

import pytest

from tpkernels.errors import cause_of

TRACE = (
    "Exception raised from doWait at /pytorch/c10d/TCPStore.cpp:1 (most recent call first):\nframe #0: c10::E"
)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            "[/w/gloo/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv",
            "Timed out waiting 8000ms for recv",
        ),
        (
            "Gloo connectFullMesh failed with [/w/gloo/pair.cc:1] no error",
            "ranks could not connect: no error",
        ),
        (
            "[enforce fail at /w/gloo/device.cc:84] ifa != nullptr. No address for: eth7",
            "No address for: eth7",
        ),
        (
            f"wait timeout after 300000ms, keys: /pg/0//1\n{TRACE}",
            "wait timeout after 300000ms, keys: /pg/0//1",
        ),
        ("peer 0x7f12ab34cd (0x7f12ab34ce) is gone", "peer is gone"),
        ("rows of rank 0 (chunk 1) [of 2] did not arrive", "rows of rank 0 (chunk 1) [of 2] did not arrive"),
        ("", "RuntimeError"),
    ],
)
def test_causes_are_without_places_traces_and_addresses(said, left):
    assert cause_of(RuntimeError(said)) == left
