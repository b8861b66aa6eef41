"""A machine of several ranks' streams, processors and flags that runs on a CPU.

The host code of every rank runs once, on tensors that stand in for a GPU's; it enqueues a `Program`. The
program is then executed in many orders, each from a seed:

    program = record(Machine(ranks=4), host)       host(group) of each rank returns its results
    report = search(program, orders=200)           MachineError: a race, a deadlock, other numbers

Kernels are models in Python: the flags that they wait for, and the memory that they read and write (`Step`).
"""

from tpkernels.streams.device import Awaited as Awaited
from tpkernels.streams.device import MachineError as MachineError
from tpkernels.streams.device import Program as Program
from tpkernels.streams.device import Step as Step
from tpkernels.streams.models import dealt as dealt
from tpkernels.streams.models import elem_of as elem_of
from tpkernels.streams.record import Machine as Machine
from tpkernels.streams.record import record as record
from tpkernels.streams.search import Report as Report
from tpkernels.streams.search import search as search
from tpkernels.streams.tensors import spans_of as spans_of
