"""PTX as a graph: what may run after each instruction, in which role of warps. Pure text.

Blocks do not lie in the order in which they run. A kernel of several roles begins with the default role. The
other warps wait in a loop, where each reads from shared memory which role it has: a table of branches
(`brx.idx`) or, since Triton 3.8, one comparison after the other sends it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
_Graph = Mapping[int, Sequence[int]] | Sequence[Sequence[int]]


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

    def _closed(self, starts: Iterable[int], follows: _Graph) -> frozenset[int]:
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
