"""What PTX proves of the order between the warps of a role, and between them and the copy engine. Pure text.

One thread of a role tells other roles that a buffer is free, and starts copies: what it says must hold for
all threads of the role. So the warps of a role wait for each other

- after they have read a buffer and awaited the products that did, before it is released (`mbarrier.arrive`),
  and after each has fenced what it loaded, for the copy engine fills the buffer again;
- after each has staged its results and fenced them (`fence.proxy.async`), before they are copied out;
- after a copy has read what was staged, before anything else is staged there.

Sums that the copy engine adds to what is there (`cp.reduce`) are added once.

Products are awaited before their results are staged, and copies before a role ends. Barriers in shared memory
are made, and fenced for the copy engine, before the roles begin. A barrier is made once, unless it was ended
(`mbarrier.inval`), and nothing else lies in its 8 bytes meanwhile.

A barrier at which roles that multiply release a buffer counts all of them, unless they wait for each other
in between: then each has the buffer in its turn.

Two blocks may be a pair, which shares copies. What is copied into both waits for a barrier at which both
arrive, and whoever reads it arrives there. Both wait for each other when barriers are made, and at the end.

On Blackwell a pair multiplies together. Tensor cores tell both blocks of all products (`tcgen05.commit`).
All warps have read tensor memory before one says so. It is freed once both blocks have met, on every way
to the end.
"""

from __future__ import annotations

import re

import numpy as np

from tpkernels.gate.ptx_flow import (
    BARRIER_OF_ALL,
    COMMIT,
    PRODUCT,
    PRODUCTS_COMMITTED,
    SHARED_STORE,
    STORE_WAIT,
    TENSOR_STORE,
    WAIT,
    WARP,
    Addresses,
    Flow,
    FlowState,
    Role,
)

NOT_READ = "a buffer is released before all warps of the role have read it"
LOADED = "a buffer is released to the copy engine without a fence after it was read"
IN_FLIGHT = "a buffer is released while more than the last product may be in flight"
NOT_DONE = "results are staged before their products are awaited"
NOT_FENCED = "results are copied out without a fence after they were staged"
NOT_STAGED = "results are copied out before all warps have staged theirs"
BY_ALL = "results are copied out by more than one thread"
STILL_READ = "results are staged where a copy may still read others"
ADDED_TWICE = "the same sums are added twice"
ADDED_AND_STORED = "some results are added to what is there, and others stored over it"
LEFT = "a role ends while a copy may still read what it staged"
NOT_MADE = "a barrier in shared memory is used before all, and the copy engine, know that it is made"
MADE_LATE = "a barrier in shared memory is made when roles have begun"
MADE_AGAIN = "a barrier in shared memory is made where one is already"
OVERLAID = "a barrier in shared memory lies where something else is kept"
NOT_COUNTED = "a buffer is released by more roles, or by fewer, than its barrier counts"
MADE_ALONE = "a barrier of a pair is used before the other block knows that it is made"
ENDS_ALONE = "a block of a pair ends while the other may still use its shared memory"
NOT_SHARED = "no copy goes to both blocks of a pair"
ONE_HEARD = "a copy goes to both blocks of a pair when one of them has released the buffer"
NOT_TOLD = "what both blocks of a pair read is not released to both"
UNTOLD = "products of tensor cores begin, and no barrier is told when they are complete"
MULTIPLIES_ALONE = "a block of a pair multiplies, or has tensor memory, for itself"
NOT_FREED = "a block ends and has not freed its tensor memory"
FREED_EARLY = "tensor memory is freed when the other block of a pair may still write it"
MISCOUNTED = "a block tells the other of something at a barrier that does not count both"

