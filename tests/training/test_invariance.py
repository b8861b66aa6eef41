"""With TP-invariance a run is the same to the bit at every tensor-parallel size; otherwise it is not."""

import warnings
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.products import once
from tests.training.decoding import generated, scored
from tests.training.invariant_runs import answers, trained
from tpkernels.models.config import GPTConfig
from tpkernels.training.config import TrainConfig

LLAMA = GPTConfig(
    vocab_size=251,  # is padded
    hidden_size=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,  # each shared by ranks where there are 4 or 8
    ffn_hidden_size=48,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    tied=False,
)
GPT2 = GPTConfig(vocab_size=251, hidden_size=32, num_layers=2, num_heads=8, max_positions=16)
MODELS = {"llama": LLAMA, "gpt2": GPT2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS = 3
SEGMENTS = 8


@pytest.fixture(scope="module")
def config(text):
    return TrainConfig(
        model=LLAMA,
        data=str(text),
        steps=STEPS,
        batch=4,
        tokens=16,
        accumulate=2,
        warmup=1,
        max_norm=0.5,  # less than the gradients' norm: it clips
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="module")
def alone(ranks1):
    """The outcome of a run on one rank; each run once."""
    return cache(lambda config, segments=SEGMENTS: ranks1.run(trained, config, segments)[0])


@once(model=MODELS, dtype=DTYPES)
def test_a_run_is_the_same_at_every_size(model, dtype, config, alone, ranks2, ranks4):
    config = replace(config, model=model, dtype=dtype)
    expected = alone(config)
    assert min(expected.norms) > config.max_norm
    assert ranks2.run(trained, config, SEGMENTS)[0] == expected
    assert ranks4.run(trained, replace(config, sequence_parallel=True), SEGMENTS)[0] == expected


def test_a_run_is_the_same_on_as_many_ranks_as_segments(config, alone, ranks4):
    assert ranks4.run(trained, config, 4)[0] == alone(config, 4)


def test_a_run_goes_on_at_another_size(config, alone, tmp_path, ranks1, ranks2, ranks4):
    expected = alone(config)
    there, back = tmp_path / "there", tmp_path / "back"
    ranks4.run(_until, config, 1, None, there)
    ranks1.run(_until, config, 2, there, back)
    last = ranks2.run(_until, config, 3, back, None)[0]
    assert (last.losses, last.norms, last.state) == (expected.losses[2:], expected.norms[2:], expected.state)


def _until(config, step, resume, save, segments=SEGMENTS):
    return trained(config, segments, until=step, resume=resume, save=save)


def test_going_on_otherwise_is_warned_of(config, tmp_path, ranks1):
    ranks1.run(_until, config, 1, None, tmp_path / "kept")
    assert ranks1.run(_warned, config, tmp_path / "kept", SEGMENTS) == [""]
    (said,) = ranks1.run(_warned, config, tmp_path / "kept", 0)
    assert "was computed with 8 segments of TP-invariance (0: off); this run, with 0, goes on" in said


def _warned(config, kept, segments):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _until(config, 1, kept, None, segments)
    return " ".join(str(each.message) for each in told)


def test_data_parallel_runs_are_the_same_too(config, ranks2, ranks4):
    config = replace(config, sequence_parallel=True)
    expected, other = (ranks.run(_of_two_data_ranks, config)[0] for ranks in (ranks2, ranks4))
    assert other == expected


def _of_two_data_ranks(config):
    return trained(config, SEGMENTS, tensor=torch.distributed.get_world_size() // 2)


def test_other_runs_depend_on_the_size(config, alone, ranks2):
    """What the tests above would see. Losses agree within rounding only."""
    config = replace(config, dtype=torch.float32)
    expected, run = alone(config, 0), ranks2.run(trained, config, 0)[0]
    assert run.sum != expected.sum
    assert run.norms != expected.norms
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)


@once(model=MODELS, dtype=DTYPES)
def test_logits_and_samples_are_the_same(model, dtype, ranks1, ranks2, ranks4):
    logits, written = ranks1.run(answers, model, dtype, SEGMENTS)[0]
    for ranks in (ranks2, ranks4):
        other_logits, other_written = ranks.run(answers, model, dtype, SEGMENTS)[0]
        assert torch.equal(logits, other_logits)
        assert torch.equal(written, other_written)


LENGTH = 17  # 16 of them are inputs, which 4 ranks and 8 segments divide


@once(model=MODELS, dtype=DTYPES)
def test_decoding_has_the_logprobs_of_training(model, dtype, ranks1, ranks2, ranks4):
    ids, decoded = ranks1.run(generated, model, dtype, SEGMENTS, LENGTH)[0]
    assert len({*ids.flatten().tolist()}) > LENGTH
    of_two = ranks2.run(generated, model, dtype, SEGMENTS, LENGTH)[0]
    assert all(map(torch.equal, of_two, (ids, decoded)))
    assert torch.equal(ranks4.run(scored, model, dtype, SEGMENTS, ids)[0], decoded)


def test_other_logprobs_depend_on_the_size_and_the_cache(ranks1, ranks4):
    ids, decoded = ranks1.run(generated, LLAMA, torch.bfloat16, 0, LENGTH)[0]
    assert not torch.equal(ranks4.run(scored, LLAMA, torch.bfloat16, 0, ids)[0], decoded)
    ids, decoded = ranks1.run(partial(generated, static=False), LLAMA, torch.float32, SEGMENTS, LENGTH)[0]
    trained = ranks4.run(scored, LLAMA, torch.float32, SEGMENTS, ids)[0]
    assert not torch.equal(trained, decoded)
    torch.testing.assert_close(trained, decoded, rtol=0, atol=1e-5)
