"""What a thread does in the loops of a kernel, read off a disassembly; and what Triton copies ahead of them.

Only the innermost loops with the kernel's products count (without products: with its loads), and of these one
turn: an epilogue in a branch of a flattened loop does not hide them. A kernel without loops is looked at as a
whole. Pure text, no Triton.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from tpkernels.gate.disassembly import WIDTHS

# kinds of instructions by the beginnings of their opcodes; the first that fits
KINDS: Mapping[str, tuple[str, ...]] = {
    "products": (
        *("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA", "DMMA", "OMMA", "v_mfma"),
        *("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA"),
    ),
    "copies": ("LDGSTS", "UTMALDG", "UBLKCP"),
    "loads": ("LDG.", "LD.", "buffer_load", "global_load", "flat_load"),
    "stores": (
        *("STG", "ST.", "UTMASTG", "UTMAREDG", "RED.", "REDG", "ATOM"),
        *("buffer_store", "global_store", "flat_store", "global_atomic", "buffer_atomic"),
    ),
    "shuffles": ("SHFL", "REDUX", "CREDUX", "ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane"),
    "shared loads": ("LDS", "LDTM", "ds_read", "ds_load"),
    "shared stores": ("STS", "STTM", "ds_write", "ds_store"),
    "spills": ("LDL", "STL", "scratch"),
    "barriers": ("BAR", "s_barrier"),
    "special functions": ("MUFU", "v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_sin", "v_cos"),
    "conversions": ("F2F", "F2I", "I2F", "v_cvt"),
    "floats": (
        *("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSET", "FCHK", "HADD", "HMUL", "HFMA", "HMNMX", "HSET"),
        *("v_fma", "v_add_f", "v_sub_f", "v_mul_f", "v_max", "v_min", "v_pk", "v_mac"),
    ),
    "others": ("",),  # integers, addresses, moves, branches
}
ALL, WAITS, WORK = "all", "load waits", "work"  # beside the kinds, see `Loops`
_MOVING = ("copies", "loads", "stores")
_WORKING = ("products", "copies", "stores", "shuffles", "special functions", "conversions", "floats")
_SASS = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;\n]*);"
    r"(?:\s*/\* 0x[0-9a-f]{16} \*/\s*\n\s*/\* 0x([0-9a-f]{16}) \*/)?",
    re.MULTILINE,
)
_GCN = re.compile(
    r"^(?:(\.L\w+):|\s+((?:[vs]|ds|buffer|global|flat|scratch)_\w+)[ \t]*([^;\n]*))", re.MULTILINE
)
_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)|\.(16)(8)(\d{1,2})|mfma_\w+?_(\d+)x(\d+)x(\d+)")
_GCN_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "short": 2, "byte": 1}
_ALLOCATED = re.compile(r"ttg\.local_alloc : \(\) -> (!ttg\.memdesc<(\d+)x[^>]*mutable>)")


# kinds that a loop which is peeled or unrolled otherwise leaves as they are
REST = (
    *("loads", "stores", "shuffles", "shared loads", "shared stores"),
    *("special functions", "conversions", "floats"),
)


class Loops(NamedTuple):
    """What `Facts` hold of the loops."""

    loops: int  # innermost ones that count; 0: `mix` is of the whole kernel
    # instructions by kind and in all; how often plain loads are issued and then awaited; as work the
    # multiplications of products, else bytes to and from global memory. Absent is zero
    mix: dict[str, int]
    load_bytes: int  # of plain loads from global memory that a thread has in flight at most
    load_waits: int  # as in `mix`, of the whole kernel
    rest: dict[str, int]  # instructions of `REST` that are not in `mix`: an epilogue's, mostly
    tile_loops: int  # around what is stored: 2 where the loop over tiles holds that over depth; 1 if one


class _Instruction(NamedTuple):
    opcode: str
    operands: str
    target: int | None  # number of the instruction that it may jump to
    goes_on: bool  # whether the next one may follow
    control: int  # scoreboards, as the hardware has them


@dataclass(frozen=True, slots=True)
class _Loop:
    head: int
    latch: int  # from where it turns back
    body: frozenset[int]


def nvidia_loops(sass: str) -> Loops:
    """Of a `cuobjdump -sass` listing."""
    return _loops(_of_sass(sass))


def amd_loops(assembly: str) -> Loops:
    """Of AMD's assembly, where nothing tells how many loads are in flight."""
    return _loops(_of_gcn(assembly))


