"""What can be known of symmetric memory without a GPU: who is refused, what a call enqueues where."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from tests.loopback import CountingKernels, VirtualHandle, open_symmetric_loopback, start, write_word
from tpkernels.comm.schedule import flag_of, gather_plan, reduce_plan
from tpkernels.comm.side_stream import SideStream, StreamOrder
from tpkernels.comm.transports import rendezvous, symmetric
from tpkernels.comm.transports.memory import Landing, Layout
from tpkernels.comm.transports.symmetric import SymmetricExchange

LAYOUT = Layout(2, (4, 3), torch.float32, 2)
ROWS = [torch.zeros(4, 3)] * 2
SIGN = 2**31


def call_of(ends: Sequence[SymmetricExchange], reducing: bool = False) -> list[int]:
    """A call that all ends begin and end: the words that each awaited, whose flags were up."""
    found = []
    for delivery in [start(end, [torch.full((4, 3), 1.0 + end.rank)] * 2, reducing=reducing) for end in ends]:
        assert delivery.flags.eq(delivery.awaited).all()
        assert delivery.slots.eq(torch.tensor([1.0, 2.0])[:, None, None]).all()
        found.append(int(delivery.awaited))
        delivery.end()
    return found


def test_what_is_lacking_is_said():
    assert "exchanges memory of GPUs, got cpu; use shared or c10d" in rendezvous.why_not(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert rendezvous.why_not(torch.device("cuda", 0)) == "torch sees no GPU here"


def test_sockets_lie_in_places_whose_names_are_short(monkeypatch, tmp_path):
    """torch writes beyond the address in the one case, and waits for ever in the other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    long, gpu, other = tmp_path / ("x" * 100), torch.device("cuda", 0), tmp_path / "other"
    other.mkdir()
    places = set()
    # from the last that torch reads
    for name, folder in (("TEMP", tmp_path), ("TMP", other), ("TMPDIR", long)):
        monkeypatch.setenv(name, str(folder))
        assert rendezvous.sockets_folder() == str(folder)
        assert ("has too long a name: set TMPDIR" in rendezvous.why_not(gpu)) == (folder is long)
        places.add(rendezvous.sockets_place())
    assert len(places) == 3
    (tmp_path / "link").symlink_to(other)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    assert rendezvous.sockets_place() in places


def test_a_kernel_that_is_rehearsed_stores_nothing_at_other_ranks():
    """Even after calls, whose rows others may still read; nor does it count anything."""
    ends = open_symmetric_loopback("a rehearsal", LAYOUT)
    for _ in range(3):
        call_of(ends, reducing=True)
    first, _ = ends
    with first.rehearsing():
        plan = reduce_plan(8, 2, 0, 2, False)
        delivery = first.begin(None, plan, 3, ROWS[0])
        slots, flags, counters, awaited = delivery.departures()
        own = first.landing(delivery.slot, 0)
        assert slots.tolist() == [own.rows.data_ptr()] * 2
        assert flags.tolist() == [own.flags.data_ptr()] * 2
        assert counters.tolist() == [0] * 4
        assert counters.data_ptr() != first.departing(delivery.slot).counters.data_ptr()
        assert int(awaited) == int(first.awaited[delivery.slot])
        delivery.end()
    assert first.order.begun == 3


def test_ranks_that_share_a_gpu_are_refused_unless_torch_was_told(monkeypatch):
    monkeypatch.delenv(rendezvous.OVERLAPPING, raising=False)
    assert not rendezvous.require_gpu_each("it", ["first", "second"], 0)
    for rank in range(3):  # rank 1, too, or it would wait for the others
        with pytest.raises(RuntimeError, match=r"a GPU for each rank, got one for \[0, 2\].*set_device"):
            rendezvous.require_gpu_each("it", ["first", "second", "first"], rank)
    monkeypatch.setenv(rendezvous.OVERLAPPING, "1")
    assert rendezvous.require_gpu_each("it", ["first", "first"], 1)