_RELEASE = re.compile(r"^@\S+\s+mbarrier\.arrive\.(?!expect_tx)")  # by one thread for its role
_RELEASED = re.compile(r"\bmbarrier\.arrive\.(?!expect_tx)\S*\s+_, \[(\S+)\]")  # where
_SHARED_LOAD = re.compile(r"\b(?:ld\.shared|ldmatrix)\b")
_PRODUCTS_AWAITED = re.compile(r"\bwgmma\.wait_group\S*\s+(\d+);")
_FENCE = re.compile(r"\bfence\.(?:proxy\.async(?:\.shared::cta)?|mbarrier_init\S*);")
_MADE = re.compile(r"\bmbarrier\.init\b\S*\s+\[(\S+?)\](?:,\s*(\d+))?")
_ENDED = re.compile(r"\bmbarrier\.inval\b\S*\s+\[(\S+?)\]")
_ADDED = re.compile(r"\bcp\.reduce\.async\.bulk\.tensor\b")
_BARRIER_BYTES = 8
_BLOCKS = re.compile(r"^\.reqnctapercluster\s+(\d+)")
_TO_ALL = re.compile(r"\bcp\.async\.bulk\.tensor\S*\.multicast::cluster\S*\s")
_EXPECTED = re.compile(r"\bmbarrier\.arrive\.expect_tx\b")
_TOLD = re.compile(r"\bmbarrier\.arrive\.shared::cluster\S*\s+_, \[(\S+)\]")
_INIT_FENCE = re.compile(r"\bfence\.mbarrier_init\.release\.cluster\b")
_TENSOR_PRODUCT = re.compile(r"\btcgen05\.mma\b")
_TENSOR_COMMIT = re.compile(r"\btcgen05\.commit\b")
_TENSOR_LOAD = re.compile(r"\btcgen05\.ld\b")
_TENSOR_LOADED = re.compile(r"\btcgen05\.wait::ld\b")
_TENSOR_MEMORY = re.compile(r"\btcgen05\.alloc\b")
_TENSOR_FREED = re.compile(r"\btcgen05\.dealloc\b")
_OF_BLOCKS = re.compile(r"\btcgen05\.(?:mma|commit|alloc|dealloc|relinquish_alloc_permit)\b")
_RETURN = re.compile(r"^(?:@\S+\s+)?ret;")
_BLOCKS_MET = re.compile(r"^barrier\.cluster\.wait\b")  # after `arrive`


def unordered_roles(flow: Flow) -> tuple[str, ...]:
    """Each rule that some path through some role breaks, in words; () if the order is proven."""
    rules = (_released, _copied_out, _staged, _added, _made, _in_tensor_memory)
    found = [words for role in flow.roles for rule in rules for words in rule(role)]
    return tuple(dict.fromkeys([*found, *_barriers_alone(flow), *_counted(flow), *_in_pairs(flow)]))


def _released(role: Role) -> list[str]:
    """Read, fenced and awaited before it is released; awaited before the results are staged."""
    lines = role.flow.lines

    def step(at: int, state: FlowState) -> FlowState:
        line = lines[at]
        flying = {int(n) for what, n in state if what == "in flight"}
        if PRODUCTS_COMMITTED.search(line):
            return _with(state, {1} | {min(n + 1, 2) for n in flying})  # 2: or more
        if found := _PRODUCTS_AWAITED.search(line):
            return _with(state, {min(n, int(found[1])) for n in flying} - {0}) | {("read", 0)}
        if PRODUCT.search(line):
            return state | {("read", 0)}
        if _TENSOR_LOAD.search(line):
            return state | {("in flight", 1)}
        if _TENSOR_LOADED.search(line):
            return state - {("in flight", 1)} | {("read", 0)}
        if _SHARED_LOAD.search(line):
            return state | {("read", 0), ("loaded", 0)}
        if _FENCE.search(line) and ("loaded", 0) in state:
            return state - {("loaded", 0)} | {("fenced", 0)}
        return state - {("read", 0), ("fenced", 0)} if role.syncs_all(line) else state

    before = role.before_each(step)
    held = {mark for at in role.matching(_RELEASE) for mark in before.get(at, ())}
    not_done = any(
        ("in flight", n) in before.get(at, ()) for at in role.matching(SHARED_STORE) for n in (1, 2)
    )
    together = role.threads <= WARP  # a warp elects a thread when together
    of_tensor_memory = ("in flight", 1) in held and role.any_of(_TENSOR_LOAD)
    words = [NOT_READ] * ((("read", 0) in held and not together) or of_tensor_memory)
    fenced_late = ("fenced", 0) in held and not together and not words
    words += [LOADED] * (("loaded", 0) in held or fenced_late)
    return words + [IN_FLIGHT] * (("in flight", 2) in held) + [NOT_DONE] * not_done


