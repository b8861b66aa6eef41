"""A machine of several ranks' streams, processors and flags that runs on a CPU.

The host code of every rank runs once, on tensors that stand in for a GPU's; it enqueues a `Program`. The
program is then executed in many orders, each from a seed:

    program = record(Machine(ranks=4), host)       host(group) of each rank returns its results
    report = search(program, orders=200)           MachineError: a race, a deadlock, other numbers

Kernels are models in Python: the flags that they wait for, and the memory that they read and write (`Step`).
"""

from bench.streams.command import add_options as add_options
from bench.streams.command import main as main
from bench.streams.device import Awaited as Awaited
from bench.streams.device import MachineError as MachineError
from bench.streams.device import Program as Program
from bench.streams.device import Step as Step
from bench.streams.models import dealt as dealt
from bench.streams.models import elem_of as elem_of
from bench.streams.record import Machine as Machine
from bench.streams.record import record as record
from bench.streams.search import Report as Report
from bench.streams.search import search as search
from bench.streams.tensors import spans_of as spans_of
