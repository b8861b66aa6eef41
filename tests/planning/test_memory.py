"""Memory is predicted as real models and a real trainer take it."""

import gc
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import is_fake

from tests.ops.transport_cases import under
from tests.patience import patient
from tests.planning.shapes import LLAMA, MODELS
from tests.products import once, pairwise
from tpkernels import GPT, create_parallel_state, initialize_model_parallel, plan_groups
from tpkernels.buckets.layout import ALIGNMENT
from tpkernels.comm import calls
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports import select
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import (
    MemoryUse,
    activations_of_stage,
    kept_by_block,
    kept_by_head,
    kept_by_rotation,
    memory_of,
    memory_of_stage,
    symmetric_memory,
)
from tpkernels.training.config import TrainConfig
from tpkernels.training.measures import least_bytes
from tpkernels.training.trainer import Trainer

TOKENS, BATCH = 32, 2
FEW = 17_500  # bytes of the text, three random streams, counters of steps


def job_of(model, **options):
    return Job(**{"model": model, "tokens": TOKENS, "batch": BATCH, "micro_batch": BATCH, **options})


def kept(module, *inputs):
    """Bytes that autograd holds besides parameters, memory that is shared counted once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(*inputs)
    assert y.requires_grad
    return sum(storages.values())


def kept_and_predicted(name, dtype, options):
    """What forward of a model keeps."""
    ranks = torch.distributed.get_world_size()
    initialize_model_parallel(ranks)
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    job = job_of(MODELS[name], element=dtype.itemsize, **options)
    expected = activations_of_stage(job, RankLayout(ranks, 1, 1), 0)
    if options["recompute"] == "full":  # what is computed again is there in backward only
        expected -= kept_by_block(replace(job, recompute="none"), ranks) - kept_by_block(job, ranks)
        expected -= kept_by_rotation(job)  # held as an argument, which hooks do not see
    with patch.object(TensorParallel, "fits_in_message", lambda self, shard: False):  # as at real sizes
        return kept(GPT(MODELS[name], dtype=dtype, **options), ids, ids), expected


@pairwise(
    name=["llama", "gpt2"],
    dtype=[torch.bfloat16, torch.float32],
    recompute=["full", "none", "selective"],
    sequence_parallel=[True, False],
    ranks=[4, 2, 1],
)
def test_a_model_keeps_what_is_predicted(name, dtype, recompute, sequence_parallel, ranks, request):
    options = {"recompute": recompute, "sequence_parallel": sequence_parallel}
    pool = request.getfixturevalue(f"ranks{ranks}")
    for held, predicted in pool.run(under, "c10d", "torch", kept_and_predicted, name, dtype, options):
        assert held == predicted


def alive():
    """The memory of tensors that Python knows, by its address; none of a tracer, nor of headers of calls."""
    gc.collect()
    every = gc.get_objects()
    headers = {id(thing.header) for thing in every if type(thing) is calls.Kind}
    found = [thing for thing in every if issubclass(type(thing), torch.Tensor) and id(thing) not in headers]
    tensors = [thing for thing in found if not is_fake(thing)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


def held_by_trainer(config, tensor):
    """(bytes between steps, of weights, of gradients, of the optimizer, parameters, buckets)"""
    before = alive()  # and held, so that nothing new takes its place
    with patch.object(calls, "EAGER_BYTES", 0):  # memory for messages is not the model's
        state = create_parallel_state(plan_groups(world_size=2, tensor=tensor))
        trainer = Trainer(config, state, torch.device("cpu"))
        trainer.step()
    buckets = trainer.optimizer.buckets.buckets
    optimizer = [*trainer.optimizer._shards]
    for states in trainer.optimizer._adam.state.values():
        optimizer += [states["exp_avg"], states["exp_avg_sq"]]
    parts = [list(trainer.model.parameters()), list(buckets), optimizer]
    weights, gradients, states = (sum(tensor.nbytes for tensor in part) for part in parts)
    deadline = time.monotonic() + patient(20.0)
    while True:  # gloo's threads let go of a finished collective a little after its wait
        now = alive() | {bucket.untyped_storage().data_ptr(): bucket.untyped_storage() for bucket in buckets}
        new = sum(memory.nbytes() for place, memory in now.items() if place not in before)
        if new <= weights + gradients + states + FEW or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return new, weights, gradients, states, len(parts[0]), len(buckets)


@once(tensor=[2, 1], name=["llama", "gpt2"], dtype=[torch.bfloat16, torch.float32])
def test_a_trainer_holds_what_is_predicted(tensor, name, dtype, ranks2, tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 120)) * 20)
    model = MODELS[name].with_sizes(vocab_size=256)
    layout = RankLayout(tensor, 1, 2 // tensor)
    predicted = memory_of(job_of(model, element=dtype.itemsize), layout)
    sizes = {"model": model, "steps": 2, "batch": 4, "tokens": 8, "dtype": dtype}
    config = TrainConfig(data=str(tmp_path / "text"), sequence_parallel=True, **sizes)
    needed = least_bytes(config, tensor, layout.data)
    for found in ranks2.run(under, "c10d", "torch", held_by_trainer, config, tensor):
        total, weights, gradients, optimizer, parameters, buckets = found
        padding = ALIGNMENT * (parameters + buckets * layout.data)
        assert weights == predicted.weights
        assert 0 <= gradients - predicted.gradients <= 4 * padding
        assert 0 <= optimizer - predicted.optimizer <= 12 * padding
        assert 0 <= total - (weights + gradients + optimizer) <= FEW
        assert total / 2 < needed <= total + predicted.activations


def test_stages_keep_micro_batches_until_their_backward():
    job = job_of(LLAMA.with_sizes(num_layers=4), batch=8, micro_batch=1)
    layout = RankLayout(1, 4, 1)
    block = kept_by_block(job, 1) + kept_by_rotation(job)
    found = [activations_of_stage(job, layout, stage) for stage in range(4)]
    assert found == [4 * (block + 8 * TOKENS), 3 * block, 2 * block, block + kept_by_head(job, 1)]
    few = replace(job, batch=2)  # fewer microbatches than stages
    assert activations_of_stage(few, layout, 1) == 2 * block


def test_states_are_split_over_data_ranks_and_the_fullest_stage_counts():
    job = job_of(LLAMA.with_sizes(num_layers=4), batch=8)
    one, four = (memory_of_stage(job, RankLayout(1, 1, data), 0) for data in (1, 4))
    assert (four.weights, four.gradients, four.activations) == (one.weights, one.gradients, one.activations)
    assert (four.optimizer, four.update) == (one.optimizer // 4, one.update // 4)
    stages = [memory_of_stage(job, RankLayout(1, 4, 1), stage) for stage in range(4)]
    assert memory_of(job, RankLayout(1, 4, 1)).peak == max(stage.peak for stage in stages)
    assert MemoryUse(1, 2, 4, 8, 16).peak == 23
    assert MemoryUse(1, 2, 4, 16, 8).peak == 23


def opened(name, sequence_parallel):
    """Bytes of the slots of all exchanges that a step of a model opens."""
    initialize_model_parallel(2)
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    GPT(MODELS[name], dtype=torch.bfloat16, sequence_parallel=sequence_parallel)(ids, ids).backward()
    exchanges = [each for own in select._of_group.values() for each in own._open.values()]
    return sum(memory.nbytes for exchange in exchanges for memory in exchange.memories)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_memory_that_ranks_share_is_predicted(name, sequence_parallel, ranks2):
    """Symmetric memory has the layout of shared memory."""
    job = job_of(MODELS[name], element=2, sequence_parallel=sequence_parallel)
    found = ranks2.run(under, "shared", "torch", opened, name, sequence_parallel)
    assert found == [symmetric_memory(job, 2)] * 2
    assert symmetric_memory(job, 1) == 0