def copied_ahead(ttgir: str) -> tuple[int, ...]:
    """How many buffers in shared memory each operand of a pipelined loop has, most first."""
    found = (
        int(depth)
        for kind, depth in _ALLOCATED.findall(ttgir)
        # one is taken by number; barriers are not data
        if "xi64" not in kind and re.search(rf"memdesc_index [^\n]*: {re.escape(kind)} ->", ttgir)
    )
    return tuple(sorted(found, reverse=True))


@cache
def access_bytes(opcode: str) -> int:
    """A thread's bytes of one access: 16 of `LDG.E.128`, 4 of `LDG.E`."""
    for word in opcode.split("."):
        if word in WIDTHS:
            return WIDTHS[word]
    return next((size for word, size in _GCN_WIDTHS.items() if word in opcode), 4)


def _loops(code: Sequence[_Instruction]) -> Loops:
    whole = [number for number, one in enumerate(code) if one.opcode != "NOP"]
    every = _all_loops(code)
    inner = [_turn(code, loop) for loop in every if not _around(loop, every)]
    kinds = [kind_of(one.opcode) for one in code]
    for wanted in (("products",), ("loads", "copies")):  # another loop may be there for sizes of zero
        if found := [path for path in inner if any(kinds[number] in wanted for number in path)]:
            inner = found
            break
    mix = Counter[str]()
    products = moved = most = 0
    for path in inner or [whole]:
        mix.update(kinds[number] for number in path)
        mix[ALL] += len(path)
        products += sum(_product_size(code[number].opcode) for number in path if kinds[number] == "products")
        moved += sum(access_bytes(code[number].opcode) for number in path if kinds[number] in _MOVING)
        first = _in_flight(code, path)
        turns = _in_flight(code, path + path) if inner else first  # what a turn leaves in flight for the next
        mix[WAITS] += turns[1] - first[1] if inner else first[1]
        most = max(most, turns[0])
    mix[WORK] = products or moved
    turned = {number for path in inner or [whole] for number in path}
    rest = [number for number in whole if number not in turned]
    stores = [number for number in rest if kinds[number] == "stores"]
    around = [1 + _around(loop, every) for loop in every for number in stores if number in loop.body]
    of_all = _in_flight(code, whole)
    return Loops(
        len(inner),
        {name: count for name, count in mix.items() if count},
        most or of_all[0],
        of_all[1],
        dict(Counter(kinds[number] for number in rest if kinds[number] in REST)),
        max(around, default=0),
    )


@cache
def kind_of(opcode: str) -> str:
    return next(kind for kind, begins in KINDS.items() if f"{opcode}.".startswith(begins))


def _product_size(opcode: str) -> int:
    """Multiplications of a product that says its shape; else 1."""
    found = _SHAPE.search(opcode)
    return prod(int(one) for one in found.groups() if one) if found else 1


def _of_sass(sass: str) -> list[_Instruction]:
    found = _SASS.findall(sass)
    at = {int(address, 16): number for number, (address, *_) in enumerate(found)}
    code = []
    for _, predicate, opcode, operands, control in found:
        family, *modifiers = opcode.split(".")
        target = None
        if family in ("BRA", "JMP") and (to := re.search(r"0x([0-9a-f]+)\s*$", operands)):
            target = at.get(int(to[1], 16))
        alone = not predicate and "DIV" not in modifiers and "P" not in operands  # else another word decides
        leaves = family in ("BRA", "JMP", "BRX", "EXIT", "RET") and alone
        code.append(_Instruction(opcode, operands, target, not leaves, int(control or "0", 16)))
    return code


def _of_gcn(assembly: str) -> list[_Instruction]:
    found = _GCN.findall(assembly)
    labels: dict[str, int] = {}
    number = 0
    for label, *_ in found:
        if label:
            labels[label] = number
        else:
            number += 1
    return [
        _Instruction(
            opcode,
            operands,
            labels.get(operands.strip()) if _jumps_together(opcode) else None,
            opcode not in ("s_branch", "s_endpgm"),
            0,
        )
        for label, opcode, operands in found
        if not label
    ]


