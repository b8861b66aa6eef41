"""Training: batches, the schedule, and that ranks of any kind and number learn the same."""

from __future__ import annotations

import hashlib
import math
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.bits.schedule import drawn, imposed
from tests.bench.planted_bits import order_of_arrival
from tests.checks import error_of
from tests.layers.test_watch import every
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.products import once
from tests.training.small import TINY, config_for, losses_of, trainer_for
from tpkernels import GPT, manual_seed
from tpkernels.buckets import gradients as buckets_module
from tpkernels.checkpoints import dcp
from tpkernels.comm import calls, schedule
from tpkernels.comm.transports import select
from tpkernels.training.config import learning_rate
from tpkernels.training.trainer import Excerpts, TokenFile


def test_bytes_of_a_text_are_its_ids(text):
    file = TokenFile(text)
    assert len(file) == 1760
    assert file.slices(torch.tensor([0, 87]), 3).tolist() == [[32, 33, 34], [119, 32, 33]]


@pytest.mark.parametrize(("suffix", "dtype"), [(".bin", torch.uint16), (".bin32", torch.int32)])
def test_numbers_of_a_file_are_its_ids(tmp_path, suffix, dtype):
    path = tmp_path / f"ids{suffix}"
    path.write_bytes(torch.tensor([5, 50256, 7], dtype=torch.int32).to(dtype).numpy().tobytes())
    assert TokenFile(path).slices(torch.tensor([0]), 3).tolist() == [[5, 50256, 7]]
    for content, said in ((b"abc", f"expected {dtype.itemsize} bytes an id in .* got 3"), (b"", "is empty")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            TokenFile(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is not a file"):
        TokenFile(path)


def test_batches_are_the_same_for_every_number_of_ranks(text):
    file = TokenFile(text)

    def whole(ranks, step):
        parts = [
            Excerpts(file, batch=8, tokens=5, seed=3, rank=r, ranks=ranks).at(step) for r in range(ranks)
        ]
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    ids, targets = whole(1, 4)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    for ranks in (2, 4, 8):
        assert all(torch.equal(a, b) for a, b in zip(whole(ranks, 4), (ids, targets), strict=True))
    assert not torch.equal(whole(1, 5)[0], ids)


def test_batches_that_cannot_be_are_told(text):
    file = TokenFile(text)
    with pytest.raises(ValueError, match="batch: expected a multiple of the 4 data-parallel ranks, got 6"):
        Excerpts(file, batch=6, tokens=5, seed=3, rank=0, ranks=4)
    with pytest.raises(ValueError, match=r"tokens: expected 1 to 1759, as .* has 1760 ids, got 1760"):
        Excerpts(file, batch=4, tokens=1760, seed=3, rank=0, ranks=4)


def test_rate_goes_up_in_a_line_and_down_half_a_cosine():
    rates = [learning_rate(s, steps=101, warmup=10, peak=1.0, floor=0.1) for s in range(120)]
    assert rates[:10] == pytest.approx([0.1 * (s + 1) for s in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100:] == [0.1] * 20
    assert rates[10:101] == sorted(rates[10:101], reverse=True)
    assert learning_rate(0, steps=1, warmup=0, peak=1.0, floor=0.1) == 0.1


def run(tensor, config):
    """Losses and norms of a few steps."""
    trainer = trainer_for(config, tensor)
    reports = [trainer.step() for _ in range(config.steps)]
    return [(report.loss, report.norm) for report in reports]


def by_hand(config):
    """The same with torch's own optimizer, clipping and loss, in one process."""
    with posing(0, 1):
        manual_seed(config.seed)
        model = GPT(config.model, dtype=config.dtype)
        file, sizes = TokenFile(config.data), {"batch": config.batch, "tokens": config.tokens}
        batches = Excerpts(file, **sizes, seed=config.seed, rank=0, ranks=1)
        decays = {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": config.weight_decay,
        }
        others = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
        adam = torch.optim.AdamW([decays, others], betas=(0.9, 0.95))
        found = []
        for step in range(config.steps):
            rate = learning_rate(
                step, steps=config.steps, warmup=config.warmup, peak=config.peak_rate, floor=config.floor_rate
            )
            for group in adam.param_groups:
                group["lr"] = rate
            adam.zero_grad()
            ids, targets = batches.at(step)
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            adam.step()
            found.append((loss.item(), norm.item()))
        return found


LAYOUTS = {4: [2, 4], 2: [2, 1], 1: [1]}  # ranks, and how many of them are tensor-parallel


@once(ranks=[*LAYOUTS], changes={"parts": {"accumulate": 2, "sequence_parallel": True}, "plain": {}})
def test_ranks_learn_what_one_process_learns(ranks, changes, text, request):
    expected = by_hand(config_for(text, steps=3))
    pool = request.getfixturevalue(f"ranks{ranks}")
    for tensor in LAYOUTS[ranks]:
        for found in pool.run(run, tensor, config_for(text, steps=3, **changes)):
            for (loss, norm), (true_loss, true_norm) in zip(found, expected, strict=True):
                # gradients are added and kept in fp32
                assert math.isclose(loss, true_loss, rel_tol=2e-6)
                assert math.isclose(norm, true_norm, rel_tol=2e-5)
    assert expected[-1][0] < expected[0][0]


@on_ranks(2)
def test_copies_that_drift_end_the_run(text, tmp_path):
    """What is said where a rank's copies have drifted apart: after a step, and before a checkpoint."""
    trainer = trainer_for(config_for(text))
    with every(2):
        trainer.step()
        with torch.no_grad():
            for shard in trainer.optimizer._shards:
                shard += 1e-3 * trainer.state.rank
        told = [error_of(trainer.step)]
    for kind, message in (*told, error_of(trainer.save, tmp_path)):
        assert kind == "RuntimeError"
        assert "after 2 steps of the optimizer (TPKERNELS_CHECK_REPLICAS=" in message
        assert "weight' differs between tensor-parallel ranks that hold copies of it" in message
    assert not list(tmp_path.glob("step-*"))


def begin(config, tensor, folder, steps):
    trainer = trainer_for(config, tensor)
    losses_of(trainer, steps)
    trainer.save(folder)
    return losses_of(trainer, 2)


def pass_on(config, tensor, taken, given):
    """Take a checkpoint, give another; what comes after it."""
    trainer = trainer_for(config, tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random streams of other ranks: nothing is drawn
        trainer.resume(dcp.latest(taken))
    trainer.save(given)
    return losses_of(trainer, 2)


ROUTES = {  # ranks and tensor-parallel ranks: at home, and abroad
    "tp1_tp2_tp1": ((1, 1), (2, 2)),
    "dp2_dp1_dp2": ((2, 1), (1, 1)),
    "tp2_tp2dp2_tp2": ((2, 2), (4, 2)),
    "tp2_tp4_tp2": ((2, 2), (4, 4)),
}


@once(route=ROUTES, dtype=[torch.float32, torch.bfloat16, torch.float64], steps=[3, 0])
def test_there_and_back_goes_on_to_the_digit(route, dtype, steps, text, tmp_path, request):
    (ranks, tensor), (others, other_tensor) = route
    home, abroad = (request.getfixturevalue(f"ranks{count}") for count in (ranks, others))
    config = config_for(text, dtype=dtype)
    undisturbed = home.run(begin, config, tensor, tmp_path / "a", steps)[0]
    elsewhere = abroad.run(pass_on, config, other_tensor, tmp_path / "a", tmp_path / "b")
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # sums are taken in another order
    assert elsewhere == [pytest.approx(undisturbed, rel=tolerance)] * others
    assert home.run(pass_on, config, tensor, tmp_path / "b", tmp_path / "c") == [undisturbed] * ranks


def in_buckets_from(smallest, run, *arguments):
    """(how many buckets there were, what `run` gives)"""
    made = []
    with patch.object(buckets_module, "SMALLEST_BUCKET_BYTES", smallest):
        lay_out = buckets_module.lay_out_buckets
        with patch.object(
            buckets_module, "lay_out_buckets", lambda *given: made.append(lay_out(*given)) or made[-1]
        ):
            losses = run(*arguments)
    return len(made[-1].elements), losses


def test_checkpoints_do_not_depend_on_sizes_of_buckets(text, tmp_path, ranks2):
    """They hold full tensors, so that runs go on from those that were made with buckets of other sizes."""
    config = config_for(text, dtype=torch.float32)
    few, undisturbed = ranks2.run(in_buckets_from, 2**40, begin, config, 1, tmp_path / "a", 1)[0]
    for many, losses in ranks2.run(in_buckets_from, 1, pass_on, config, 1, tmp_path / "a", tmp_path / "b"):
        assert losses == undisturbed
        assert (few, many) == (1, 4)


UNCUT_BYTES = 2**17
Digits = tuple[list[tuple[str, str]], str]  # loss and gradient norm of each step; a hash of the weights


def trained(
    path: Path, tensor: int, transport: str, seed: int, steps: int, mutant: bool = False, eager: bool = False
) -> Digits:
    """Each step under another schedule. eager: few rows travel with headers, and are multiplied at once"""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = TINY.with_sizes(num_kv_heads=4)
    options = {"accumulate": 2, "sequence_parallel": True, "dtype": torch.float32}
    config = config_for(path, model=model, steps=steps, **options)
    digits = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(select, "requested_transport", transport))
        # other tests cut even tiny shards in these processes, and transports cut unlike each other
        stack.enter_context(patch.object(schedule, "LEAST_BYTES", UNCUT_BYTES))
        if not eager:
            stack.enter_context(patch.object(calls, "EAGER_BYTES", 0))
        stack.enter_context(order_of_arrival() if mutant else nullcontext())
        trainer = trainer_for(config, tensor)
        for step in range(steps):
            with imposed(drawn(seed + step, "train", world), rank):
                report = trainer.step()
            digits.append((report.loss.hex(), report.norm.hex()))
    weights = hashlib.sha256()
    for parameter in trainer.model.parameters():
        weights.update(parameter.detach().contiguous().numpy().tobytes())
    return digits, weights.hexdigest()


def test_steps_under_other_loads_and_over_another_transport_have_equal_digits(ranks4, text):
    over_c10d, over_shared, by_arrival, *eager = (
        ranks4.run(trained, text, 4, *how)
        for how in (
            ("c10d", 1, 2),
            ("shared", 1001, 2),
            ("c10d", 1, 2, True),
            ("c10d", 1, 2, False, True),
            ("c10d", 1001, 2, False, True),
        )
    )
    assert over_c10d == over_shared
    assert all(len(set(digits)) == 2 for digits, _ in over_c10d)
    assert by_arrival != over_c10d  # sums in the order of arrival
    assert eager[0] == eager[1]
