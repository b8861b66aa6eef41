"""Divisions, which ptxas makes of a reciprocal in fp32 and a correction: quotients are exactly Python's."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import triton
import triton.language as tl

from tpkernels.gate.clock.cubin import read
from tpkernels.gate.clock.effects import Exit, Jump
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.values import BlockValues, Constants, WarpState, initial_values


@triton.jit
def divide(x, y, out_ptr):
    tl.store(out_ptr, x // y)


@triton.jit
def divide_lanes(x, y, out_ptr):
    lanes = tl.arange(0, 32)
    tl.store(out_ptr + lanes, (x + lanes) // y)


def cubin_of(name: str, kind: str) -> bytes:
    """For `Compiler.run`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        globals()[name], signature={"x": kind, "y": kind, "out_ptr": "*" + kind}, constexprs={}
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]


class Division:
    def __init__(self, content: bytes) -> None:
        self.cubin = read(content)
        self.store = next(one for one in self.cubin.instructions if one.opcode == "STG")
        number = int(re.fullmatch(r"R(\d+)", self.store.operands[1])[1])  # type: ignore[index]
        self.names = [f"R{number + more}" for more in range(2 if "64" in self.store.modifiers else 1)]
        self.program = translate(self.cubin, wanted=self.names)

    def stored(self, x: int, y: int) -> list[object]:
        """The words that the first store writes."""
        constants = Constants.of(self.cubin, [x, y, 1 << 40, 0, 0], (1, 1, 1), 32)
        state = WarpState(0, BlockValues((0, 0, 0), constants, initial_values(self.cubin, constants)))
        for _ in range(2000):
            step = self.program[state.at]
            if step.instruction is self.store:
                return [state.registers[name] for name in self.names]
            state.at += 1
            effect = step.execute(state) if step.execute else None
            assert not isinstance(effect, Exit)
            if isinstance(effect, Jump):
                state.at = effect.index
        raise AssertionError("does not end")


def pairs(bits: int, count: int, lowest: int) -> list[tuple[int, int]]:
    dice = random.Random(bits)
    top = (1 << bits) - 1
    edges = [1, 2, 3, 7, 8, 127, 128, 129, top // 2, top // 2 + 1, top - 1, top]
    found = [(x, y) for x in (0, *edges) for y in edges]
    for _ in range(count):
        y = dice.getrandbits(dice.randint(1, bits)) or 1
        quotient = dice.getrandbits(dice.randint(1, bits)) * y
        found += [((quotient + more) & top, y) for more in (-1, 0, dice.randrange(y))]
    if lowest:
        found += [(-x, y) for x, y in found] + [(x, -y) for x, y in found[:200]]
    return found


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


@pytest.mark.parametrize(("kind", "bits", "count"), [("u32", 32, 200), ("i32", 31, 120), ("i64", 63, 40)])
def test_quotient_is_exact(compiler, kind: str, bits: int, count: int):
    division = Division(compiler.run(cubin_of, "divide", kind))
    mask = (1 << (64 if kind == "i64" else 32)) - 1
    for x, y in pairs(bits, count, kind != "u32"):
        words = division.stored(x, y)
        assert all(word is not None for word in words), (x, y)
        assert sum(int(np.max(word)) << 32 * at for at, word in enumerate(words)) == truncated(x, y) & mask


def test_quotients_of_lanes_are_exact(compiler):
    division = Division(compiler.run(cubin_of, "divide_lanes", "i32"))
    for x, y in [(0, 3), (1000, 7), (-17, 5), (2**31 - 40, 13), (96, 32)]:
        (words,) = division.stored(x, y)
        assert words.tolist() == [truncated(x + lane, y) & 0xFFFFFFFF for lane in range(32)]  # type: ignore[attr-defined]
