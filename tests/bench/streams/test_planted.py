"""Each hazard that the transports argue about, taken away: the machine of streams shows it."""

import pytest

from bench.streams.device import MachineError
from bench.streams.search import search
from tests.bench.streams.planted import FAULTS, Fault

ORDERS = 200
SHOWN = "in no order|no rank can continue|differ from expected|processors while|a capture"


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
