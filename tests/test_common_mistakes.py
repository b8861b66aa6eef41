"""The commonest mistakes: the first 200 characters of the error say what is wrong and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.checks import error_of
from tests.fake_world import fake_rank
from tests.on_ranks import on_ranks
from tpkernels import (
    ColumnParallelLinear,
    GradientBuckets,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_replicas,
    clip_grad_norm_,
    destroy_model_parallel,
    initialize_model_parallel,
    manual_seed,
    parallel_state,
    parallelize,
)
from tpkernels.checkpoints.full_state_dict import load_full_state_dict
from tpkernels.cli import main
from tpkernels.dispatch import backends
from tpkernels.interop import dcp, safetensors

FIRST = 200  # characters, which a terminal shows in two lines
Mistake = tuple[Callable[[], Any], str, str]  # what raises, what is wrong, what to do


def require_told(mistakes: Iterator[Mistake], at_least: int) -> None:
    """Each error says early what is wrong and what to do."""
    count = 0
    for mistake, wrong, cure in mistakes:
        count += 1
        beginning = error_of(mistake)[1][:FIRST]
        assert wrong in beginning
        assert cure in beginning
    assert count >= at_least


def command(arguments: str) -> None:
    """What a command that refuses says."""
    with redirect_stderr(StringIO()) as said, suppress(SystemExit):
        main(arguments.split())
    raise ValueError(said.getvalue())


def misspelt_backend() -> None:
    with patch.object(backends, "backend", "tritno"):
        backends.resolve_backend(torch.device("cpu"))


def before_initialization() -> Iterator[Mistake]:
    yield lambda: initialize_model_parallel(3), "world_size (4) is not divisible by", "choose sizes whose"
    yield lambda: initialize_model_parallel(0), "tensor_model_parallel_size", "a positive integer, got 0"
    yield (
        parallel_state.get_tensor_model_parallel_rank,
        "is not initialized",
        "call initialize_model_parallel",
    )
    yield (
        lambda: ColumnParallelLinear(4, 4),
        "state is not initialized",
        "call tpkernels.initialize_model_par",
    )
    yield lambda: manual_seed(1), "state is not initialized", "call tpkernels.initialize_model_parallel"
    yield misspelt_backend, "TPKERNELS_BACKEND is 'tritno'", "expected one of auto, torch, triton"
    yield lambda: command("plan --world-size 16 --tp 3"), "is not divisible by", "choose sizes whose product"
    yield lambda: command("plan --world-size 16 --order tp-zz"), "an unknown axis 'zz'", "known are tp, cp"
    yield (
        lambda: command("plan --world-size 16 --model llama9"),
        "got 'llama9'",
        "model: expected one of gpt2",
    )
    yield lambda: command("tune --shapes 1x1x1"), "no GPU here to time on", "--dry-run lists"


def one_rank_of_four() -> Iterator[Mistake]:
    """Tensor-parallel size 2."""
    state = initialize_model_parallel(2)
    x, full = torch.ones(2, 4), {"input_is_parallel": True, "sequence_parallel": True}
    column, model = ColumnParallelLinear(4, 4), nn.Sequential(nn.Linear(4, 4))
    fused = ColumnParallelLinear(4, 4, gradient_accumulation_fusion=True)
    table = VocabParallelEmbedding(8, 4)
    yield lambda: initialize_model_parallel(2), "already initialized", "call destroy_model_parallel() first"
    yield lambda: ColumnParallelLinear(4, 5), "output_size (5) is not divisible", "choose a multiple of 2"
    yield lambda: RowParallelLinear(5, 4), "input_size (5) is not divisible", "choose a multiple of 2"
    yield (
        lambda: ParallelAttention(12, 3),
        "num_heads",
        "expected a multiple of the 2 tensor-parallel ranks, got 3",
    )
    yield (
        lambda: RowParallelLinear(4, 4, sequence_parallel=True),
        "with sequence_parallel",
        "pass input_is_par",
    )
    yield lambda: ParallelMLP(4, 8, activation="relu6"), "got 'relu6'", "expected an activation of none, gelu"
    yield lambda: ColumnParallelLinear(4, 4, state="tp"), "got 'tp'", "expected a ParallelState, a process gr"
    yield lambda: state.process_group("tensor"), "unknown kind of group 'tensor'", "known are tp, cp"
    yield lambda: column(torch.ones(2, 5)), "got (2, 5)", "expected input (..., 4)"
    yield lambda: column(x.bfloat16()), "got x in torch.bfloat16", "use torch.autocast"
    yield lambda: RowParallelLinear(4, 4, input_is_parallel=True)(x), "(2, 4)", "input_is_parallel=False"
    yield lambda: RowParallelLinear(4, 4, **full)(torch.ones(3, 2)), "divisible by the 2", "pad the seq"
    yield lambda: fused(x), "expected weight.main_grad", "let GradientBuckets(..., main_grad=True)"
    yield lambda: table(x), "got torch.float32", "convert it"
    yield lambda: parallelize(model, plan={"1": "column"}), "'1' fits no module", "there are 0"
    yield lambda: parallelize(model, plan={"0": "colum"}), "got Split(kind='colum'", "expected one of column"
    yield lambda: parallelize(model), "none of its layers is known by name", "see docs/huggingface.md"
    yield lambda: parallelize(column, plan={"": "column"}), "fits no module", "there are "
    replaced = nn.Sequential(nn.Linear(4, 4, device="meta"))  # whose weights ranks do not compare
    optimizer = torch.optim.SGD(replaced.parameters(), lr=0.1)
    parallelize(replaced, plan={"0": "head"}, verify=False)
    yield optimizer.step, "optimizer has '0.weight'", "call parallelize first,"
    yield lambda: DistributedDataParallel(column)(x), "average different shards", 'state.process_group("dp")'
    yield (
        lambda: GradientBuckets(column, dist.group.WORLD),
        "average different shards",
        "pass the data-parallel",
    )
    yield lambda: GradientBuckets(column, None), "got None", "torch.distributed.group.WORLD holds all"
    yield (
        torch.optim.Adafactor([column.weight]).step,
        "takes the shard for the full parameter",
        "such as AdamW",
    )
    yield lambda: clip_grad_norm_([], -1.0), "got -1.0", "expected max_norm of 0 or more"
    destroy_model_parallel()
    yield lambda: column(x), "the tensor-parallel group was destroyed", "build layers again"


def two_ranks(folder: Path) -> Iterator[Mistake]:
    """They are tensor-parallel, then data-parallel."""
    rank = dist.get_rank()
    initialize_model_parallel(2)
    column, norm = ColumnParallelLinear(4, 4), RMSNorm(4, sequence_parallel=True)
    norm.weight.grad = torch.ones(4) + rank
    drifted = nn.Linear(2, 2)
    nn.init.constant_(drifted.weight, rank)
    safetensors.save(folder / "file.safetensors", column)
    yield (
        lambda: column(torch.ones(2, 4) + rank),
        "other data on the ranks",
        "give each the same batch, by a sam",
    )
    yield (
        lambda: clip_grad_norm_(norm.parameters(), 1.0),
        "different gradients",
        "call finalize_gradients(model",
    )
    yield (
        lambda: check_replicas(drifted),
        "'weight' differs between tensor-parallel",
        "a sampler over state.rank",
    )
    yield lambda: dcp.load(folder / "none", column), "there is no checkpoint", "none"
    yield (
        lambda: safetensors.save(folder / "file.safetensors", column),
        "there is something already",
        "remove it",
    )
    yield (
        lambda: load_full_state_dict(column, {"wieght": torch.ones(4, 4)}),
        "missing are",
        "expected the tensors",
    )

    destroy_model_parallel()
    initialize_model_parallel(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    buckets = GradientBuckets(model, dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward() -> None:
        model(torch.ones(2, 4)).sum().backward()

    yield lambda: copy.deepcopy(model), "cannot be copied", "detach()"
    yield lambda: GradientBuckets(model, dist.group.WORLD), "other GradientBuckets", "detach()"
    backward()
    yield optimizer.step, "an optimizer steps between a backward and finish()", "call finish() after the last"
    yield buckets.gradient_shards, "nothing is reduced yet", "call finish() first"
    optimizer.zero_grad()
    yield buckets.finish, "was changed, replaced or cleared", "call finish() first"
    buckets.zero()
    backward()
    buckets.finish()
    buckets.zero()
    backward()
    yield (
        backward,
        "received gradient 2 of this step, but 1 had been expected",
        "run all backwards but the last",
    )
    buckets.zero()
    model.late = nn.Linear(4, 4)
    model.late.weight.grad = torch.ones(4, 4)
    backward()
    yield buckets.finish, "'late.weight' is not reduced", "make new ones"
    buckets.detach()
    unlike = nn.Linear(4, 4)
    nn.init.constant_(unlike.weight, rank)
    begun = GradientBuckets(unlike, dist.group.WORLD)
    unlike(torch.ones(2, 4)).sum().backward()
    yield begun.finish, "begin with other weights on other ranks", "every rank must bring the same"


def test_mistakes_before_initialization():
    with fake_rank(1, 4):
        require_told(before_initialization(), at_least=10)


def test_mistakes_of_one_rank():
    with fake_rank(1, 4):
        require_told(one_rank_of_four(), at_least=20)


@on_ranks(2)
def test_mistakes_that_ranks_share(tmp_path):
    require_told(two_ranks(tmp_path), at_least=14)
