"""What SASS of sm_90 does with the registers of products that run asynchronously. Pure text.

A product of a warp group (`HGMMA`, `QGMMA`, `IGMMA`) reads registers and adds to registers long after it was
issued. `gsb0` among its operands ends a batch, and `WARPGROUP.DEPBAR.LE gsb0, N` waits until no more than the
last N batches run. Until then what it adds to may be neither read nor written, nor may what it reads be
written. By another product they may: products run one after the other.

A kernel is followed along all branches, as if each could be taken whatever was before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)\s*([^;]*);", re.MULTILINE
)
_PRODUCT = re.compile(r"[A-Z]GMMA\.\d+x(\d+)x\d+\.(?:SP\.)?(\w+)")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+)")
_RESULT = re.compile(r"(?:U?P[T0-9],\s*)*R(\d+)")  # after the predicates that are written with it
_NO_RESULT = re.compile(  # whose first register is read
    r"[IFD]SETP|HSETP2|FCHK|R2P|ST[GSL]?|STSM|REDG?|SYNCS|BAR|BRX|JMX|RET|CALL|WARPSYNC|NANOSLEEP|BMOV"
)
_WORDS = {"64": 2, "WIDE": 2, "2": 2, "128": 4, "4": 4}  # modifiers -> registers of a result
_JUMP = re.compile(r"BRA|CALL|JMP|WARPSYNC\.COLLECTIVE")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_LEAVE = ("EXIT", "RET", "BRX", "JMX", "BRA", "JMP")  # without a condition: what follows does not run
_CONDITION = re.compile(r"!?U?P\d|U?R\d")
_OLDEST = 8  # batches ago: more than any wait allows

_Ages = dict[int, int]  # products in flight: how many batches ago they were issued; 0: theirs has no end yet


class _Instruction(NamedTuple):
    address: int
    guard: str
    opcode: str
    operands: str

    def __str__(self) -> str:
        return f"`{self.opcode} {self.operands.strip()}` at {self.address:#x}"


class _Product(NamedTuple):
    adds_to: range  # registers
    reads: range
    ends_batch: bool


class _Block(NamedTuple):
    """Instructions that run one after the other."""

    start: int
    stop: int
    following: Sequence[int]  # starts of what may run next


def raced_products(sass: str) -> tuple[str, ...]:
    """Where a register of a product is used before the product is awaited: once of each, nothing of most."""
    if "GMMA." not in sass:
        return ()
    code = [
        _Instruction(int(address, 16), guard, opcode, operands)
        for address, guard, opcode, operands in _INSTRUCTION.findall(sass)
    ]
    products = {at: _product(one) for at, one in enumerate(code) if "GMMA." in one.opcode}
    blocks = {block.start: block for block in _blocks(code)}
    before: dict[int, _Ages] = {start: {} for start in blocks}
    todo = list(reversed(blocks))  # all: what is jumped to through a register is followed as well
    while todo:
        block = blocks[todo.pop()]
        ages = dict(before[block.start])
        for at in range(block.start, block.stop):
            _step(code[at], at, products, ages)
        todo += (start for start in block.following if _merge(before[start], ages))
    faults: dict[int, str] = {}
    for start, block in blocks.items():
        for product, fault in _faults(code, block, products, before[start]):
            faults.setdefault(product, fault)
    return tuple(faults.values())


def _product(one: _Instruction) -> _Product:
    shape, operands = _PRODUCT.match(one.opcode), one.operands.split(",")
    result, first = _REGISTER.match(operands[0]), _REGISTER.match(operands[1].strip())
    if shape is None or result is None:
        raise ValueError(f"not a known form of a product: {one}")
    start, count = int(result[1]), int(shape[1]) // (4 if shape[2] == "F16" else 2)  # 64 rows, 128 threads
    reads = range(int(first[1]), int(first[1]) + 4) if first else range(0)  # or it lies in shared memory
    return _Product(range(start, start + count), reads, "gsb0" in one.operands)


def _blocks(code: Sequence[_Instruction]) -> Iterator[_Block]:
    index = {one.address: at for at, one in enumerate(code)}
    targets = {
        at: index[int(to[1], 16)]
        for at, one in enumerate(code)
        if _JUMP.match(one.opcode) and (to := _TARGET.search(one.operands)) and int(to[1], 16) in index
    }
    leaves = {at for at, one in enumerate(code) if _leaves(one)}
    starts = sorted({0, *targets.values(), *(at + 1 for at in (*targets, *leaves))} - {len(code)})
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        last = stop - 1
        falls = [stop] if last not in leaves and stop < len(code) else []
        yield _Block(start, stop, [targets[last], *falls] if last in targets else falls)


def _leaves(one: _Instruction) -> bool:
    return one.opcode.split(".")[0] in _LEAVE and not one.guard and not _CONDITION.match(one.operands)


def _step(one: _Instruction, at: int, products: Mapping[int, _Product], ages: _Ages) -> None:
    """Change `ages` as an instruction does."""
    if at in products:
        ages[at] = 0
        if products[at].ends_batch:
            for other, age in ages.items():
                ages[other] = min(age + 1, _OLDEST)
    elif one.opcode == "WARPGROUP.DEPBAR.LE" and (left := _WAIT.match(one.operands)):
        for other in [other for other, age in ages.items() if age > int(left[1], 16)]:
            del ages[other]


def _merge(into: _Ages, ages: _Ages) -> bool:
    """Add what is in flight on another way there; whether it is more than before, or younger."""
    younger = {product: age for product, age in ages.items() if age < into.get(product, _OLDEST + 1)}
    into.update(younger)
    return bool(younger)


def _faults(
    code: Sequence[_Instruction], block: _Block, products: Mapping[int, _Product], before: _Ages
) -> Iterator[tuple[int, str]]:
    """Each use of a register that it is too early for, with the product."""
    ages = dict(before)
    for at in range(block.start, block.stop):
        one = code[at]
        if ages:
            itself = products.get(at)
            written = range(0) if itself else _written(one)
            used = itself.reads if itself else {*map(int, _REGISTER.findall(one.operands)), *written}
            for number in used:
                for product in ages:
                    if number in products[product].adds_to or (
                        number in written and number in products[product].reads
                    ):
                        what = "written" if number in written else "read"
                        yield product, f"R{number} of {code[product]} is {what} by {one} before it is awaited"
        _step(one, at, products, ages)


def _written(one: _Instruction) -> range:
    """The registers of its result; of rare forms the first alone."""
    family, *modifiers = one.opcode.split(".")
    result = None if _NO_RESULT.fullmatch(family) else _RESULT.match(one.operands)
    if result is None:
        return range(0)
    if family == "CS2R":
        words = 1 if "32" in modifiers else 2
    elif family[:2] == "LD" or "WIDE" in modifiers:
        words = max((_WORDS.get(name, 1) for name in modifiers), default=1)
    else:
        words = 2 if family[0] == "D" else 1
    return range(int(result[1]), int(result[1]) + words)
