"""Copies that drift apart in a plain training loop are told within the steps that were asked for."""

from __future__ import annotations

import runpy

import pytest
from torch.distributed import DistNetworkError

from tests.layers import watch_cases as cases
from tests.layers.worlds import posing
from tpkernels.layers import watch

NOTHING = ("nothing", "")


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("loop", [cases.by_torch, cases.unsummed, cases.other_data])
def test_drift_ends_the_loop_on_all_ranks(ranks2, loop, interval):
    first, second = ranks2.run(loop, interval)
    assert first == second
    steps, (kind, text) = first
    assert steps == interval
    assert kind == "RuntimeError"
    assert "weight' differs between tensor-parallel ranks that hold copies of it" in text
    assert f"after {interval} steps of the optimizer (TPKERNELS_CHECK_REPLICAS={interval}; 0: never)" in text
    assert "rank 1 from rank 0" in text
    assert "clip by tpkernels.clip_grad_norm_, for torch's takes the norm of one rank's shards" in text


def test_our_own_clipping_keeps_copies_equal(ranks4):
    assert ranks4.run(cases.by_ours) == [(4, NOTHING)] * 4


def test_it_looks_by_itself_and_can_be_switched_off(ranks2):
    assert watch.steps_between == 100
    assert ranks2.run(cases.by_torch, 0) == [(7, NOTHING)] * 2


def test_other_optimizers_are_left_alone(ranks2):
    assert ranks2.run(cases.of_another_model) == [NOTHING] * 2
    assert ranks2.run(cases.marked_experts) == [NOTHING] * 2


def test_a_step_that_one_rank_takes_alone_is_told(ranks2):
    (kind, text), second = ranks2.run(cases.skipped_on_one_rank)
    assert second == NOTHING
    assert kind == "RuntimeError"
    assert "rank 0 waited 1 s after 1 optimizer steps to compare copies" in text
    assert "rank 1 took another number of steps, or died" in text


def test_copies_that_a_rank_lacks_are_told(ranks2):
    expected = "tensor-parallel ranks hold different numbers of copies: 3 on rank 0, 2 on rank 1"
    assert ranks2.run(cases.fewer_on_one_rank) == [("RuntimeError", expected)] * 2


def test_a_store_that_ended_is_no_error(monkeypatch):
    """Rank 0, which may hold it, ends when its work is done."""

    def gone(*_: object) -> None:
        raise DistNetworkError("the store is gone")

    with posing(0, 2):
        monkeypatch.setattr(watch.Watch, "_sums_of_all", gone)
        with pytest.warns(
            RuntimeWarning, match="copies of parameters could not be compared: the store is gone"
        ):
            watch.Watch().look(([0, 1], []))


def test_each_optimizer_is_counted_by_itself(ranks2):
    for *fine, (kind, text) in ranks2.run(cases.two_models):
        assert fine == [NOTHING] * 3
        assert kind == "RuntimeError"
        assert text.startswith("check_replicas: '0.weight' differs")
        assert "after 2 steps of the optimizer" in text


def test_copies_under_fully_shard_are_compared(ranks4):
    for fine, (kind, text) in ranks4.run(cases.shards_of_data_ranks):
        assert fine == NOTHING
        assert kind == "RuntimeError"
        assert "'0.weight' differs between tensor-parallel ranks" in text
        assert "so do 1 more of 2 parameters" in text


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "float16", "complex64", "complex128"])
def test_sums_of_bits_see_every_change(kind):
    assert cases.sums_of(kind)


@pytest.mark.parametrize("value", ["often", "-1", "1.5", " 2"])
def test_nonsense_is_refused(value):
    with pytest.raises(
        ValueError, match=f"TPKERNELS_CHECK_REPLICAS is '{value}'; expected a number of optimizer"
    ):
        watch._read(value)


@pytest.mark.parametrize(("value", "steps"), [("7", 7), ("0", 0), ("", 100)])
def test_the_variable_is_read_at_import(value, steps, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CHECK_REPLICAS", value)
    assert runpy.run_path(watch.__file__)["steps_between"] == steps
