"""Each hazard that the transports argue about, taken away: the machine of streams shows it."""

from importlib import import_module

import pytest

from bench.streams import tensors
from bench.streams.device import MachineError
from bench.streams.search import search
from tests.bench.streams.planted import FAULTS, Fault, edited

recording, searching = (import_module(f"bench.streams.{name}") for name in ("record", "search"))
ORDERS = 200
SHOWN = (
    "in no order|no rank can continue|differ from expected|processors while|a capture|SMs reserved|on channel"
    "|has not been told"
)


def shown_by(fault: Fault) -> None:
    with fault.planted():
        program, expected = fault.recorded()
    search(program, ORDERS, expected, waves=True)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name):
    with pytest.raises(MachineError, match=SHOWN):
        shown_by(FAULTS[name])


@pytest.mark.parametrize("name", FAULTS)
def test_without_it_the_same_program_is_right(name):
    """Else it might fail for another reason."""
    program, expected = FAULTS[name].recorded()
    search(program, 2, expected, waves=True)


BLIND = {  # what the machine can tell, taken away, and a fault that it then misses
    "libraries": (
        lambda: edited(tensors, "_left_by", "device.settings.reserved or 0 if reads_setting else 0", "1"),
        "mm by cuBLAS runs beside a collective",
    ),
    "settings": (
        lambda: edited(recording, "_require_restored", "device.settings != TorchSettings()", "False"),
        "reserved SMs are never given back",
    ),
    "two groups": (
        lambda: edited(
            searching,
            "require_waves_beside",
            "sum(task.needs_at_once for task in in_flight.values())",
            "max([0, *(task.needs_at_once for task in in_flight.values())])",
        ),
        "two groups reserve the blocks of one",
    ),
    "channels": (
        lambda: edited(searching, "require_channels_apart", "one is not None", "False"),
        "barriers before kernels that push have the channel of pushes",
    ),
}


@pytest.mark.parametrize(("taken_away", "fault"), BLIND.values(), ids=BLIND)
def test_a_machine_that_cannot_tell_finds_no_fault(taken_away, fault):
    found = FAULTS[fault]
    with taken_away(), found.planted():
        program, expected = found.recorded()
        search(program, 4, expected, waves=True)
