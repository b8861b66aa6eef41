"""Advice: every layout is in one place, those that fit are sorted, and errors are the layers' own."""

from dataclasses import replace

import pytest

from tests.checks import error_of
from tests.layers.worlds import posing
from tests.planning.shapes import GPT2, LLAMA
from tests.products import once
from tpkernels import GPT, model_config
from tpkernels.planning.gpus import RATED_GPUS
from tpkernels.planning.job import Hardware, Job, RankLayout, layouts
from tpkernels.planning.step_time import advise

H100 = Hardware(RATED_GPUS["h100"])
LLAMA_70B = Job(model=model_config("llama3-70b"), tokens=8192, batch=512)


def test_layouts_are_all_that_use_every_gpu():
    found = list(layouts(12, most_tensor=4))
    assert len(set(found)) == len(found)
    assert set(found) == {
        RankLayout(tensor, pipeline, 12 // tensor // pipeline)
        for tensor in (1, 2, 3, 4)
        for pipeline in range(1, 13)
        if 12 % (tensor * pipeline) == 0
    }


@once(gpu=[*RATED_GPUS], recompute=["none", "full"])
def test_each_layout_is_in_one_place(gpu, recompute):
    machine = Hardware(RATED_GPUS[gpu])
    advice = advise(replace(LLAMA_70B, recompute=recompute), machine, 64, 8)
    fitting = [found.layout for found in advice.fitting]
    large = [found.layout for found in advice.too_large]
    impossible = [layout for layout, _ in advice.impossible]
    assert fitting
    assert sorted(map(str, fitting + large + impossible)) == sorted(map(str, layouts(64, 8)))
    assert all(found.memory.peak <= machine.usable_memory for found in advice.fitting)
    assert all(found.memory.peak > machine.usable_memory for found in advice.too_large)
    times = [found.time.total for found in advice.fitting]
    assert times == sorted(times)
    excesses = [found.excess for found in advice.too_large]
    assert excesses == sorted(excesses)
    assert all(excess > 0 for excess in excesses)


def test_advice_for_70_billion_parameters_is_what_one_would_choose():
    """Tensor-parallel inside the node, and few stages."""
    fitting = advise(LLAMA_70B, H100, 64, 8).fitting
    assert [(found.layout.tensor, found.layout.pipeline) for found in fitting[:2]] == [(8, 2), (8, 4)]
    assert fitting[1].time.total < 1.04 * fitting[0].time.total
    assert advise(LLAMA_70B, H100, 64, 64).fitting[0].layout.tensor <= 8  # not across nodes
    small = advise(Job(model=model_config("gpt2-small"), tokens=1024, batch=512), H100, 64, 8)
    assert small.fitting[0].layout == RankLayout(1, 1, 64)  # nothing need be split


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (RankLayout(3, 1, 1), "num_heads: expected a multiple of the 3 tensor-parallel ranks, got 8"),
        (RankLayout(1, 3, 1), "num_layers: expected a multiple of the 3 stages, got 2"),
        (
            RankLayout(1, 1, 3),
            "batch: expected a multiple of 3 data-parallel ranks x 2 sequences at once, got 8",
        ),
    ],
)
def test_what_does_not_divide_is_told(layout, reason):
    job = Job(model=LLAMA, tokens=32, batch=8, micro_batch=2)
    gpus = layout.tensor * layout.pipeline * layout.data
    assert (layout, reason) in advise(job, H100, gpus, 8).impossible


SPLITS = [  # model, ranks
    (LLAMA, 4),
    (LLAMA, 3),
    (LLAMA.with_sizes(num_kv_heads=4, num_heads=12, hidden_size=96), 6),
    (LLAMA.with_sizes(ffn_hidden_size=190), 4),
    (GPT2, 8),
    (GPT2.with_sizes(num_heads=4), 8),
    (GPT2.with_sizes(num_heads=6), 2),
    (LLAMA.with_sizes(num_heads=64), 2),  # heads of one feature, which rotary positions cannot turn
    (LLAMA.with_sizes(num_kv_heads=3), 1),
]


@pytest.mark.parametrize(("model", "ranks"), SPLITS)
def test_a_model_is_refused_where_its_layers_refuse_it(model, ranks):
    with posing(0, ranks):
        theirs, _ = error_of(GPT, model, device="meta")
    job = Job(model=LLAMA, tokens=8 * ranks, batch=1)
    ours, _ = error_of(lambda: replace(job, model=model).require_split(RankLayout(ranks, 1, 1)))
    assert (ours == "nothing") == (theirs == "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 65, "model": GPT2}, "tokens: expected at most 64, as many as the model has positions"),
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"micro_batch": -1}, "micro_batch: expected at least 1"),
        ({"model": LLAMA.with_sizes(activation="selu")}, "activation: expected one of none, gelu"),
        ({"model": LLAMA.with_sizes(norm="batch")}, "norm: expected one of layer_norm, rms_norm, got"),
    ],
)
def test_jobs_that_cannot_be_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Job(model=LLAMA, tokens=32, batch=8), **change)


def test_tokens_that_ranks_do_not_divide_matter_under_sequence_parallelism_only():
    job = Job(model=LLAMA, tokens=33, batch=8)
    assert RankLayout(2, 1, 1) in [layout for layout, _ in advise(job, H100, 2, 2).impossible]
    whole = advise(replace(job, sequence_parallel=False), H100, 2, 2)
    assert RankLayout(2, 1, 1) in [found.layout for found in whole.fitting]
