"""Calls that nobody in good faith makes, of everything that the C++ extension registers.

Each call is written down before it is made, so that a crash can be told from its last line.
"""

from __future__ import annotations

import copy
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.extension import ExtensionState, extension

# none that a machine might have so much memory for
INTS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 2**50, 2**62, 2**63 - 1, 2**63, None, 0.5, "1", True]
DTYPES = [torch.int32, torch.complex64, torch.float8_e4m3fn, torch.quint8, 99, -1, -128, 1 << 40, "x"]
FLAGS = [True, False, None, 2, "yes"]
ODD = {
    "names": [[], ["a"], ["a"] * 4, None, [1, 2, 3], "abc"],
    "marked": [[], [True], [True] * 3, [False] * 9, None, [None] * 3, True],
    "rank": INTS,
    "timeout_ms": INTS,
    "sms": INTS,
    "most_sms": INTS,
    "prefers_lt": FLAGS,
}
GOOD = {
    "parameters": None,  # made anew each time
    "names": ["a", "b", "c"],
    "marked": [False, False, False],
    "group": "",
    "tensor_parallel_group": "",
    "rank": 0,
    "reduce_scatter": False,
    "average": True,
    "main_grad": False,
    "check_nan": False,
    "grad_dtype": None,
    "wire_dtype": None,
    "timeout_ms": -1,
    "sms": 0,
    "most_sms": 0,
    "prefers_lt": False,
}
SIZES = [(4, 3), (5,), ()]
ACCIDENTS = ("INTERNAL ASSERT", "vector::", "bad optional", "bad_alloc", "SymInt")
LAYOUT = ([0, 0, 1], [0, 16, 0])  # of three parameters of SIZES


class Subclass(Tensor):
    """A tensor of another type."""


class Calling(TorchDispatchMode):
    """Calls something else in the midst of every operator: of an engine's own, too."""

    def __init__(self, intrude: Callable[[], object]) -> None:
        super().__init__()
        self._intrude = intrude

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._intrude()
        return func(*args, **(kwargs or {}))


