"""How ranks with one store agree on choices."""

import logging
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from itertools import count
from threading import Event, Thread

import pytest
import torch
from torch.distributed import HashStore

from tests.dispatch.conftest import TRITON_WINS, VERSIONS, FakeTimer, call, known, timed
from tests.dispatch.test_autotune import IN_COMPANY, KEY, POINTER, SLOW_TO_LAUNCH, TORCH_WINS
from tpkernels.dispatch import autotune as autotune_module
from tpkernels.dispatch import products
from tpkernels.dispatch.products import linear

OPERANDS = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48), "none", False


@pytest.fixture
def rank(make_tuner, tmp_path):
    """Choosers with a cache each, as ranks on several machines have them."""
    number = count()

    def make(timer=TRITON_WINS, **options):
        timer = timer if callable(timer) else FakeTimer(timer)
        return make_tuner(timer, folder=tmp_path / f"rank {next(number)}", **options), timer

    return make


def agree(store, *tuners):
    for tuner in tuners:
        tuner.agree_through(store, WAITS.append)


SEEN = []
WAITS = []  # by how much waits of the next collective were extended


def spied(name, function):
    return wraps(function)(lambda *args, **named: SEEN.append(name) or function(*args, **named))


SPIED = replace(linear, by_torch=spied("torch", linear.by_torch), by_kernel=spied("triton", linear.by_kernel))


def chosen(tuner):
    """Who computes the product in a call, the last of all that candidates compute."""
    y, _ = call(tuner, SPIED, *OPERANDS)
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
    assert known(second, linear, *OPERANDS) == known(first, linear, *OPERANDS), "on disk, too"


def test_ranks_agree_on_what_graphs_capture_too(rank, caplog):
    caplog.set_level(logging.INFO, "tpkernels.choices")
    store, (eager, on_gpu) = HashStore(), SLOW_TO_LAUNCH
    first, _ = rank(FakeTimer(eager, on_gpu=on_gpu))
    second, timer = rank(TRITON_WINS)  # its own clock would say our kernel, always
    agree(store, first, second)
    for tuner in (first, second):
        call(tuner, products.linear, *OPERANDS)
        assert tuner.cache.get(KEY).names == ("torch", POINTER)
    assert not timer.asked
    assert caplog.messages[-1].startswith(f"{KEY}: torch, in captured graphs {POINTER} (agreed")


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
    assert known(second, linear, *OPERANDS).name == POINTER


def test_what_was_chosen_before_is_chosen_again(rank):
    store = HashStore()
    first, second = rank(TRITON_WINS)[0], rank(TORCH_WINS)[0]
    assert [chosen(first), chosen(second)] == ["triton", "torch"]
    agree(store, first, first, second, second)
    assert [chosen(first), chosen(second)] == ["triton", "triton"]


def test_a_choice_that_is_no_candidate_is_refused_with_warning(rank, caplog):
    store = HashStore()
    first, second = rank(TRITON_WINS)[0], rank(TRITON_WINS)[0]
    real, other = first.request, "triton/pointer/512x512x512-w4-s1"

    def renamed(*given):
        request = real(*given)
        found = {name.replace(POINTER, other): each for name, each in request.candidates.items()}
        return request._replace(candidates=found)

    first.request = renamed
    agree(store, first, second)
    assert [chosen(first), chosen(second)] == ["triton", "triton"]
    (record,) = caplog.records
    assert "by triton/pointer/512x512x512-w4-s1, which is no candidate here" in record.getMessage()


@pytest.mark.parametrize("field", ["gpu", "torch", "triton", "kernels"])
def test_unequal_ranks_share_nothing(field, rank, caplog):
    store, others = HashStore(), replace(VERSIONS, **{field: "another"})
    first, second = rank(TRITON_WINS)[0], rank(TORCH_WINS, versions=others)[0]
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
    tuner, timer = rank(TORCH_WINS)
    tuner.agree_through(store, WAITS.append)
    assert chosen(tuner) == "torch"
    call(tuner, linear, *(torch.cat([operand, operand]) for operand in OPERANDS[:1]), *OPERANDS[1:])
    assert len(timer.asked) == 2
    (record,) = caplog.records
    assert "ranks choose kernels for themselves from now on" in record.getMessage()


def test_ranks_that_capture_agree_and_choose_again_afterwards(rank):
    """One knows from its disk what the other would have to time."""
    capturing = ["a CUDA graph is being captured"]
    told = {"not_now": lambda device: capturing[0] if capturing else ""}
    store = HashStore()
    knows, knows_not = rank(TRITON_WINS, **told)[0], rank(TORCH_WINS, **told)[0]
    timed(knows, linear, *OPERANDS)
    agree(store, knows_not, knows)
    assert [chosen(knows_not), chosen(knows)] == ["torch", "torch"]
    capturing.clear()
    assert [chosen(knows), chosen(knows_not)] == ["triton", "triton"]


def test_ranks_make_a_choice_again_at_the_same_call(rank, monkeypatch):
    monkeypatch.setattr(autotune_module, "CALLS_IN_COMPANY", 3)
    store = HashStore()
    (first, timer), (second, other) = (rank(FakeTimer(TRITON_WINS, company=IN_COMPANY)) for _ in range(2))
    agree(store, first, second)
    for _ in range(3):
        assert [chosen(first), chosen(second)] == ["triton", "triton"]
    timer.company, timer.milliseconds = "", TORCH_WINS
    assert [chosen(first), chosen(second)] == ["torch", "torch"]
    assert (len(timer.asked), len(other.asked)) == (2, 0)


def test_waits_for_a_rank_that_may_compile_are_extended(rank):
    """Once for each shape, on the ranks that time it and on those that take what is agreed on."""
    store, alone = HashStore(), rank()[0]
    WAITS.clear()
    chosen(alone)
    assert not WAITS
    for tuner in (rank()[0], rank()[0]):
        agree(store, tuner)
        for _ in range(3):
            chosen(tuner)
    assert [timedelta(seconds=30)] * 2 == WAITS
