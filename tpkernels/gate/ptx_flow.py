"""PTX as a graph: what may run after each instruction, in which role of warps. Pure text.

Blocks do not lie in the order in which they run. A kernel of several roles begins with the default role. The
other warps wait in a loop, where each reads from shared memory which role it has: a table of branches
(`brx.idx`) or, since Triton 3.8, one comparison after the other sends it there.

What PTX proves of the order in which a kernel reads rows, stores rows and raises flags. Pure text.

A kernel is followed from its start along all branches, for blocks do not lie in the order in which they run.
On the way steps are counted that must come one after the other: what needs all of them must not be reached
with fewer.

Which bytes of shared memory instructions of PTX touch, for each thread. Pure text.

What constants and the thread's number decide is computed; whatever else a kernel learns at run time counts as
0. So of a ring of buffers its first is touched, by each thread where that thread does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

WARP = 32
PRODUCTS_COMMITTED = re.compile(r"\bwgmma\.commit_group\b")

PRODUCT = re.compile(r"\bwgmma\.mma_async\b")
TENSOR_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared\S*\s.*\[(\S+)\];")  # with its mbarrier
TENSOR_STORE = re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global\.shared\S*\s.*\[(\S+)\];")
WAIT = re.compile(r"\bmbarrier\.try_wait\S*\s+\w+, \[(\S+)\]")
SHARED_STORE = re.compile(r"\b(?:st\.shared|stmatrix)\b")
STORE_WAIT = re.compile(  # for copies to have read shared memory, or, since Triton 3.8, also to have written
    r"\bcp\.async\.bulk\.wait_group(?:\.read)?\s+(\d+);"
)
COMMIT = re.compile(r"\bcp\.async\.bulk\.commit_group;")

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);")  # not those of a spin that is one instruction to us
_TABLE = re.compile(r"(?:\S+: )?\.branchtargets")  # its label stands before it, perhaps on a line of its own
_INDEXED = re.compile(r"\bbrx\.idx(?:\.uni)?\s+[^,]+,\s*(\S+);")
_ROLES_BEGIN = re.compile(r"barrier\.sync\s+1;")
_ROLE_NUMBER = re.compile(r"ld\.shared\S*\.[bu]8\s")
_CHOICE = re.compile(  # of a way, or what it depends on
    r"(?:@\S+\s+)?(?:\$L|(?:setp|bra|brx|mov|cvt|add|sub|and|or|xor|not|shl|shr)\b)"
)
_FOR_ALL = re.compile(r"bra(?:\.uni)?\s+\$L__BB|brx\.idx|ret;")  # without a predicate: nothing follows
_BARRIER = re.compile(r"\bbar(?:rier)?\.sync\s+\d+(?:,\s*(\d+))?;")
_WARP_BARRIER = re.compile(r"\bbar\.warp\.sync\b")
_ALL_THREADS = re.compile(r"\.reqntid\s+(\d+)")
BARRIER_OF_ALL = re.compile(r"\bbar(?:rier)?\.sync\s+\d+;")  # of the block
_WORK = re.compile(r"\b(?:wgmma|cp\.async\.bulk|mbarrier|ld\.global|st\.global)\.")
_REGISTER = re.compile(r"%[a-z]+\d+")
_COMPUTED = re.compile(
    r"^(?!ld\.(?!param)|atom|@)(\S+\s+)%[a-z]+\d+,\s*(.*);$"
)  # from operands alone, and always
_WRITTEN = re.compile(r"^(?:@\S+\s+)?\S+\s+(\{[^}]*\}|%[a-z]+\d+(?:\|%[a-z]+\d+)?)")

FlowState = frozenset[tuple[str, int | str]]  # what may hold, and of what
_Edges = Mapping[int, Sequence[int]] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Flow:
    """The lines of a kernel: labels and instructions."""

    lines: tuple[str, ...]

    @staticmethod
    def of(ptx: str) -> Flow:
        return Flow(tuple(line for text in ptx.splitlines() if (line := text.split("//")[0].strip())))

    @cached_property
    def following(self) -> tuple[tuple[int, ...], ...]:
        """What may run after each line."""
        labels = {found[1]: at for at, line in enumerate(self.lines) if (found := _LABEL.match(line))}
        tables = dict(self._tables())
        return tuple(tuple(self._next(at, labels, tables)) for at in range(len(self.lines)))

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The roles that do anything, the default one first; a kernel without roles is one."""
        begins = [at + 1 for at, line in enumerate(self.lines) if _ROLES_BEGIN.match(line)]
        read = (at for begin in begins for at in self._chosen(begin) if _ROLE_NUMBER.match(self.lines[at]))
        number = next(read, None)
        if number is None:
            return (Role(self, self._reached(0, None), 0),)
        head = next(at for at in range(number, -1, -1) if _LABEL.match(self.lines[at]))
        starts = (0, *self._chosen(number + 1))
        roles = (Role(self, self._reached(start, head), start) for start in starts)
        return tuple(role for role in roles if role.any_of(_WORK))

    def _chosen(self, start: int) -> Sequence[int]:
        """The first lines on all ways from `start` that do more than choose a way."""
        found, seen, todo = dict[int, None](), set[int](), [start]
        while todo:
            at = todo.pop(0)
            if at not in seen:
                seen.add(at)
                if _CHOICE.match(self.lines[at]):
                    todo += self.following[at]
                else:
                    found[at] = None
        return [*found]

    @cached_property
    def threads(self) -> int:
        """Of a block; 0: not said."""
        return next((int(found[1]) for line in self.lines if (found := _ALL_THREADS.match(line))), 0)

    def value(self, operand: str) -> int | str:
        """A number that operands share which always hold the same; of one that may change its name."""
        if operand not in self._values:
            self._values[operand] = operand  # for what is computed from itself
            definition = self._definitions.get(operand)
            if definition is not None:
                parts = [self.value(register) for register in _REGISTER.findall(definition)]
                if all(isinstance(part, int) for part in parts):
                    key = (_REGISTER.sub("%", definition), *parts)
                    self._values[operand] = self._numbers.setdefault(key, len(self._numbers))
        return self._values[operand]

    @cached_property
    def _values(self) -> dict[str, int | str]:
        return {}

    @cached_property
    def _numbers(self) -> dict[tuple[int | str, ...], int]:
        return {}

    @cached_property
    def _definitions(self) -> Mapping[str, str | None]:
        """Register -> how it is computed; None for what memory holds, or is written in several places."""
        found: dict[str, str | None] = {}
        for line in self.lines:
            if written := _WRITTEN.match(line):
                computed = _COMPUTED.match(line)
                for register in _REGISTER.findall(written[1]):
                    again = register in found
                    found[register] = computed[1] + computed[2] if computed and not again else None
        return found

    def _tables(self) -> Iterator[tuple[str, list[str]]]:
        for at, line in enumerate(self.lines):
            if _TABLE.match(line):
                label = line if ":" in line else self.lines[at - 1]
                end = next(to for to in range(at + 1, len(self.lines)) if not self.lines[to].endswith(","))
                text = " ".join(self.lines[at + 1 : end + 1])
                yield label.partition(":")[0], re.findall(r"\$L__BB\w+", text)

    def _next(self, at: int, labels: Mapping[str, int], tables: Mapping[str, list[str]]) -> Iterator[int]:
        line = self.lines[at]
        if branch := _BRANCH.search(line):
            yield labels[branch[1]]
        if table := _INDEXED.search(line):
            yield from (labels[target] for target in tables[table[1]])
        if not _FOR_ALL.match(line) and at + 1 < len(self.lines):
            yield at + 1

    def _reached(self, start: int, stop: int | None) -> frozenset[int]:
        seen, todo = set[int](), [start]
        while todo:
            at = todo.pop()
            if at not in seen and at != stop:
                seen.add(at)
                todo += self.following[at]
        return frozenset(seen)