@pytest.mark.parametrize("before", [None, "0"])
def test_ranks_that_see_one_gpu_each_are_let_through_by_torch(before, monkeypatch):
    """All call theirs device 0, which torch takes for one GPU unless it is told in the rendezvous."""
    monkeypatch.delenv(rendezvous.OVERLAPPING, raising=False)
    if before is not None:
        monkeypatch.setenv(rendezvous.OVERLAPPING, before)

    def torchs(memory, name):
        raise MemoryError(f"{name} {os.environ[rendezvous.OVERLAPPING]}")

    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", torchs)
    with pytest.raises(MemoryError, match=r"^a group 1$"):
        rendezvous.rendezvous(torch.empty(0), "a group")
    assert os.environ.get(rendezvous.OVERLAPPING) == before


def refuses(word: torch.Tensor, offset: int, value: int) -> None:
    raise RuntimeError("CUDA driver error: operation not supported")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_word, ""),
        (refuses, "the driver writes no words from a stream (CUDA driver error: operation not supported)"),
        (lambda *_: None, "a stream wrote 1, and the word is 0"),
    ],
)
def test_drivers_that_write_no_words_are_refused(write, said, monkeypatch):
    memory = Mock(stream_write_value32=write)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", memory)
    word = torch.zeros(8, dtype=torch.uint8)
    assert rendezvous.why_no_stream_writes(word) == said + "; use c10d" * bool(said)
    assert not word.any()


class ManagementLibrary:
    """Stands for NVIDIA's: GPUs a, b, c and d, of which a and b have NVLink, b and c a PCIe with atomics."""

    LINKS: ClassVar = {("GPU-a", "GPU-b"): [2], ("GPU-b", "GPU-c"): [3]}
    GPUS: ClassVar = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]

    def __init__(self, lacks: str) -> None:
        self._lacks = lacks  # a call that it answers with an error

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() not in self.GPUS:
            return 6  # not found
        handle._obj.value = 1 + self.GPUS.index(uuid.decode())
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, ability: int, status: Any) -> int:
        pair = self.GPUS[one.value - 1], self.GPUS[other.value - 1]
        status._obj.value = 0 if ability in self.LINKS.get(pair, []) else 5  # not supported
        return 3 if self._lacks == "P2P" else 0


@pytest.mark.parametrize(
    ("gpus", "lacks", "pair"),
    [
        ("ab", "nothing", ""),
        ("bc", "nothing", ""),
        ("abb", "nothing", ""),  # of one GPU, which tests may share
        ("abc", "nothing", "0 and 2"),
        ("cd", "nothing", "0 and 1"),
        ("a?", "nothing", ""),  # a part of a GPU: nobody knows
        ("ac", "P2P", ""),
        ("ac", "all", ""),
    ],
)
def test_gpus_without_atomics_between_them_are_refused(gpus, lacks, pair, monkeypatch):
    """There torch's barrier waits until its time-out, which ends the context."""
    library = None if lacks == "all" else ManagementLibrary(lacks)
    monkeypatch.setattr(rendezvous, "_management_library", lambda: library)
    words = f"the GPUs of ranks {pair} have neither NVLink nor atomics over PCIe" if pair else ""
    assert rendezvous.why_no_barrier(dict(enumerate(gpus)))[: len(words) or None] == words


