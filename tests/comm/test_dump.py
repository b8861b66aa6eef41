"""Dumps of ranks that wait: by a signal, by a failure, by a call; and nothing unless somebody asks for it."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.checks import error_of
from tests.loopback import open_loopback, start
from tests.on_ranks import of_all, on_ranks
from tests.programs import forked, until
from tests.ranks import RankPool
from tpkernels.comm import calls, dump
from tpkernels.comm.calls import calls_of
from tpkernels.comm.transports import select
from tpkernels.comm.transports.memory import Layout
from tpkernels.ops import column_linear, row_linear

X, WEIGHT = torch.ones(2048, 64), torch.ones(64, 64)
DUMP = "tpkernels: dump (SIGUSR2)\n"


@pytest.fixture(scope="module")
def dumping() -> Iterator[RankPool]:
    """Ranks of their own: they keep the handler."""
    with RankPool(2) as pool:
        yield pool


@contextmanager
def asked_for(told: Path, transport: str = "auto") -> Iterator[None]:
    """Dumps are asked for, and written into a file."""
    environment = patch.dict(os.environ, TPKERNELS_DUMP="1")
    before = os.dup(2)
    with environment, patch.object(select, "requested_transport", transport), told.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def acts_at_a_distance() -> list[object]:
    """What a process has that asked for dumps."""
    return [
        dump._is_caught(signal.SIGUSR2),
        any(thread.name == "tpkernels dump" for thread in threading.enumerate()),
        len(calls.on_failure),
    ]


def hang(transport: str, folder: Path) -> tuple[str, str]:
    """What rank 0 writes at the signal in a call to which rank 1 has not come; and what rank 1 sees then."""
    with asked_for(folder / str(dist.get_rank()), transport):
        group, waiting, text = dist.new_group(), of_all(os.getpid())[0], ""
        for _ in range(2):
            column_linear(X, WEIGHT, None, group, sequence_parallel=True)
            row_linear(X, WEIGHT, None, group, sequence_parallel=True)
        if dist.get_rank() == 1:
            number = calls_of(group).latest[-1][0] + 1

            def is_told() -> bool:
                os.kill(waiting, signal.SIGUSR2)
                time.sleep(0.3)
                return f"call {number} " in (folder / "0").read_text()

            until(is_told)
            text = tpkernels.dump_calls()
        column_linear(X, WEIGHT, None, group, sequence_parallel=True)
        dist.barrier()
        assert acts_at_a_distance() == [True, True, 1]
        return (folder / "0").read_text().rpartition(DUMP)[2], text


WAITING = {  # what rank 0 writes, and what rank 1 sees meanwhile; {} is a word
    "c10d": [
        "  call 6 column_linear: gather of x (2048, 64) torch.float32, in flight\n"
        "    rank 1 has not begun it\n"
        "    4 of 4 chunks are awaited, the next is of rank 1\n",
        "  rank 0 has begun call 6 column_linear: gather of x (2048, 64) torch.float32",
    ],
    "shared": [
        "  rank 1 has begun call 8 row_linear: shards of the sum (2048, 64) torch.float32\n"
        "  the gathers of process group '1', pieces of (2048, 64) float32 in 4 parts: 3 calls begun, 1 of "
        "them in flight; the last is call 9 of the group\n"
        "    slot 0 awaits epoch 2 ({}): all rows are there\n"
        "    slot 1 awaits epoch 3 ({}): rank 1 has sent 0 of 4 chunks, the next one's flag has epoch 1 "
        "({})\n"
        "    rank 1 has read call 2 of these\n",
        "  rank 0 has begun call 9 column_linear: gather of x (2048, 64) torch.float32\n",
    ],
}


@pytest.mark.parametrize("transport", WAITING)
def test_a_rank_that_waits_writes_for_whom(transport, dumping, tmp_path):
    (written, _), (_, seen) = dumping.run(hang, transport, tmp_path)
    for wanted, text in zip(WAITING[transport], (written, seen), strict=True):
        assert re.search(re.escape(wanted).replace(r"\{\}", r"0x\w+"), text), text
    stacks = written.split(" (most recent call first):\n")[1:]
    assert any("in column_linear" in stack for stack in stacks), "the main thread's is one"


def fail(folder: Path) -> str:
    """Rank 1 raises in an op for which rank 0 waits, twice: what rank 0 writes."""
    with asked_for(folder / str(dist.get_rank()), "c10d"):
        for group in dist.new_group(), dist.new_group():
            x = X.to(torch.float64 if dist.get_rank() else torch.float32)
            error_of(column_linear, x, WEIGHT.to(x.dtype), None, group, sequence_parallel=True)
        return (folder / str(dist.get_rank())).read_text()


def test_the_first_failure_of_a_process_is_written_once(dumping, tmp_path):
    for text in dumping.run(fail, tmp_path):
        said = re.findall(r"^tpkernels: dump \((.*)\)$", text, re.MULTILINE)
        assert len(said) == 1
        assert said[0].startswith(
            "a call has failed: RuntimeError: ranks have left the common order of calls"
        )
        assert re.search(r"call 2 column_linear: gather of x .*, in flight\n", text)


@on_ranks(2)
def test_without_the_variable_nothing_is_installed():
    before = acts_at_a_distance()
    column_linear(X, WEIGHT, None, dist.new_group(), sequence_parallel=True)
    assert acts_at_a_distance() == before == [False, False, 0]


def installed(told: Path, before: str) -> tuple[int, str]:
    """In a process of its own: how often a handler that was there ran, and what two signals at once write."""
    ran = []
    with asked_for(told):
        if before == "of Python":
            signal.signal(signal.SIGUSR2, lambda *_: ran.append(1))
        elif before == "in C":
            faulthandler.register(signal.SIGUSR2, 2, all_threads=False)
        dump.install_if_asked()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
        until(lambda: "(most recent call first)" in told.read_text())
        time.sleep(3 * dump._SETTLED)
        return len(ran), told.read_text()


@pytest.mark.parametrize(("before", "ran", "dumps"), [("none", 0, 1), ("of Python", 2, 1), ("in C", 0, 0)])
def test_a_handler_of_the_user_is_kept(before, ran, dumps, tmp_path):
    found = forked(lambda: installed(tmp_path / "told", before))
    assert (found[0], found[1].count(DUMP)) == (ran, dumps)


def test_a_fork_of_a_rank_writes_nothing(tmp_path):
    def parent() -> list[int]:
        with asked_for(tmp_path / "told"):
            dump.install_if_asked()
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGUSR2)
                os._exit(7)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            time.sleep(3 * dump._SETTLED)
            return [status, (tmp_path / "told").read_text().count(DUMP)]

    assert forked(parent) == [7, 0]


def test_a_signal_does_not_wait_for_who_reads(tmp_path):
    """Whoever has Python's lock would wait for the thread that waits for the lock."""

    def busy() -> int:
        with asked_for(tmp_path / "told"), patch.object(dump._Dumps, "_serve", lambda *_: None):
            dump.install_if_asked()
            for _ in range(3000):
                os.kill(os.getpid(), signal.SIGUSR2)
            return 3000

    assert forked(busy) == 3000


