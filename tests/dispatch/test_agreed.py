"""Ranks that would choose differently, and one store: they end with one choice, or say that they do not."""

from dataclasses import replace
from functools import wraps
from threading import Event, Thread

import pytest
import torch
from torch.distributed import HashStore

from tests.dispatch.conftest import CPU, TRITON_WINS, VERSIONS, FakeTimer, need_interpreter
from tpkernels.dispatch.cache import Cache
from tpkernels.dispatch.chooser import Chooser
from tpkernels.dispatch.gpus import Gpu
from tpkernels.dispatch.products import linear
from tpkernels.kernels.target import INTERPRETER

OPERANDS = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48), "none", False
POINTER = "triton/pointer/32x32x32-w4-s1-p2-g2"
TORCH_WINS = {"torch": 1.0, "": 3.0}


@pytest.fixture
def rank(tmp_path):
    """Choosers with a cache each, as ranks on several machines have them."""
    need_interpreter()
    made = []

    def make(timer=TRITON_WINS, versions=VERSIONS, obstacle=lambda device: None):
        timer = timer if callable(timer) else FakeTimer(timer)
        made.append(tmp_path / f"rank {len(made)}")
        gpu = Gpu(versions.gpu, INTERPRETER)
        chooser = Chooser(CPU, gpu, timer, Cache(made[-1], versions), {}, obstacle)
        return chooser, timer

    return make


def agree(store, *choosers):
    for chooser in choosers:
        chooser.agree_through(store)


SEEN = []


def spied(name, function):
    return wraps(function)(lambda *args, **named: SEEN.append(name) or function(*args, **named))


SPIED = replace(linear, by_torch=spied("torch", linear.by_torch), by_kernel=spied("triton", linear.by_kernel))


def chosen(chooser):
    """Who computes the product in a call, the last of all that candidates compute."""
    y, _ = chooser.call(SPIED, *OPERANDS)
    torch.testing.assert_close(y, linear.by_torch(*OPERANDS)[0])
    return SEEN[-1]


@pytest.mark.parametrize("times", [(TRITON_WINS, TORCH_WINS), (TORCH_WINS, TRITON_WINS)])
def test_ranks_with_contradictory_clocks_choose_what_the_first_does(times, rank):
    store = HashStore()
    (first, asked_first), (second, asked_second) = (rank(each) for each in times)
    alone = [chosen(rank(each)[0]) for each in times]
    assert len(set(alone)) == 2, "left alone, they differ"
    agree(store, first, second)
    assert [chosen(first), chosen(second)] == [alone[0]] * 2
    assert len(asked_first.asked) == 1
    assert not asked_second.asked, "what others have timed is timed no more"
    assert chosen(second) == alone[0]
    assert second.known(linear, OPERANDS).candidate == first.known(linear, OPERANDS).candidate, "on disk, too"


def test_ranks_that_time_at_once_choose_what_is_published_first(rank):
    """Both find nothing in the store, and both time."""
    store, first_is_done = HashStore(), Event()

    class Waiting(FakeTimer):
        def __call__(self, runs):
            second_is_timing.set()
            assert first_is_done.wait(20)
            return super().__call__(runs)

    second_is_timing = Event()
    first, second = rank(TRITON_WINS)[0], rank(Waiting(TORCH_WINS))[0]
    agree(store, first, second)
    choices = []
    thread = Thread(target=lambda: choices.append(chosen(second)))
    thread.start()
    assert second_is_timing.wait(20)
    choices.append(chosen(first))
    first_is_done.set()
    thread.join(20)
    assert choices == ["triton", "triton"]
    assert second.known(linear, OPERANDS).candidate.name == POINTER


def test_what_is_on_a_ranks_disk_goes_through_the_store(rank):
    store = HashStore()
    first, (second, timer) = rank(TRITON_WINS)[0], rank(TORCH_WINS)
    second.timed(linear, OPERANDS)
    assert second.known(linear, OPERANDS).candidate.name == "torch"
    agree(store, first, second)
    assert [chosen(first), chosen(second)] == ["triton", "triton"]
    assert len(timer.asked) == 1


def test_what_was_chosen_before_is_chosen_again(rank):
    store = HashStore()
    first, second = rank(TRITON_WINS)[0], rank(TORCH_WINS)[0]
    assert [chosen(first), chosen(second)] == ["triton", "torch"]
    agree(store, first, first, second, second)
    assert [chosen(first), chosen(second)] == ["triton", "triton"]


def test_a_choice_that_is_no_candidate_here_is_refused_with_a_warning(rank, caplog):
    store = HashStore()
    first, second = rank(TRITON_WINS)[0], rank(TRITON_WINS)[0]
    real, other = first.candidates, "triton/pointer/512x512x512-w4-s1"
    first.candidates = lambda *given: tuple(
        replace(candidate, name=candidate.name.replace(POINTER, other)) for candidate in real(*given)
    )
    agree(store, first, second)
    assert [chosen(first), chosen(second)] == ["triton", "triton"]
    (record,) = caplog.records
    assert "by triton/pointer/512x512x512-w4-s1, which is no candidate here" in record.getMessage()


@pytest.mark.parametrize("field", ["gpu", "torch", "triton", "kernels"])
def test_unequal_ranks_share_nothing(field, rank, caplog):
    store = HashStore()
    first, second = rank(TRITON_WINS)[0], rank(TORCH_WINS, replace(VERSIONS, **{field: "another"}))[0]
    agree(store, first, second)
    assert [chosen(first), chosen(second)] == ["triton", "torch"]
    assert not caplog.records


class Failing:
    def compare_set(self, key, expected, desired):
        raise torch.distributed.DistNetworkError("Broken pipe")


class Babbling:
    def compare_set(self, key, expected, desired):
        return b'{"name": 3}'


@pytest.mark.parametrize("store", [Failing(), Babbling()], ids=["dead", "damaged"])
def test_a_store_that_fails_costs_the_agreement_and_one_warning(store, rank, caplog):
    chooser, timer = rank(TORCH_WINS)
    chooser.agree_through(store)
    assert chosen(chooser) == "torch"
    chooser.call(linear, *(torch.cat([operand, operand]) for operand in OPERANDS[:1]), *OPERANDS[1:])
    assert len(timer.asked) == 2
    (record,) = caplog.records
    assert "ranks choose kernels for themselves from now on" in record.getMessage()


def test_a_new_store_replaces_a_lost_one(rank):
    first, second = rank(TRITON_WINS)[0], rank(TORCH_WINS)[0]
    second.agree_through(Failing())
    assert chosen(second) == "torch"
    store = HashStore()
    agree(store, first, second)
    assert [chosen(first), chosen(second)] == ["triton", "triton"]


def test_ranks_that_capture_agree_and_choose_again_afterwards(rank):
    """One knows from its disk what the other would have to time."""
    capturing = ["a CUDA graph is being captured"]
    told = {"obstacle": lambda device: capturing[0] if capturing else None}
    store = HashStore()
    knows, knows_not = rank(TRITON_WINS, **told)[0], rank(TORCH_WINS, **told)[0]
    knows.timed(linear, OPERANDS)
    agree(store, knows_not, knows)
    assert [chosen(knows_not), chosen(knows)] == ["torch", "torch"]
    capturing.clear()
    assert [chosen(knows), chosen(knows_not)] == ["triton", "triton"]