@pytest.fixture
def waits_for_memory(monkeypatch, tmp_path) -> Iterator[Callable[[int], None]]:
    """Stands for torch's wait for so many ranks: in a socket of this process's name, with Python's lock held.

    After five seconds none answers any more: torch would wait for ever.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(rendezvous.own_socket())
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
        receive, buffer = ctypes.PyDLL(None).recv, ctypes.create_string_buffer(2)

        def wait(ranks: int) -> None:
            for _ in range(ranks):
                if receive(own.fileno(), buffer, 2, 0) < 0:
                    raise TimeoutError("five seconds")
            raise RuntimeError("CUDA driver error: invalid argument")  # as no memory came

        yield wait


@pytest.mark.parametrize("seconds", ["0.2", "0"], ids=["meanwhile", "before"])
def test_a_rank_that_ends_before_it_gives_others_its_memory_is_named(seconds, waits_for_memory):
    peer = subprocess.Popen(["sleep", seconds])
    if seconds == "0":
        peer.wait()
    with (
        pytest.raises(RuntimeError, match=r"^the process of rank 3 has ended before it gave others its GPU"),
        rendezvous.waiting_for({0: os.getpid(), 3: peer.pid}, 60.0),
    ):
        waits_for_memory(2)
    peer.wait()


@pytest.mark.parametrize("away", ["", ", of which 2 did not come"])
def test_a_rank_that_gives_no_memory_in_time_is_an_error(away, waits_for_memory):
    words = rf"^waited 0.1 s for GPU memory of other ranks{away}$"
    peers = {1: os.getpid()} | ({2: os.getppid()} if away else {})  # which has no socket
    with pytest.raises(RuntimeError, match=words), rendezvous.waiting_for(peers, 0.1):
        waits_for_memory(1)


def test_what_torch_says_itself_is_left_and_nothing_is_sent_after_the_end(waits_for_memory):
    threads = {*os.listdir("/proc/self/task")}
    with pytest.raises(MemoryError, match="planted"), rendezvous.waiting_for({1: os.getpid()}, 60.0):
        raise MemoryError("planted")
    with rendezvous.waiting_for({1: os.getpid()}, 0.2):
        pass
    assert {*os.listdir("/proc/self/task")} <= threads  # those of other tests may end meanwhile
    with pytest.raises(TimeoutError):
        waits_for_memory(1)


@pytest.fixture
def barriers(monkeypatch) -> list[tuple[int, ...]]:
    """(rank, channel, milliseconds) of each barrier."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        VirtualHandle, "barrier", lambda self, *arguments: made.append((self.rank, *arguments))
    )
    return made


def test_only_calls_in_flight_at_once_make_a_barrier_in_the_stream_that_pushes(barriers):
    ends = open_symmetric_loopback("it", LAYOUT, 1.5)
    for _ in range(4):  # one after the other
        call_of(ends)
    assert barriers == []
    deliveries = [start(end, ROWS) for end in ends * 2]
    assert [int(delivery.awaited) for delivery in deliveries] == [flag_of(n, 0) for n in (5, 5, 6, 6)]
    assert deliveries[0].slots.data_ptr() != deliveries[2].slots.data_ptr()
    barriers.clear()
    for delivery in deliveries:
        delivery.end()
    for call in (7, 8, 9):
        call_of(ends)
        assert barriers == [(0, 0, 1500), (1, 0, 1500)], call  # call 7 alone: 6 had begun before 5 was read


def test_a_kernel_that_pushes_makes_its_barrier_in_its_own_stream(barriers):
    ends = open_symmetric_loopback("it", LAYOUT, 1.5)
    plans = [reduce_plan(8, 2, end.rank, 2, tapered=False) for end in ends]
    for _ in range(2):  # two in flight
        begun = [end.begin(None, plan, 3, ROWS[0]) for end, plan in zip(ends, plans, strict=True)]
        barriers.clear()
        for delivery in begun:
            delivery.before_kernels_push()
        assert barriers == []
    for end in ends:
        end.released(1)
        end.released(2)
    third = ends[0].begin(None, plans[0], 3, ROWS[0])
    third.before_kernels_push()
    third.before_kernels_push()
    assert barriers == [(0, 1, 1500)]


