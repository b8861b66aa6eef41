"""Each hazard that the transports argue about, taken away: the machine of streams shows it."""

import pytest

from tests.streams.planted import FAULTS, Fault
from tpkernels.streams.device import MachineError
from tpkernels.streams.search import search

ORDERS = 200


def test_there_are_faults_enough():
    assert len(FAULTS) >= 25


def shown_by(fault: Fault) -> None:
    with fault.planted():
        program, expected = fault.recorded()
    search(program, ORDERS, expected, waves=True)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name):
    with pytest.raises(MachineError):
        shown_by(FAULTS[name])
