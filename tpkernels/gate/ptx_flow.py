"""What PTX proves of the order in which a kernel reads rows, stores rows and raises flags. Pure text.

A kernel is followed from its start along all branches, for blocks do not lie in the order in which they run.
On the way steps are counted that must come one after the other: what needs all of them must not be reached
with fewer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);")  # not those of a spin that is one instruction to us
_FOR_ALL = re.compile(r"bra(?:\.uni)?\s+\$L__BB|ret;")  # without a predicate: the next line does not follow

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
_PRODUCT = re.compile(r"\bwgmma\.mma_async|\btcgen05\.mma\b|\bmma\.sync\b")
_LOADS = (
    _TENSOR_LOAD,
    re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b"),
    re.compile(r"\bld\.global\.\S*v[24]\b"),
)
_Order = Sequence[tuple[re.Pattern[str], str]]  # with what is missing where one is


def unordered_reads(ptx: str) -> tuple[str, ...]:
    """Why a kernel that waits may read rows before their flag; nothing if it cannot.

    From the start, and after each tile that was stored, it must look at a flag, tell all its threads by a
    barrier, and fence what reads by a proxy of its own: the copy engine. In a kernel that multiplies, rows
    are what is loaded to be multiplied before anything is stored: epilogues also load what was there before.
    """
    lines = _lines(ptx)
    loads = next((pattern for pattern in _LOADS if any(map(pattern.search, lines))), None)
    if loads is None:
        return ("no load of rows that is known",)
    steps = [
        (_LOOK, "without a look at its flag with acquire.sys"),
        (_FULL_BARRIER, "without a barrier after the look"),
        (_PROXY_FENCE, "without a proxy fence after the barrier"),
    ]
    rows = {at for at, line in enumerate(lines) if loads.search(line)}
    if any(map(_PRODUCT.search, lines)):
        rows = {at for at in rows if _is_multiplied(lines, at)}
    missing = _missing(lines, steps if loads is _TENSOR_LOAD else steps[:2], _STORE, rows)
    return (*(f"a row is loaded {words}" for words in missing), *_weak(lines))


def unordered_flags(ptx: str) -> tuple[str, ...]:
    """Why a flag may be seen before the rows that it tells of; nothing if it cannot.

    All threads store: after the last store a barrier makes them wait for each other, and a count, which
    acquires what other blocks have stored and releases what this one has, tells who is the last.
    """
    lines = _lines(ptx)
    if not any(map(_FLAG.search, lines)):
        return (NO_FLAG, *_weak(lines))
    steps = [
        (_STORE, "before anything is stored"),
        (_FULL_BARRIER, "without a barrier after the stores"),
        (_COUNT, "without a count with acq_rel.sys after the barrier"),
    ]
    flags = {at for at, line in enumerate(lines) if _FLAG.search(line)}
    missing = _missing(lines, steps, _STORE, flags)
    return (*(f"a flag is raised {words}" for words in missing), *_weak(lines))


def _weak(lines: Sequence[str]) -> Iterator[str]:
    """Accesses that order too little, or for too few."""
    if any(map(_UNORDERED.search, lines)):
        yield "an access for the whole system is relaxed"
    if any(map(_NOT_FOR_ALL.search, lines)):
        yield "an access that orders others does so for this GPU alone"


def _lines(ptx: str) -> Sequence[str]:
    """Labels and instructions, without comments."""
    return [line for text in ptx.splitlines() if (line := text.split("//")[0].strip())]


def _is_multiplied(lines: Sequence[str], load: int) -> bool:
    """Whether a product may follow a load, before anything is stored."""
    labels, seen, todo = _labels(lines), set[int](), [load]
    while todo:
        at = todo.pop()
        if _PRODUCT.search(lines[at]):
            return True
        if at not in seen and not _STORE.search(lines[at]):
            seen.add(at)
            todo += _following(lines, at, labels)
    return False


def _labels(lines: Sequence[str]) -> dict[str, int]:
    return {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}


def _missing(
    lines: Sequence[str], steps: _Order, undoes: re.Pattern[str], needs: Collection[int]
) -> list[str]:
    """What is missing where `needs` is reached without all steps, since the start or what undoes them."""
    labels = _labels(lines)
    missing, seen, todo = set[int](), set[tuple[int, int]](), [(0, 0)]
    while todo:
        at, done = todo.pop()
        if (at, done) in seen:
            continue
        seen.add((at, done))
        line = lines[at]
        if done < len(steps) and at in needs:
            missing.add(done)
        if undoes.search(line):
            done = 0
        if steps[0][0].search(line):  # also again: what comes after it must come again
            done = 1
        elif done < len(steps) and steps[done][0].search(line):
            done += 1
        todo += ((place, done) for place in _following(lines, at, labels))
    return [steps[number][1] for number in sorted(missing)]


def _following(lines: Sequence[str], at: int, labels: Mapping[str, int]) -> Iterator[int]:
    """The lines that may run after one."""
    if branch := _BRANCH.search(lines[at]):
        yield labels[branch[1]]
    if not _FOR_ALL.match(lines[at]) and at + 1 < len(lines):
        yield at + 1