def test_rows_and_flags_land_at_the_peer_and_nowhere_else():
    ends = open_symmetric_loopback("it", Layout(3, (4, 2), torch.float32, 2))
    plans = [gather_plan(12, 3, rank, 2, tapered=False) for rank in range(3)]
    deliveries = [end.begin(None, plan, 2, torch.empty(0)) for end, plan in zip(ends, plans, strict=True)]
    rows = torch.arange(4.0).view(2, 2) + 1
    deliveries[2].move(plans[2].rounds[2], rows, 10)
    assert torch.equal(deliveries[1].slots[2, 2:], rows)
    assert deliveries[1].flags.tolist() == [0, 0, 0, 0, 0, flag_of(1, 0)]
    for delivery in deliveries:
        written = torch.zeros(3, 4, 2)
        if delivery is deliveries[1]:
            written[2, 2:] = rows
        else:
            assert not delivery.flags.any()
        assert torch.equal(delivery.slots, written)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_push_of_several_chunks_raises_the_flags_of_all(chunks):
    (end, other) = open_symmetric_loopback("it", Layout(2, (8, 2), torch.float32, 4))
    plan = gather_plan(16, 2, 0, chunks, tapered=False)
    mine, theirs = end.begin(None, plan, 2, torch.empty(0)), other.begin(None, plan, 2, torch.empty(0))
    rows = torch.arange(16.0).view(8, 2)
    mine.move(plan.together, rows, 0)
    assert torch.equal(theirs.slots[0], rows)
    assert theirs.flags.tolist() == [flag_of(1, 0)] * 4 + [0] * 4


def test_what_is_pushed_is_held_until_it_is_out():
    (first, second) = open_symmetric_loopback("it", LAYOUT)
    delivery = start(first, ROWS)
    assert first.in_flight == {delivery}
    delivery.end()
    assert not first.in_flight
    first.close()
    with pytest.raises(RuntimeError, match="closed: open another"):
        start(first, ROWS)
    second.close()


@pytest.fixture
def capturing(monkeypatch) -> Mock:
    """Whether calls are captured, as `capturing.return_value`."""
    found = Mock(return_value=False)
    monkeypatch.setattr(StreamOrder, "capturing", lambda self: found())
    return found


def test_once_captured_calls_are_counted_on_the_device_and_wait_for_all(barriers, capturing):
    ends = open_symmetric_loopback("it", LAYOUT)
    for end in ends:
        end.flag_kernels = CountingKernels()
    assert call_of(ends) == [flag_of(1, 0)] * 2
    assert [(end.captured, end.margin) for end in ends] == [(False, 0)] * 2
    barriers.clear()
    capturing.return_value = True
    assert call_of(ends) == [flag_of(1, 0) - SIGN] * 2  # the first of its slot
    capturing.return_value = False
    assert [(end.captured, end.margin) for end in ends] == [(True, 0)] * 2
    assert call_of(ends) == [flag_of(1, 0) - SIGN] * 2
    assert call_of(ends) == [flag_of(2, 0) - SIGN] * 2
    assert len(barriers) == 3 * 2
    for end in ends:  # a replay does not count on the host: one slot again
        end.order.begun = end.order.read = 1
    assert call_of(ends) == [flag_of(3, 0) - SIGN] * 2


def test_counts_on_the_device_wrap_round(capturing):
    ends = open_symmetric_loopback("it", LAYOUT)
    for end in ends:
        end.flag_kernels = CountingKernels()
        for count in end._counts:
            count.fill_(SIGN - flag_of(2, 0))
    capturing.return_value = True
    found = [call_of(ends) for _ in range(6)]
    assert all(word < 0 for words in found for word in words)
    assert [words[0] for words in found[::2]] == [-flag_of(1, 0), -SIGN, flag_of(1, 0) - SIGN]  # of one slot


def test_words_of_eager_calls_wrap_round_without_the_sign_bit():
    ends = open_symmetric_loopback("it", LAYOUT)
    for end in ends:
        end.order.begun = end.order.read = 2**31 - 3
    for number in (2046, 2047, 0, 1, 2, 3):
        assert call_of(ends) == [flag_of(number, 0)] * 2
        assert flag_of(number, 0) >= 0


def test_a_call_is_captured_only_where_kernels_count(capturing):
    (end, _) = open_symmetric_loopback("it", LAYOUT)
    capturing.return_value = True
    with pytest.raises(RuntimeError, match="a CUDA graph can capture calls only where our kernels compute"):
        start(end, ROWS)