@dataclass(frozen=True)
class Role:
    """What a group of warps does."""

    flow: Flow
    lines: frozenset[int]  # that it may run
    start: int

    @cached_property
    def threads(self) -> int:
        """As its own barriers count them. Without any: of a warp, or of the block if there is one role."""
        found = [match for at in self.lines if (match := _BARRIER.search(self.flow.lines[at]))]
        own = [int(match[1]) for match in found if match[1]]
        return max(own, default=WARP if self.is_worker else self.flow.threads)

    @property
    def is_worker(self) -> bool:
        return self.start != 0

    def matching(self, pattern: re.Pattern[str]) -> frozenset[int]:
        return frozenset(at for at in self.lines if pattern.search(self.flow.lines[at]))

    def any_of(self, pattern: re.Pattern[str]) -> bool:
        return bool(self.matching(pattern))

    @property
    def ends(self) -> frozenset[int]:
        """The lines after which it is done."""
        follows = self.flow.following
        return frozenset(at for at in self.lines if not follows[at] or not self.lines.issuperset(follows[at]))

    def syncs_all(self, line: str) -> bool:
        """Whether all threads of the role wait for each other here."""
        if found := _BARRIER.search(line):
            return found[1] is None or int(found[1]) >= self.threads
        return self.threads <= WARP and bool(_WARP_BARRIER.search(line))

    @cached_property
    def preceding(self) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = {at: [] for at in self.lines}
        for at in self.lines:
            for place in self.flow.following[at]:
                if place in found:
                    found[place].append(at)
        return found

    @cached_property
    def with_products(self) -> frozenset[int]:
        """The lines before or after some product: not the way of a kernel that has nothing to multiply."""
        products = self.matching(PRODUCT)
        return self._closed(products, self.flow.following) | self._closed(products, self.preceding)

    @cached_property
    def turns(self) -> frozenset[tuple[int, int]]:
        """The jumps by which loops that multiply begin anew."""
        products, found = self.matching(PRODUCT), set[tuple[int, int]]()
        for at, place in self._retreating():
            body = self._closed([at], {**self.preceding, place: []})
            if body & products:
                found.add((at, place))
        return frozenset(found)

    def before_each(
        self,
        step: Callable[[int, FlowState], FlowState],
        without: frozenset[tuple[int, int]] = frozenset(),
        initial: FlowState = frozenset(),
    ) -> dict[int, FlowState]:
        """What may hold before each line, on one way or another; `step` says what a line makes of it.

        without: jumps that are not followed
        initial: what holds at the start
        """
        states: dict[int, FlowState] = {self.start: initial}
        todo = [self.start]
        while todo:
            at = todo.pop()
            after = step(at, states[at])
            for place in self.flow.following[at]:
                if place not in self.lines or (at, place) in without:
                    continue
                if not (place in states and after <= states[place]):
                    states[place] = states.get(place, frozenset()) | after
                    todo.append(place)
        return states

    def _closed(self, starts: Iterable[int], follows: _Edges) -> frozenset[int]:
        """The places on the ways from `starts`, which count."""
        seen, todo = set[int](), list(starts)
        while todo:
            at = todo.pop()
            if at not in seen and at in self.lines:
                seen.add(at)
                todo += follows[at]
        return frozenset(seen)

    def _retreating(self) -> Iterator[tuple[int, int]]:
        """Jumps to a place that was passed on the way: of each loop the one that closes it."""
        done, way = set[int](), {self.start}
        stack = [(self.start, iter(self.flow.following[self.start]))]
        while stack:
            at, places = stack[-1]
            place = next(places, None)
            if place is None:
                way.discard(at)
                done.add(at)
                stack.pop()
            elif place in way:
                yield at, place
            elif place in self.lines and place not in done:
                way.add(place)
                stack.append((place, iter(self.flow.following[place])))