def _with(state: FlowState, flying: set[int]) -> FlowState:
    """The state with these numbers of products in flight."""
    kept = {mark for mark in state if mark[0] != "in flight"}
    return frozenset(kept | {("in flight", n) for n in flying})


def _copied_out(role: Role) -> list[str]:
    lines = role.flow.lines

    def step(at: int, state: FlowState) -> FlowState:
        line = lines[at]
        if SHARED_STORE.search(line):
            return state | {("staged", 0)}
        if _FENCE.search(line):
            return frozenset({("fenced", 0)}) if state else state
        return state - {("fenced", 0)} if role.syncs_all(line) else state

    before = role.before_each(step)
    copies = role.matching(TENSOR_STORE)
    held = {what for at in copies for what, _ in before.get(at, ())}
    words = [NOT_FENCED] * ("staged" in held) + [NOT_STAGED] * ("fenced" in held)
    return words + [BY_ALL] * any(not lines[at].startswith("@") for at in copies)


def _staged(role: Role) -> list[str]:
    """A buffer is known by the address that a copy reads; where it may change, any wait counts for it."""
    lines, value = role.flow.lines, role.flow.value

    def step(at: int, state: FlowState) -> FlowState:
        line = lines[at]
        if copy := _source(line):
            return state | {("0", value(copy))}
        # "0", "1", "2": so many groups of copies were committed since, with its own. One digit is enough:
        # there are four staging buffers at most. "read" comes after all digits
        if COMMIT.search(line):
            return frozenset((str(int(how) + 1) if how < "8" else how, what) for how, what in state)
        if wait := STORE_WAIT.search(line):
            return frozenset(
                ("read" if how > wait[1] or isinstance(what, str) else how, what) for how, what in state
            )
        return frozenset(mark for mark in state if mark[0] != "read") if role.syncs_all(line) else state

    before = role.before_each(step)
    for at in role.matching(TENSOR_STORE):
        buffer = value(_source(lines[at]) or "")
        stages = _stages(role, at)  # none: they lie before the wait
        if not stages or any(what == buffer for place in stages for _, what in before.get(place, ())):
            return [STILL_READ]
    held = {how for at in role.ends for how, _ in before.get(at, ())}
    return [LEFT] * bool(held - {"read"})


def _added(role: Role) -> list[str]:
    """Sums are added once: of what is staged, and nothing is stored beside."""
    lines, value = role.flow.lines, role.flow.value
    copies = role.matching(TENSOR_STORE)
    adding = {at for at in copies if _ADDED.search(lines[at])}
    if not adding:
        return []

    def step(at: int, state: FlowState) -> FlowState:
        if at in adding:
            return state | {("added", value(_source(lines[at]) or ""))}
        return frozenset() if SHARED_STORE.search(lines[at]) else state

    before = role.before_each(step)
    again = any(("added", value(_source(lines[at]) or "")) in before.get(at, ()) for at in adding)
    return [ADDED_TWICE] * again + [ADDED_AND_STORED] * (adding != copies)


def _source(line: str) -> str | None:
    """The register with the address in shared memory that a copy reads."""
    found = TENSOR_STORE.search(line)
    return found and found[1]