def _jumps_together(opcode: str) -> bool:
    """Of AMD: a jump past what no lane executes is no other way than to execute it for none."""
    return opcode.startswith(("s_branch", "s_cbranch")) and "exec" not in opcode


def _following(code: Sequence[_Instruction], number: int) -> list[int]:
    one = code[number]
    following = [number + 1] if one.goes_on and number + 1 < len(code) else []
    return following + ([one.target] if one.target is not None else [])


def _turning_back(code: Sequence[_Instruction]) -> Iterator[tuple[int, int]]:
    """(from, to) of each edge that closes a circle, by a search in depth."""
    state: dict[int, bool] = {}  # whether it is left
    for start in range(len(code)):  # an indirect jump leads to code that nothing else leads to
        if start in state:
            continue
        state[start] = False
        path = [(start, iter(_following(code, start)))]
        while path:
            number, following = path[-1]
            after = next(following, None)
            if after is None:
                state[number] = True
                path.pop()
            elif after not in state:
                state[after] = False
                path.append((after, iter(_following(code, after))))
            elif not state[after]:
                yield number, after


def _all_loops(code: Sequence[_Instruction]) -> list[_Loop]:
    """In order; a loop that only waits for a flag is none, nor is `BRA .`."""
    before: dict[int, list[int]] = {}
    for number in range(len(code)):
        for after in _following(code, number):
            before.setdefault(after, []).append(number)
    bodies: dict[int, set[int]] = {}
    latches: dict[int, int] = {}
    for latch, head in _turning_back(code):
        body, todo = bodies.setdefault(head, {head}), [latch]
        latches[head] = max(latch, latches.get(head, latch))
        while todo:
            number = todo.pop()
            if number not in body:
                body.add(number)
                todo += before.get(number, ())
    return [
        _Loop(head, latches[head], frozenset(body))
        for head, body in sorted(bodies.items())
        if any(kind_of(code[number].opcode) in _WORKING for number in body)
    ]


def _around(loop: _Loop, every: Sequence[_Loop]) -> bool:
    """Whether a loop holds others."""
    return any(other.head in loop.body for other in every if other is not loop)


def _turn(code: Sequence[_Instruction], loop: _Loop) -> list[int]:
    """The way through a loop with most products (without any: copies), and else the fewest instructions."""
    kinds = {number: kind_of(code[number].opcode) for number in loop.body}
    wanted = "products" if "products" in kinds.values() else "copies"
    order: list[int] = []
    seen = {loop.head}
    path = [(loop.head, iter(_following(code, loop.head)))]
    while path:
        number, following = path[-1]
        after = next(following, None)
        if after is None:
            order.append(number)
            path.pop()
        elif after in loop.body and after not in seen:
            seen.add(after)
            path.append((after, iter(_following(code, after))))
    best: dict[int, tuple[int, int]] = {}
    then: dict[int, int] = {}
    for number in order:  # what follows comes first
        ways = [after for after in _following(code, number) if after in best and number != loop.latch]
        if ways or number == loop.latch:
            then[number] = max(ways, key=best.__getitem__, default=-1)
            most, length = best.get(then[number], (0, 0))
            best[number] = most + (kinds[number] == wanted), length - 1
    turn = [loop.head]
    while (after := then.get(turn[-1], -1)) >= 0:
        turn.append(after)
    return turn


def _in_flight(code: Sequence[_Instruction], path: Sequence[int]) -> tuple[int, int]:
    """(most bytes of plain loads in flight, how often some are awaited after others were issued).

    A load counts on one of six scoreboards, and an instruction waits for those in its mask.
    """
    pending: dict[int, int] = {}
    most = waits = 0
    issued = False
    for one in map(code.__getitem__, path):
        awaited = [board for board in pending if one.control >> 52 >> board & 1]
        for board in awaited:
            del pending[board]
        if awaited and issued:
            waits, issued = waits + 1, False
        if one.control and kind_of(one.opcode) == "loads":
            board = one.control >> 46 & 7
            pending[board] = pending.get(board, 0) + access_bytes(one.opcode)
            most, issued = max(most, sum(pending.values())), True
    return most, waits