NO_FLAG = "no flag is raised with release.sys"

_ATOMIC = r"^(?:@\S+ )?(?:ld|atom|red|st)\.global\.(?=\S*\.?sys\b)"
_LOOK = re.compile(_ATOMIC + r"(?=\S*\bacquire\b)")
_COUNT = re.compile(_ATOMIC + r"(?=\S*\bacq_rel\b)")
_FLAG = re.compile(_ATOMIC + r"(?=\S*\brelease\b)")
_UNORDERED = re.compile(_ATOMIC + r"(?=\S*\brelaxed\b)")
_NOT_FOR_ALL = re.compile(
    r"^(?:@\S+ )?(?:ld|atom|red|st)\.global\.(?!\S*\bsys\b)(?=\S*\b(?:acquire|acq_rel|release)\b)"
)
_FULL_BARRIER = re.compile(r"^(?:@\S+ )?bar(?:rier)?\.sync\b")
_PROXY_FENCE = re.compile(r"\bfence\.proxy\.async(?:\.global)?;")
_STORE = re.compile(r"\bst\.global\.(?!\S*\bsys\b)|\bcp\.async\.bulk\.tensor\.\dd\.global\.shared")
_TENSOR_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared")
_LOADS = (
    _TENSOR_LOAD,
    re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b"),
    re.compile(r"\bld\.global\.\S*v[24]\b"),
)
_Order = Sequence[tuple[re.Pattern[str], str]]  # with what is missing where one is


