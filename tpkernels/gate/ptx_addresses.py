"""Which bytes of shared memory instructions of PTX touch, for each thread. Pure text.

What constants and the thread's number decide is computed; whatever else a kernel learns at run time counts as
0. So of a ring of buffers its first is touched, by each thread where that thread does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tpkernels.gate.ptx_flow import TENSOR_STORE, WARP, Flow

Threads = NDArray[np.int64]  # a value for each

_WRITTEN = re.compile(r"^([a-z]\S*)\s+(%[a-z]+\d+),\s*(.*);$")  # always, and one register
_MATRIX = re.compile(r"^(?:ld|st)matrix\S*\.x([124])\.\S*\s.*\[(\S+)\]")
_WORDS = re.compile(r"^(?:@\S+\s+)?(?:ld|st)\.shared(?:::cta)?(?:\.v([24]))?\.[bfus](\d+)\s.*?\[(\S+)\]")
_LANDING = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared\S*\s+\[(\S+?)\],")
_ROW = 16  # bytes of a matrix, whose address a thread gives

_COMPARISONS: Mapping[str, Callable[[Threads, Threads], NDArray[np.bool_]]] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
}


def _selected(a: Threads, b: Threads, chosen: Threads) -> Threads:
    return np.where(chosen != 0, a, b).astype(np.int64)


def _of_lane(a: Threads, lane: Threads, *_: Threads) -> Threads:
    """What one lane of each warp has."""
    return a.reshape(-1, WARP)[:, [int(lane[0])]].repeat(WARP, 1).ravel()


_OPERATIONS: Mapping[str, Callable[..., Threads]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "not": lambda a: ~a & 0xFFFFFFFF,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": np.minimum,
    "max": np.maximum,
    "bfe": lambda a, at, bits: a >> at & (1 << bits) - 1,
    "selp": _selected,
    "shfl": _of_lane,
}


class Addresses:
    """Of the operands of one kernel."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.threads = np.arange(-(-(flow.threads or WARP) // WARP) * WARP, dtype=np.int64)
        self._known: dict[str, Threads] = {}
        self._first: dict[str, tuple[str, str]] = {}  # register -> opcode and operands where first written
        for line in flow.lines:
            if found := _WRITTEN.match(line):
                self._first.setdefault(found[2], (found[1], found[3]))

    def touched(self, line: str) -> Threads | None:
        """The bytes of shared memory that an instruction reads or writes; of a tensor copy the first byte."""
        if matrix := _MATRIX.search(line):
            first = self.of(matrix[2]).reshape(-1, WARP)[:, : 8 * int(matrix[1])].ravel()
            return _widened(first, _ROW)
        if words := _WORDS.search(line):
            return _widened(self.of(words[3]), int(words[1] or 1) * int(words[2]) // 8)
        copy = TENSOR_STORE.search(line) or _LANDING.search(line)
        return None if copy is None else self.of(copy[1])[:1]

    def of(self, operand: str) -> Threads:
        """What an operand holds in each thread: a register, a number, `global_smem+1024`."""
        base, _, offset = operand.partition("+")
        return self._value(base) + (int(offset) if offset else 0)

    def _value(self, name: str) -> Threads:
        if name == "%tid.x":
            return self.threads
        if re.fullmatch(r"-?\d+", name):
            return np.full_like(self.threads, int(name))
        if name not in self._known:
            self._known[name] = np.zeros_like(self.threads)  # for what is computed from itself
            opcode, operands = self._first.get(name, ("", ""))
            self._known[name] = self._computed(opcode.split("."), re.split(r",\s*", operands))
        return self._known[name]

    def _computed(self, opcode: Sequence[str], operands: Sequence[str]) -> Threads:
        if opcode[0] == "setp" and len(operands) == 2:
            return _COMPARISONS[opcode[1]](*map(self.of, operands)).astype(np.int64)
        operation = _OPERATIONS.get(opcode[0])
        if operation is None or "hi" in opcode:
            return np.zeros_like(self.threads)
        return operation(*map(self.of, operands))


def _widened(first: Threads, count: int) -> Threads:
    """`count` bytes from each of these on."""
    return np.unique(first[:, None] + np.arange(count))
