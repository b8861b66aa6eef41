"""With TP-invariance a run is the same to the bit at every tensor-parallel size; otherwise it is not."""

import warnings
from dataclasses import replace

import pytest
import torch

from tests.ranks import RankPool
from tests.training.invariant_runs import answers, gradients, trained
from tpkernels.models.config import GPTConfig
from tpkernels.training.config import TrainConfig

LLAMA = GPTConfig(
    vocab_size=251,  # is padded
    hidden_size=32,
    num_layers=2,
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


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 120)) * 20)
    return TrainConfig(
        model=LLAMA,
        data=str(text),
        steps=STEPS,
        batch=4,
        tokens=16,
        accumulate=2,
        warmup=1,
        max_norm=0.5,  # less than the gradients' norm: it clips
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_is_the_same_at_every_size(model, dtype, config, ranks1, ranks2, ranks4):
    config = replace(config, model=MODELS[model], dtype=DTYPES[dtype])
    split = replace(config, sequence_parallel=True)
    expected = ranks1.run(trained, config, SEGMENTS)[0]
    assert min(expected.norms) > config.max_norm
    assert ranks2.run(trained, config, SEGMENTS)[0] == expected
    assert ranks2.run(trained, split, SEGMENTS)[0] == expected
    assert ranks4.run(trained, split, SEGMENTS)[0] == expected


def test_a_run_is_the_same_on_as_many_ranks_as_segments(config, ranks1):
    config = replace(config, dtype=torch.bfloat16)
    expected = ranks1.run(trained, config, SEGMENTS)[0]
    with RankPool(8) as ranks8:
        assert ranks8.run(trained, config, SEGMENTS)[0] == expected


@pytest.mark.parametrize(
    "changes", [{"recompute": "full"}, {"recompute": "selective"}, {"overlap": False}], ids=str
)
def test_what_is_computed_again_or_in_turn_changes_no_bit(changes, config, ranks1, ranks2):
    expected = ranks1.run(trained, config, SEGMENTS)[0]
    changed = replace(config, sequence_parallel=True, **changes)
    assert ranks2.run(trained, changed, SEGMENTS)[0] == expected


def test_a_run_goes_on_at_another_size(config, tmp_path, ranks1, ranks2, ranks4):
    config = replace(config, dtype=torch.bfloat16)
    expected = ranks1.run(trained, config, SEGMENTS)[0]
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


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence_parallel"])
def test_data_parallel_runs_are_the_same_too(sequence_parallel, config, ranks2, ranks4):
    config = replace(config, sequence_parallel=sequence_parallel)
    expected, other = (ranks.run(_of_two_data_ranks, config)[0] for ranks in (ranks2, ranks4))
    assert other == expected


def _of_two_data_ranks(config):
    return trained(config, SEGMENTS, tensor=torch.distributed.get_world_size() // 2)


def test_other_runs_depend_on_the_size(config, ranks1, ranks2, ranks4):
    """What the tests above would see. Losses agree within rounding only."""
    runs = [ranks.run(trained, config, 0)[0] for ranks in (ranks1, ranks2, ranks4)]
    assert len({run.sum for run in runs}) == 3
    assert len({run.norms for run in runs}) == 3
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_the_same_where_layers_add_to_main_grad(model, dtype, ranks1, ranks2, ranks4):
    expected, *others = (
        ranks.run(_fused, MODELS[model], DTYPES[dtype])[0] for ranks in (ranks1, ranks2, ranks4)
    )
    for found in others:
        differing = [name for name in expected if not torch.equal(expected[name], found[name])]
        assert differing == []


def _fused(model, dtype):
    ids = torch.randint(251, (2, 17), generator=torch.Generator().manual_seed(1))
    found = gradients(model, SEGMENTS, ids, dtype=dtype, gradient_accumulation_fusion=True)
    return {name: value for name, value in found.items() if name == "loss" or name.startswith("gradient")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_samples_are_the_same(model, dtype, ranks1, ranks2, ranks4):
    (logits, written), *others = (
        ranks.run(answers, MODELS[model], DTYPES[dtype], SEGMENTS)[0] for ranks in (ranks1, ranks2, ranks4)
    )
    for other_logits, other_written in others:
        assert torch.equal(logits, other_logits)
        assert torch.equal(written, other_written)