def unordered_reads(ptx: str) -> tuple[str, ...]:
    """Why a kernel that waits may read rows before their flag; nothing if it cannot.

    From the start, and after each tile that was stored, it must look at a flag, tell all its threads by a
    barrier, and fence what reads by a proxy of its own: the copy engine.
    """
    flow = Flow.of(ptx)
    lines = flow.lines
    loads = next((pattern for pattern in _LOADS if any(map(pattern.search, lines))), None)
    if loads is None:
        return ("no load of rows that is known",)
    steps = [
        (_LOOK, "without a look at its flag with acquire.sys"),
        (_FULL_BARRIER, "without a barrier after the look"),
        (_PROXY_FENCE, "without a proxy fence after the barrier"),
    ]
    missing = _missing(flow, steps if loads is _TENSOR_LOAD else steps[:2], _STORE, loads)
    return (*(f"a row is loaded {words}" for words in missing), *_weak(lines))


def unordered_flags(ptx: str) -> tuple[str, ...]:
    """Why a flag may be seen before the rows that it tells of; nothing if it cannot.

    All threads store: after the last store a barrier makes them wait for each other, and a count, which
    acquires what other blocks have stored and releases what this one has, tells who is the last.
    """
    flow = Flow.of(ptx)
    lines = flow.lines
    if not any(map(_FLAG.search, lines)):
        return (NO_FLAG, *_weak(lines))
    steps = [
        (_STORE, "before anything is stored"),
        (_FULL_BARRIER, "without a barrier after the stores"),
        (_COUNT, "without a count with acq_rel.sys after the barrier"),
    ]
    missing = _missing(flow, steps, _STORE, _FLAG)
    return (*(f"a flag is raised {words}" for words in missing), *_weak(lines))


def _weak(lines: Sequence[str]) -> Iterator[str]:
    """Accesses that order too little, or for too few."""
    if any(map(_UNORDERED.search, lines)):
        yield "an access for the whole system is relaxed"
    if any(map(_NOT_FOR_ALL.search, lines)):
        yield "an access that orders others does so for this GPU alone"


def _missing(flow: Flow, steps: _Order, undoes: re.Pattern[str], needs: re.Pattern[str]) -> list[str]:
    """What is missing where `needs` is reached without all steps, since the start or what undoes them."""
    missing, seen, todo = set[int](), set[tuple[int, int]](), [(0, 0)]
    while todo:
        at, done = todo.pop()
        if (at, done) in seen:
            continue
        seen.add((at, done))
        line = flow.lines[at]
        if done < len(steps) and needs.search(line):
            missing.add(done)
        if undoes.search(line):
            done = 0
        if steps[0][0].search(line):  # also again: what comes after it must come again
            done = 1
        elif done < len(steps) and steps[done][0].search(line):
            done += 1
        todo += ((place, done) for place in flow.following[at])
    return [steps[number][1] for number in sorted(missing)]


Threads = NDArray[np.int64]  # a value for each

_WRITTEN_REGISTER = re.compile(r"^([a-z]\S*)\s+(%[a-z]+\d+),\s*(.*);$")  # always, and one register
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
            if found := _WRITTEN_REGISTER.match(line):
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