def _stages(role: Role, copy: int) -> list[int]:
    """The stores that stage what is copied: those since the last wait for copies or group of them."""
    seen, todo = set[int](), list(role.preceding[copy])
    while todo:
        at = todo.pop()
        line = role.flow.lines[at]
        if at not in seen and not COMMIT.search(line) and not STORE_WAIT.search(line):
            seen.add(at)
            todo += role.preceding[at]
    return [at for at in seen if SHARED_STORE.search(role.flow.lines[at])]


def _made(role: Role) -> list[str]:
    lines, several = role.flow.lines, len(role.flow.roles) > 1

    def step(at: int, state: FlowState) -> FlowState:
        line = lines[at]
        if _MADE.search(line):
            return state | {("made", 0)}
        if _FENCE.search(line) and ("made", 0) in state:
            return state - {("made", 0)} | {("told", 0)}
        if BARRIER_OF_ALL.search(line):
            fenced = (
                {("told", 0)} if several else {("told", 0), ("made", 0)}
            )  # Triton's own loops have no fence
            return state - fenced | {("begun", 0)} if state & fenced else state
        return state

    before = role.before_each(step)
    held = {what for at in role.matching(WAIT) for what, _ in before.get(at, ())}
    unknown = bool(held & {"made", "told"})
    late = several and any(("begun", 0) in before.get(at, ()) for at in role.matching(_MADE))
    return [NOT_MADE] * unknown + [MADE_LATE] * late


def _in_tensor_memory(role: Role) -> list[str]:
    """Products are told of, and what the default role allocates it frees."""
    lines = role.flow.lines

    def step(at: int, state: FlowState) -> FlowState:
        if _TENSOR_PRODUCT.search(lines[at]):
            return state | {("begun", 0)}
        if _TENSOR_COMMIT.search(lines[at]):
            return state - {("begun", 0)}
        if _TENSOR_MEMORY.search(lines[at]):
            return state | {("kept", 0)}
        return state - {("kept", 0)} if _TENSOR_FREED.search(lines[at]) else state

    before = role.before_each(step)
    untold = any(("begun", 0) in before.get(at, ()) for at in role.ends)
    returns = () if role.is_worker else role.matching(_RETURN)
    kept = any(("kept", 0) in before.get(at, ()) for at in returns)
    return [UNTOLD] * untold + [NOT_FREED] * kept


def _barriers_alone(flow: Flow) -> list[str]:
    """Known by its address, a barrier is made once until it is ended, with its bytes to itself meanwhile."""
    addresses = Addresses(flow)

    def places(pattern: re.Pattern[str]) -> dict[int, int]:
        found = ((at, pattern.search(line)) for at, line in enumerate(flow.lines))
        return {at: int(addresses.of(match[1])[0]) for at, match in found if match}

    made, ended = places(_MADE), places(_ENDED)

    def step(at: int, state: FlowState) -> FlowState:
        if at in made:
            return state | {("made", made[at])}
        return state - {("made", ended[at])} if at in ended else state

    again = overlaid = False
    for role in flow.roles if made else ():
        # the default role makes them before the others begin
        begun = frozenset(("made", place) for place in made.values()) if role.is_worker else frozenset()
        for at, state in role.before_each(step, initial=begun).items():
            barriers = np.array([place for _, place in state], dtype=np.int64)
            if at in made:
                again |= bool((abs(barriers - made[at]) < _BARRIER_BYTES).any())
            elif (touched := addresses.touched(flow.lines[at])) is not None:
                within = touched[:, None] - barriers
                overlaid |= bool(((within >= 0) & (within < _BARRIER_BYTES)).any())
    return [MADE_AGAIN] * again + [OVERLAID] * overlaid