def test_the_status_is_asked_for_every_64_calls_and_when_an_exchange_closes():
    (end, other) = open_symmetric_loopback("it", LAYOUT)
    end._seen = torch.zeros(1, dtype=torch.int32)  # as on a GPU, memory of the host
    end._seen_word = end._seen.numpy()
    end.status.fill_(7)
    seen = []
    for _ in range(symmetric.LOOK_CALLS):
        start(end, ROWS).end()
        seen.append(end.late())
    assert seen == [0] * (symmetric.LOOK_CALLS - 1) + [7]
    with pytest.warns(UserWarning, match="it on rank 0: a kernel has waited in vain for rows of another"):
        end.close()
    end.close()
    other.close()


def test_a_replay_that_waited_in_vain_is_seen_without_a_call(capturing):
    (end, _) = open_symmetric_loopback("it", LAYOUT)
    end.flag_kernels = CountingKernels()
    end._seen = torch.zeros(1, dtype=torch.int32)  # as on a GPU, memory of the host
    end._seen_word = end._seen.numpy()
    end.status.fill_(3)
    start(end, ROWS).end()
    assert (end.late(), end.missed()) == (0, "")  # eager calls look, and raise, themselves
    capturing.return_value = True
    start(end, ROWS).end()  # a replay copies what this call copies
    said = end.missed()
    assert said.startswith("replay: rows of rank 1 (chunk 3) did not arrive: it died, came too late")
    assert said.endswith("Cause: a wait of linear ran out in a graph; results are not valid")


def test_margins_leave_processors_to_what_kernels_wait_for():
    handle = open_symmetric_loopback("it", LAYOUT)[0].handle
    memory = handle.get_buffer(0, (LAYOUT.byte_count,), torch.uint8)
    for shares_gpu, margin in ((False, 0), (True, 4)):
        end = SymmetricExchange("it", LAYOUT, handle, memory, 1.0, shares_gpu=shares_gpu)
        assert end.margin == margin


def test_words_of_both_slots_lie_alike():
    """Triton compiles for 16-byte boundaries or for any address: a capture cannot wait for the other form."""
    for ranks, splits in product(range(1, 9), (1, 2, 3, 4)):
        (end, *_) = open_symmetric_loopback("it", Layout(ranks, (12, 3), torch.float32, splits))
        assert all(word.data_ptr() % 16 == 0 for word in (*end.awaited, *end.flags))
        assert {len(flags) for flags in end.flags} == {ranks * splits}
        assert end.flags[0].data_ptr() + 4 * ranks * splits <= end.flags[1].data_ptr()
        assert end.mailbox(end.rank).released.data_ptr() >= end.flags[1].data_ptr() + 4 * ranks * splits


def test_a_closed_end_holds_no_memory():
    (end,) = open_symmetric_loopback("it", Layout(1, (4, 2), torch.float32))
    memory = weakref.ref(end._memory)
    end.close()
    end.close()
    assert memory() is None


PUSHED = [torch.zeros(4, 3)] * 3  # to three ranks


class Stream:
    """Stands for a stream of a GPU: what is enqueued, by name."""

    def __init__(self, name: str, log: list[tuple[str, ...]], device: Device) -> None:
        self.name, self._log, self._device = name, log, device
        self.captures = False

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self._log.append((self.name, "waits for", event))

    def record_event(self) -> str:
        return f"an event of {self.name}"

    def __enter__(self) -> None:
        self._device.entered.append(self._device.current)
        self._device.current = self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._device.entered.pop()


