"""Divisions, which ptxas makes of a reciprocal in fp32 and a correction: quotients are exactly Python's."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from tests.gate.clock.compiled import cubin_of
from tpkernels.gate.clock.cubin import Cubin, read
from tpkernels.gate.clock.effects import Exit, Jump
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.values import Block, Constants, WarpState, initial_values

_SCRIPT = """
import base64, sys, triton, triton.language as tl
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget

@triton.jit
def divide(x, y, out_ptr):
    tl.store(out_ptr, x // y)

@triton.jit
def divide_lanes(x, y, out_ptr):
    lanes = tl.arange(0, 32)
    tl.store(out_ptr + lanes, (x + lanes) // y)

kernel = {"one": divide, "lanes": divide_lanes}[sys.argv[1]]
kind = sys.argv[2]
source = ASTSource(fn=kernel, signature={"x": kind, "y": kind, "out_ptr": "*" + kind}, constexprs={})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
print(base64.b64encode(compiled.asm["cubin"]).decode())
"""


def stored(cubin: Cubin, x: int, y: int) -> list[object]:
    """The words that the first store writes."""
    store = next(one for one in cubin.instructions if one.opcode == "STG")
    number = int(re.fullmatch(r"R(\d+)", store.operands[1])[1])  # type: ignore[index]
    names = [f"R{number + more}" for more in range(2 if "64" in store.modifiers else 1)]
    constants = Constants.of(cubin, [x, y, 1 << 40, 0, 0], (1, 1, 1), 32)
    state = WarpState(0, Block((0, 0, 0), constants, initial_values(cubin, constants)))
    program = translate(cubin, wanted=names)
    for _ in range(2000):
        step = program[state.at]
        if step.instruction is store:
            return [state.registers[name] for name in names]
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
def test_quotient_is_exact(kind: str, bits: int, count: int, tmp_path: Path):
    cubin = read(cubin_of(_SCRIPT, tmp_path, "one", kind))
    mask = (1 << (64 if kind == "i64" else 32)) - 1
    wrong = []
    for x, y in pairs(bits, count, kind != "u32"):
        words = stored(cubin, x, y)
        found = (
            None
            if any(word is None for word in words)
            else sum(int(np.max(word)) << 32 * at for at, word in enumerate(words))
        )
        if found != truncated(x, y) & mask:
            wrong.append((x, y, found, truncated(x, y) & mask))
    assert wrong == []


def test_quotients_of_lanes_are_exact(tmp_path: Path):
    cubin = read(cubin_of(_SCRIPT, tmp_path, "lanes", "i32"))
    for x, y in [(0, 3), (1000, 7), (-17, 5), (2**31 - 40, 13), (96, 32)]:
        (words,) = stored(cubin, x, y)
        assert words.tolist() == [truncated(x + lane, y) & 0xFFFFFFFF for lane in range(32)]  # type: ignore[attr-defined]