class Memory:
    """Stands for memory on a GPU."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def words(self) -> object:
        if isinstance(self.answer, threading.Event):
            self.answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def state(self, words: object) -> list[str]:
        return [f"words: {words}"]


def test_a_gpu_that_hangs_holds_up_no_dump(monkeypatch):
    hung, error = threading.Event(), RuntimeError("an illegal memory access")
    memory = [Memory([[1, 1]]), Memory(error), Memory(hung), Memory(hung)]
    own = SimpleNamespace(
        latest=[(1, "op: rows")], in_flight={}, posted=[], peers=[], pages={}, memory=memory, name="tp",
        rank=0, ranks=1, failure="", group_is_alive=lambda: True,
    )  # fmt: skip
    monkeypatch.setattr(dump, "CALLS_OF", {0: own})
    monkeypatch.setattr(dump, "LONGEST_READ", 0.2)
    began = time.monotonic()
    text = tpkernels.dump_calls()
    assert time.monotonic() - began < 5
    hung.set()
    late = ["  words: None", "  flags are not readable: the device has not answered for 0.2 s"]
    assert text.splitlines()[2:] == [
        "  call 1 op: rows",
        "  words: [[1, 1]]",
        "  words: None",
        "  flags are not readable: an illegal memory access",
        *late,
        *late,
    ]


def test_chunks_that_have_not_come_are_counted_by_rank():
    ends = open_loopback("it", Layout(3, (4, 3), torch.float32, 2))
    own = start(ends[0], [torch.zeros(4, 3)] * 3)
    own.exchange.landing(own.slot, 0).flags[:1].fill_(own.flag)
    ends[1].landing(own.slot, 0).flags[:1].fill_(own.flag)
    state = ends[0].state(ends[0].words())
    for end in ends:
        end.close()
    assert [state[1], *state[-2:]] == [
        "  slot 1 awaits epoch 1 (0x00100000): rank 1 has sent 1 of 2 chunks, the next one's flag has epoch "
        "0 (0x00000000); rank 2 has sent 0 of 2 chunks, the next one's flag has epoch 0 (0x00000000)",
        "  rank 2 has read call 0 of these",
        "  rank 1 has read call 0 of these",
    ]