def _shown(value: Any) -> str:
    """Like `repr`, but it calls no operators."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"<{kind} {value.layout} {value.device} {'leaf' if value.is_leaf else 'computed'}>"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)


def parameters() -> list[Tensor]:
    return [nn.Parameter(torch.ones(size)) for size in SIZES]


def odd_tensors() -> list[Any]:
    """What may stand where a parameter is expected."""
    ones = torch.ones(4, 3)
    return [
        None,
        7,
        ones,
        torch.ones(4, 3, requires_grad=True) * 2,
        torch.ones(4, 3, dtype=torch.int64),
        torch.ones(4, 3, dtype=torch.complex64, requires_grad=True),
        torch.ones(4, 3).to(torch.float8_e4m3fn).requires_grad_(),
        torch.ones(4, 3, dtype=torch.float64, requires_grad=True),
        ones.to_sparse().requires_grad_(),
        ones.to_sparse_csr().requires_grad_(),
        nn.Parameter(ones.to("meta")),
        nn.Parameter(torch.ones(1).expand(4, 3)),
        nn.Parameter(torch.ones(3, 4).t()),
        nn.Parameter(torch.ones(0, 3)),
        torch.quantize_per_tensor(ones, 1.0, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).requires_grad_(),
        nn.Parameter(ones.as_subclass(Subclass)),
    ]


@dataclass
class Outcome:
    """What became of calls that came back."""

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # refused by an accident, not by a check


class Caller:
    """Makes calls, each written down first; an exception of Python's ends a call well."""

    def __init__(self, log: str, seed: int, outcome: Outcome) -> None:
        self._file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._outcome = outcome
        self.generator = random.Random(seed)
        self.seed = seed

    def __call__(self, what: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        line = f"seed {self.seed}: {what}({_shown(args)}, {options})"[:500]
        os.write(self._file, (line + "\n").encode())  # nothing is buffered, so nothing is lost
        try:
            result = function(*args, **options)
        except Exception as error:
            self._outcome.refused[what] += 1
            if any(sign in str(error) for sign in ACCIDENTS):
                self._outcome.problems.append(f"{line}: {error}")
            return None
        self._outcome.accepted[what] += 1
        return result

    def close(self) -> None:
        os.close(self._file)

    def choose(self, values: Any) -> Any:
        return self.generator.choice(values)

    def spoilt(self, values: list[Any]) -> Any:
        """A list with one element of another kind, or of another length, or no list at all."""
        values = list(values)
        way = self.generator.randrange(5)
        if way == 0:
            return values[:-1]
        if way == 1:
            return [*values, self.choose(INTS)]
        if way == 2:
            return self.choose([None, [], 3, "abc", [[]], torch.ones(3), values * 2])
        values[self.generator.randrange(len(values))] = self.choose(INTS)
        return values


def destroyed_group() -> str:
    group = dist.new_group([0])
    name = group.group_name
    dist.destroy_process_group(group)
    return name


def arguments(caller: Caller, world: str) -> list[Any]:
    """Of the constructor: all good, or one of them not."""
    good = {**GOOD, "parameters": parameters(), "group": world}
    flags = ("reduce_scatter", "average", "main_grad", "check_nan")
    good |= {flag: caller.choose([True, False]) for flag in flags}
    if caller.generator.random() < 0.3:
        good |= {"tensor_parallel_group": world, "marked": [True, True, caller.choose([True, False])]}
    if caller.generator.random() < 0.3:
        good |= {"grad_dtype": caller.choose([torch.float64, torch.bfloat16])}
    if caller.generator.random() < 0.5:
        spoilt = caller.choose(list(good))
        if spoilt == "parameters":
            good[spoilt] = odd_parameters(caller)
        elif "group" in spoilt:
            good[spoilt] = caller.choose(["", "no such group", None, 3, destroyed_group()])
        else:
            good[spoilt] = caller.choose(ODD.get(spoilt, DTYPES if "dtype" in spoilt else FLAGS))
    return list(good.values())


def odd_parameters(caller: Caller) -> Any:
    good = parameters()
    way = caller.generator.randrange(4)
    if way == 0:
        return caller.choose([[], good[:1], [*good, *good], [good[0]] * 3, None, good[0], 3])
    good[caller.generator.randrange(3)] = caller.choose(odd_tensors())
    return good


def loss_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.sum().float() for tensor in tensors if isinstance(tensor, Tensor)]).sum()


def hostile_grad(caller: Caller, tensors: list[Tensor]) -> None:
    tensor = caller.choose(tensors)
    ones, turns = torch.ones_like(tensor), tensor.grad is not None and tensor.dim() == 2
    odd = [None, ones, ones.clone().requires_grad_(), tensor, tensor.grad.t() if turns else None]
    tensor.grad = caller.choose([*odd, ones.to_sparse() if tensor.dim() else None])


def replace_data(caller: Caller, tensors: list[Tensor]) -> None:
    tensor = caller.choose(tensors)
    alike = torch.ones(tensor.shape, dtype=torch.float64), torch.ones(tensor.shape, device="meta")
    tensor.data = caller.choose([torch.ones(7, 7), torch.ones(1), torch.ones(0), *alike])