class Device:
    """Stands for a GPU that has streams, for one rank."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.entered: list[Stream] = []
        self.side, self.main, self.other = (
            Stream(name, self.log, self) for name in ("side", "main", "other")
        )
        self.current = self.main


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.current.captures)
    return device


@pytest.fixture
def end(device, monkeypatch) -> SymmetricExchange:
    """One rank of two, whose device logs what is enqueued."""

    def logged(what: str, inner: Any = None) -> Any:
        def log(self: Any, *arguments: Any, **options: Any) -> Any:
            device.log.append((device.current.name, what))
            return inner(self, *arguments, **options) if inner else None

        return log

    (end, _) = open_symmetric_loopback("it", Layout(3, (4, 3), torch.float32))[:2]
    end.native_push = None  # Python's pushes are logged
    end.side, end.stream_order = SideStream(torch.device("cpu")), StreamOrder(torch.device("cuda"))
    end.side._stream = device.side  # type: ignore[assignment]
    monkeypatch.setattr(VirtualHandle, "barrier", logged("barrier"))
    write = VirtualHandle.stream_write_value32
    monkeypatch.setattr(VirtualHandle, write.__name__, logged("word", write))
    monkeypatch.setattr(torch.Tensor, "copy_", logged("rows", torch.Tensor.copy_))
    return end


def test_a_gather_enqueues_one_copy_and_one_word_a_peer_behind_one_event(device, end):
    """Streams that push are joined behind the release, as captures want."""
    delivery, released = start(end, PUSHED), end.order.released
    end.order.released = lambda number: (device.log.append("released"), released(number))
    delivery.before_kernels_wait()
    delivery.end()
    assert device.log == [
        ("main", "word"),  # which call kernels wait for
        ("side", "waits for", "main"),
        ("side", "rows"), ("side", "word"), ("side", "rows"), ("side", "word"),
        ("main", "rows"), ("main", "word"),
        "released",
        ("main", "waits for", "side"),
    ]  # fmt: skip


def test_a_kernel_that_waits_comes_behind_the_barrier_of_its_call_and_not_behind_the_pushes(device, end):
    for _ in range(2):
        start(end, PUSHED)
    end.released(1)
    end.released(2)
    device.log.clear()
    third = start(end, PUSHED)
    assert device.log[:3] == [("main", "word"), ("side", "waits for", "main"), ("side", "barrier")]
    device.log.clear()
    third.before_kernels_wait()
    assert device.log == [("main", "waits for", "an event of side")]


def test_calls_in_two_streams_take_effect_one_after_the_other(device, end):
    start(end, PUSHED).end()
    device.log.clear()
    device.current = device.other
    start(end, PUSHED).end()
    order = [("other", "waits for", "main"), ("other", "word"), ("side", "waits for", "other")]
    assert device.log[:3] == order
    device.log.clear()
    start(end, PUSHED).end()
    assert order[0] not in device.log


def test_rows_read_in_another_stream_are_read_before_the_call_after(device, end):
    delivery = start(end, PUSHED)
    device.current = device.other
    delivery.before_kernels_wait()
    delivery.end()
    device.current = device.main
    device.log.clear()
    start(end, PUSHED)
    assert device.log[0] == ("main", "waits for", "other")


def test_a_captured_call_waits_for_no_stream_outside_of_the_graph(device, end):
    end.flag_kernels = CountingKernels()
    start(end, PUSHED).end()
    device.log.clear()
    device.current = device.other
    device.other.captures = True
    start(end, PUSHED).end()
    assert ("other", "waits for", "main") not in device.log
    device.log.clear()
    device.current = device.side
    device.side.captures = True
    end.stream_order.current()
    assert device.log == [("side", "waits for", "other")]  # of one graph


def test_ranks_land_beside_each_other():
    layout = Layout(3, (8, 2), torch.float32, splits=4)
    mailbox = layout.mailbox(torch.zeros(layout.byte_count, dtype=torch.uint8))
    for rank in range(3):
        landing = Landing(mailbox, 1, rank, layout)
        landing.flags += 1
        landing.rows += 1
        assert landing.flags.shape == (4,)
    assert [int(slot.sum()) for slot in mailbox.flags] == [0, 12, *[0] * (len(mailbox.flags) - 2)]
    assert bool((mailbox.flags[1] == 1).all())
    assert bool((mailbox.buffers[1] == 1).all())
