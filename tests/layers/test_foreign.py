"""Data parallelism over ranks that hold different shards is refused before the first step."""

import pytest

from tests.layers import foreign_cases as cases


@pytest.mark.parametrize("wrap", cases.WRAPS)
def test_all_ranks_refuse_to_average_different_shards(ranks4, wrap):
    for said in ranks4.run(cases.refused, wrap, 2):
        for model, (kind, text) in said.items():
            assert kind == "ValueError", f"{model}: {text}"
            assert "over ranks 0, 1, 2, 3 would average different shards" in text, model
            assert (
                'pass the data-parallel group, whose ranks hold the same shard: state.process_group("dp"'
                in text
            )
    peers = [
        text.split("tensor-parallel ranks ")[1][:4]
        for said in ranks4.run(cases.refused, wrap, 2)
        for _, text in said.values()
    ]
    assert {*peers} <= {"0, 1", "2, 3"}


@pytest.mark.parametrize("wrap", cases.WRAPS)
def test_without_data_parallel_ranks_there_is_nothing_to_wrap(ranks2, wrap):
    for said in ranks2.run(cases.refused, wrap, 1):
        for model, (kind, text) in said.items():
            assert kind == "ValueError", f"{model}: {text}"
            assert "tensor-parallel ranks 0, 1 each hold other rows or columns of" in text
            assert "there is nothing to average: do not wrap it" in text


@pytest.mark.parametrize(("pool", "data_ranks"), [("ranks4", 2), ("ranks2", 1), ("ranks2", 2)])
def test_ranks_that_hold_the_same_shards_may_be_wrapped(request, pool, data_ranks):
    for said in request.getfixturevalue(pool).run(cases.taken, data_ranks):
        assert said == dict.fromkeys(cases.WRAPS, ("nothing", ""))


def test_no_shard_is_overwritten_before_it_is_told(ranks4):
    assert ranks4.run(cases.weights_after_refusal) == [True] * 4


def test_what_is_not_split_may_be_wrapped(ranks2):
    assert ranks2.run(cases.shards_left_out) == [[("nothing", "")] * 3] * 2