def steps(caller: Caller, engine: Any, tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """What may be called next, in any order."""

    def arrange() -> object:
        layout = [*LAYOUT, buckets()]
        if caller.generator.random() < 0.4:
            part = caller.generator.randrange(3)
            layout[part] = caller.spoilt(layout[part]) if part < 2 else caller.choose(odd_buckets())
        return caller("arrange", engine.arrange, *layout)

    def meet() -> object:
        tensor_parallel, memory = caller.choose([False, False, True]), memory_of(engine)
        if caller.generator.random() < 0.5:
            part = caller.generator.randrange(len(memory))
            memory[part] = caller.choose(odd_memory(memory[part]))
        return caller("meet", engine.meet, tensor_parallel, *memory)

    def expect() -> object:
        counts = [1, 1, 1]
        if caller.generator.random() < 0.5:
            counts = caller.spoilt(counts)
        return caller("expect", engine.expect, counts)

    def backward() -> object:
        chosen = caller.choose([tensors, tensors[:1], tensors[1:], tensors * 2])
        return caller("backward", lambda: loss_of(chosen).backward())

    def intruded() -> object:
        def intrude() -> None:
            method = caller.choose(["finish", "zero", "views", "arrivals", "buckets", "is_midway"])
            caller("intruding", getattr(engine, method))

        def run() -> None:
            with Calling(intrude):
                caller.choose([loss_of(tensors).backward, engine.finish, engine.zero])()

        return caller("intruded", run)

    plain = {
        *("interrupt", "launch_rest", "awaited", "lose_others", "zero", "finish"),
        *("buckets", "views", "arrivals", "last_arrivals", "detach"),
    }
    choose = caller.choose
    return {
        **{name: partial(caller, name, getattr(engine, name)) for name in sorted(plain)},
        "arrange": arrange,
        "meet": meet,
        "expect": expect,
        "backward": backward,
        "intruded": intruded,
        "settle": lambda: caller("settle", engine.settle, choose([0, 0.01, -1, 1e9, float("nan"), "x"])),
        "set_synchronizing": lambda: caller("set_synchronizing", engine.set_synchronizing, choose(FLAGS)),
        "launched": lambda: caller("launched_in_backward", engine.launched_in_backward, *choose([(), (1,)])),
        "grad": lambda: caller("grad", hostile_grad, caller, tensors),
        "data": lambda: caller("data", replace_data, caller, tensors),
        "copy": lambda: caller("copy", choose([copy.copy, copy.deepcopy]), engine),
        "init": lambda: caller("init", engine.__init__, *arguments(caller, dist.group.WORLD.group_name)),
    }


def weighted(possible: Iterable[str]) -> list[str]:
    """Fewer of those after which little else happens."""
    rare = ("detach", "data", "grad", "copy", "init", "lose_others")
    return [name for name in possible for _ in range(1 if name in rare else 8)]


def engine_program(caller: Caller) -> None:
    """An engine of its own, made and used in random ways."""
    args = arguments(caller, dist.group.WORLD.group_name)
    engine = caller("BucketEngine", torch.classes.tpkernels.BucketEngine, *args)
    given = args[0] if isinstance(args[0], list) else []
    tensors = [tensor for tensor in given if isinstance(tensor, Tensor)]
    if engine is None or not tensors:
        caller("backward without an engine", lambda: loss_of(tensors).backward())
        return
    if caller.generator.random() < 0.7:
        caller("arrange", engine.arrange, *LAYOUT, buckets())
        caller("expect", engine.expect, [1, 1, 1])
    possible = steps(caller, engine, tensors)
    for _ in range(12):
        possible[caller.choose(weighted(possible))]()
    if caller.generator.random() < 0.5:
        loss = loss_of(tensors)
        del engine, possible
        caller("backward after the engine", loss.backward)


# They write `.grad`, on which autograd itself has no lock: the caller sees to their order.
WRITE_GRADIENTS = {"arrange", "backward", "finish", "grad", "zero"}


def threads_program(caller: Caller) -> None:
    """One engine, used from three threads at once."""
    tensors = parameters()
    good = {**GOOD, "parameters": tensors, "group": dist.group.WORLD.group_name}
    engine = caller("BucketEngine", torch.classes.tpkernels.BucketEngine, *good.values())
    caller("arrange", engine.arrange, *LAYOUT)
    possible = steps(caller, engine, tensors)
    del possible["data"], possible["intruded"]
    programs = [[caller.choose(weighted(possible)) for _ in range(15)] for _ in range(3)]
    gradients = threading.Lock()

    def run(names: list[str]) -> None:
        for name in names:
            with gradients if name in WRITE_GRADIENTS else nullcontext():
                possible[name]()

    threads = [threading.Thread(target=run, args=(names,)) for names in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class NoGroup(dist.ProcessGroup):
    """One that Python made, without a backend."""


def end_program(caller: Caller) -> None:
    alive, destroyed = dist.new_group([0]), dist.new_group([0])
    dist.destroy_process_group(destroyed)
    group = destroyed.boxed()
    engine_class = torch.classes.tpkernels.BucketEngine
    strange = [alive.boxed(), None, 3, engine_class, NoGroup(0, 1), NoGroup(0, 1).boxed(), dist.group.WORLD]
    seconds = [0.0, -1.0, 5.0, float("nan"), float("inf"), -float("inf"), 1e300, 1, None, "1"]
    for _ in range(6):
        value, other = caller.choose(seconds), caller.choose([*[group] * 3, *strange])
        caller("end_backends", torch.ops.tpkernels.end_backends, other, value)


def reserve_program(caller: Caller) -> None:
    for _ in range(6):
        sms, most = (caller.choose([*INTS, 16]) for _ in range(2))
        caller("reserve_sms", torch.ops.tpkernels.reserve_sms, sms, most, caller.choose(FLAGS))
        caller("pause_reserved_sms", torch.ops.tpkernels.pause_reserved_sms, caller.choose(FLAGS))
        caller("sm_reservations_begun", torch.ops.tpkernels.sm_reservations_begun)


def handover_program(caller: Caller) -> None:
    made, own = torch.classes.tpkernels.Handover, os.getpid()
    sockets = ["", "/nowhere/it", "x" * 107, "x" * 108, None, 3, "\0" * 9]
    processes = [[], [own], [own, own], [0], [-1], [2**40], [own] * 4097, None, own, [None], ["1"], (own,)]
    seconds = [0.0, 0.001, 1e300, float("inf"), float("nan"), -1.0, 1, None, "1"]
    for _ in range(6):
        choices = [caller.choose(each) for each in (sockets, processes, seconds)]
        handover = caller("Handover", made, *choices)
        if handover is not None:
            ends = [threading.Thread(target=handover.end) for _ in range(2)]
            for thread in ends:
                thread.start()
            caller("end", handover.end, *caller.choose([[], [], [3]]))
            for thread in ends:
                thread.join()


PROGRAMS = {
    "engine": engine_program,
    "threads": threads_program,
    "end": end_program,
    "reserve": reserve_program,
    "handover": handover_program,
}


def run_programs(kind: str, seeds: Sequence[int], log: str) -> Outcome:
    """On a rank: a program for each seed. log: a file for the calls, of which a crash leaves the last"""
    assert extension().state is ExtensionState.LOADED
    outcome = Outcome()
    for seed in seeds:
        caller = Caller(log, seed, outcome)
        PROGRAMS[kind](caller)
        caller.close()
    return outcome


ELEMENTS = (32, 16)  # of the buckets of hostile.LAYOUT


def buckets() -> list[Tensor]:
    return [torch.zeros(elements) for elements in ELEMENTS]


def odd_buckets() -> list[Any]:
    """What may stand where flat tensors of ELEMENTS are expected."""
    both = torch.zeros(48)
    return [
        None,
        [],
        buckets()[:1],
        [*buckets(), torch.zeros(1)],
        buckets()[::-1],
        [torch.zeros(4, 8), torch.zeros(16)],
        [torch.zeros(64)[::2], torch.zeros(16)],
        [torch.zeros(32, requires_grad=True), torch.zeros(16)],
        [torch.zeros(32, dtype=torch.float64), torch.zeros(16)],
        [torch.zeros(32, device="meta"), torch.zeros(16)],
        [torch.zeros(32).to_sparse(), torch.zeros(16)],
        [both[:32], both[24:40]],
        [both[:32], both[32:]],
    ]


def memory_of(engine: Any) -> list[Any]:
    """What `meet` is given by a rank that is alone."""
    flats = engine.buckets()
    words = torch.zeros(2 * len(flats), dtype=torch.int64)
    return [[0], [torch.zeros(2, dtype=torch.int64)], [words], flats, "", [], 1000]


def odd_memory(good: Any) -> list[Any]:
    """What may stand where words, buckets or a time-out are expected."""
    if isinstance(good, int):
        return [0, -1, 2**62, None, "x"]
    if isinstance(good, str):
        return ["no such group", None, 3]
    odd = [torch.zeros(3), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 2), torch.zeros(4).to_sparse()]
    return [None, [], [0], [1], [-1, 0], good * 2, good[:-1], *([tensor] * len(good) for tensor in odd)]