def _counted(flow: Flow) -> list[str]:
    """Of barriers at which roles that multiply arrive: how many of them, or that they take turns."""
    multiplying = [role for role in flow.roles if role.any_of(PRODUCT)]
    if len(multiplying) < 2:
        return []
    addresses = Addresses(flow)

    def places(role: Role, pattern: re.Pattern[str]) -> set[int]:
        found = (pattern.search(flow.lines[at]) for at in role.lines)
        return {int(addresses.of(match[1])[0]) for match in found if match}

    released = [places(role, _RELEASED) for role in multiplying]
    awaited = [places(role, WAIT) for role in multiplying]
    told = set[int]().union(*(places(role, _TOLD) for role in multiplying))
    for line in flow.lines:
        if made := _MADE.search(line):
            place = int(addresses.of(made[1])[0])
            count = int(made[2] or 1) // (_blocks_of(flow) if place in told else 1)
            who = [number for number, at in enumerate(released) if place in at]
            in_turn = all(
                any(awaited[number] & released[other] for other in who if other != number) for number in who
            )
            if who and count != len(who) and not (count == 1 and in_turn):
                return [NOT_COUNTED]
    return []


def _blocks_of(flow: Flow) -> int:
    """How many are a cluster."""
    return next((int(found[1]) for line in flow.lines if (found := _BLOCKS.match(line))), 1)


def _in_pairs(flow: Flow) -> list[str]:
    """What the blocks of a cluster owe each other; a kernel of single blocks owes nothing."""
    blocks = _blocks_of(flow)
    if blocks == 1:
        return []
    addresses = Addresses(flow)

    def place(register: str) -> int:
        return int(addresses.of(register)[0])

    made = [found for line in flow.lines if (found := _MADE.search(line))]
    telling = sum(role.any_of(_TOLD) for role in flow.roles)  # of each block
    for_all = {place(found[1]) for found in made if found[2] == str(blocks * max(1, telling))}
    told = [found for line in flow.lines if (found := _TOLD.search(line))]
    words = [MISCOUNTED] * any(place(found[1]) not in for_all for found in told)
    together = [line for line in flow.lines if _OF_BLOCKS.search(line)]
    words += [NOT_SHARED] * (not together and not any(_TO_ALL.search(line) for line in flow.lines))
    words += [MULTIPLIES_ALONE] * any(".cta_group::2" not in line for line in together)
    commits = [line for line in together if _TENSOR_COMMIT.search(line)]
    words += [NOT_TOLD] * any(".multicast::cluster" not in line for line in commits)

    def step(at: int, state: FlowState) -> FlowState:
        line = flow.lines[at]
        if _MADE.search(line):
            return state | {("made", 0)}
        if _INIT_FENCE.search(line) and ("made", 0) in state:
            return state - {("made", 0)} | {("fenced", 0)}
        if _BLOCKS_MET.match(line):
            return state - {("fenced", 0), ("apart", 0)}
        if PRODUCT.search(line):
            return state | {("read", 0), ("apart", 0)}
        if _TOLD.search(line):
            return state - {("read", 0)} | {("apart", 0)}
        if _EXPECTED.search(line):  # of a use of a buffer; what is copied follows
            return state | {("unheard", 0)}
        if (wait := WAIT.search(line)) and place(wait[1]) in for_all:
            return state - {("unheard", 0)}
        return state

    for role in flow.roles:
        before = role.before_each(step, initial=frozenset({("apart", 0), ("unheard", 0)}))

        def held(lines: frozenset[int], marks: set[str], before: dict[int, FlowState] = before) -> bool:
            return any(what in marks for at in lines for what, _ in before.get(at, ()))

        words += [ONE_HEARD] * held(role.matching(_TO_ALL), {"unheard"})
        words += [NOT_TOLD] * held(role.ends, {"read"})
        if not role.is_worker:  # whose ends are the block's; it makes the barriers before the others begin
            words += [MADE_ALONE] * held(role.matching(WAIT) | role.matching(_TOLD), {"made", "fenced"})
            words += [ENDS_ALONE] * held(role.matching(_RETURN), {"apart"})
            words += [FREED_EARLY] * held(role.matching(_TENSOR_FREED), {"apart"})
    return words
