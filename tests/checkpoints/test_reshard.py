"""Weights that move between layouts arrive to the bit, and what cannot be moved is refused on all ranks."""

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.checks import error_of
from tests.interop.models import built
from tests.interop.nccl_messages import over_nccl
from tests.interop.refused import refused, refused_alike
from tests.live_bytes import LiveBytes
from tests.models.small import CONFIGS, IDS
from tests.on_ranks import of_all, on_ranks
from tests.products import once, pairwise
from tests.ranks import RankFailure, RankPool
from tpkernels import (
    GPT,
    ColumnParallelLinear,
    RowParallelLinear,
    create_parallel_state,
    plan_groups,
    reshard,
    use,
)
from tpkernels.checkpoints import reshard as reshard_
from tpkernels.checkpoints.reshard_plan import plan_of
from tpkernels.checkpoints.shards import TensorShard, shards_of
from tpkernels.interop.huggingface import to_huggingface
from tpkernels.interop.megatron import to_megatron

KINDS = ("llama", "gpt2", "odd")
WAYS = ("gloo", "nccl")


def over(tensor):
    """Tensor-parallel groups of neighbours, of the world."""
    return create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))


def built_over(kind, state, seed):
    """The same model for every number of tensor-parallel ranks."""
    if kind == "odd":
        with use(state):
            return built(kind, seed)
    torch.manual_seed(seed)
    return GPT(CONFIGS[kind], state=state)


def unequal(model, expected):
    """Names of tensors of which this rank has other bits, padding included."""
    found, wanted = shards_of(model), shards_of(expected)
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name].local, wanted[name].local)]


def moving_by(way):
    return over_nccl() if way == "nccl" else nullcontext()


@on_ranks(4)
def test_layouts_in_turn_have_equal_bits():
    states = {tensor: over(tensor) for tensor in (1, 2, 4)}
    for kind in KINDS:
        model = built_over(kind, states[4], seed=1)
        for tensor in (1, 2, 4):
            other = built_over(kind, states[tensor], seed=2)
            expected = built_over(kind, states[tensor], seed=1)
            assert unequal(other, expected)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.fill_(8)  # padding, too
            versions = [parameter._version for parameter in other.parameters()]
            moved = reshard(model, to=other)
            assert unequal(other, expected) == []
            assert all(p._version > old for p, old in zip(other.parameters(), versions, strict=True))
            received = sum(of_all(moved.received))
            assert (received > 0) == (tensor != 2)  # a rank of TP 1 holds all that it needs
            model = other


@on_ranks(2)
def test_later_calls_reuse_the_plan_wherever_tensors_lie():
    split, alone = over(2), over(1)
    source, target, expected = (built_over("llama", *each) for each in ((split, 1), (alone, 2), (alone, 1)))
    plan_of.cache_clear()
    moved = set()
    for _ in range(3):
        for parameter in (*source.parameters(), *expected.parameters()):
            parameter.data = parameter.detach() * 2
        moved.add(reshard(source, to=target))
        assert unequal(target, expected) == []
    assert (plan_of.cache_info().misses, len(moved)) == (1, 1)
    reshard(source, to=target, bucket_bytes=512)
    assert plan_of.cache_info().misses == 2


@once(way=WAYS, ranks=(((0, 1), (2, 3)), ((0, 1, 2, 3), (1, 2)), ((3,), (0, 1, 2, 3))))
@on_ranks(4)
def test_trainers_fill_generators(way, ranks):
    rank = dist.get_rank()
    trainers, generators = (dist.new_group(its) for its in ranks)
    model = built_over("llama", trainers, 1) if rank in ranks[0] else None
    other = built_over("llama", generators, 2) if rank in ranks[1] else None
    versions = [] if other is None else [parameter._version for parameter in other.parameters()]
    with moving_by(way):
        reshard(model, to=other)
    if other is not None:
        expected = built_over("llama", generators, 1)
        assert unequal(other, expected) == []
        assert all(p._version > old for p, old in zip(other.parameters(), versions, strict=True))
        drawn, wanted = (each.generate(IDS[:, :2], 4, top_k=1) for each in (other, expected))
        assert torch.equal(drawn, wanted)
    assert model is None or unequal(model, built_over("llama", trainers, 1)) == []


def sharded(mesh, seed):
    model = built_over("llama", mesh, seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@on_ranks(4)
def test_blocks_of_fsdp_move_to_tensor_parallel_ranks_and_back():
    mesh, state = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), over(4)
    model, other, back = sharded(mesh, 1), built_over("llama", state, 2), sharded(mesh, 3)
    reshard(model, to=other)
    assert unequal(other, built_over("llama", state, 1)) == []
    reshard(other, to=back)
    assert unequal(back, model) == []
    # DTensors of a state_dict do not say that they are of tensor-parallel shards
    name = next(name for name, shard in shards_of(back).items() if shard.dim is not None)
    held = {name: back.state_dict()[name]}
    into = {name: torch.zeros(held[name].shape)}
    assert refused("ValueError", "DTensors of several meshes", reshard, held, to=into)


@pytest.mark.parametrize("cast", [False, True])
@on_ranks(2)
def test_memory_stays_within_the_buckets(cast):
    bucket_bytes, buckets = 4096, 3
    world = dist.group.WORLD
    rows = ColumnParallelLinear(64, 512, state=world)  # 64 KiB a rank, 256 B a row
    columns = RowParallelLinear(64, 512, bias=False, state=world)
    weight = columns.weight.detach().to(torch.float64 if cast else torch.float32)
    source = {"weight": shards_of(rows)["weight"]}
    target = {"weight": shards_of(columns)["weight"].of(weight)}
    live = LiveBytes(rows.weight, weight)

    def counted(carried, *args, **options):
        with live:
            return carried(*args, **options)

    with patch.object(reshard_, "exchange", partial(counted, reshard_.exchange)):
        moved = reshard(source, to=target, cast=cast, bucket_bytes=bucket_bytes, buckets=buckets)
    assert (moved.received, moved.messages) == (32768, 2 * 32768 // bucket_bytes)
    assert bucket_bytes < live.peak <= buckets * bucket_bytes
    full = torch.cat(of_all(rows.weight.detach()))
    assert torch.equal(weight, full.chunk(2, dim=1)[dist.get_rank()].to(weight.dtype))


def die_while_sending():
    """The last rank is killed during a move: what the others are told, and what of the source has changed."""
    states = [over(tensor) for tensor in (4, 2)]
    model, other = built_over("llama", states[0], 1), built_over("llama", states[1], 2)
    expected = built_over("llama", states[0], 1)
    if dist.get_rank() == 3:
        reshard_.exchange = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
    kind, text = error_of(reshard, model, to=other)
    raise RuntimeError(f"{kind}: {text}: {unequal(model, expected)}")


def test_a_killed_rank_is_an_error_on_all_others_and_the_source_is_intact():
    with RankPool(4) as own, pytest.raises(RankFailure) as failure:
        own.run(die_while_sending)
    for rank in range(3):
        said = str(failure.value.exceptions[rank])
        assert (said[:21], said[-4:]) == ("RuntimeError: reshard", ": []"), said


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks_alike():
    rank, world = dist.get_rank(), dist.group.WORLD
    model, other = built_over("llama", world, 1), built_over("llama", world, 2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    half = built_over("llama", world, 2).to(torch.bfloat16)
    deep = GPT(replace(CONFIGS["llama"], num_layers=3), state=world)
    wide = GPT(replace(CONFIGS["llama"], ffn_hidden_size=32), state=world)
    lacking = {name: shard for name, shard in shards_of(other).items() if name != "norm.weight"}
    plain, full = {"weight": torch.zeros(4)}, {"weight": torch.zeros(8, 4)}
    linear = ColumnParallelLinear(4, 8, bias=False, state=world)
    held = shards_of(linear)
    turned = {"weight": replace(held["weight"], rank=1 - rank)}
    one = {"weight": torch.zeros(4)} if rank == 0 else None
    in_fp8 = {"weight": torch.zeros(4, dtype=torch.float8_e4m3fn)}
    in_whole_numbers = {"weight": torch.zeros(4, dtype=torch.int32)}
    calls = {
        "not in the model are ['blocks.2.attention.qkv.query.weight', ": (model, deep),
        "in `to` missing are ['norm.weight'], not in the model are nothing": (model, lacking),
        "'blocks.0.mlp.up.weight': expected (24, 16)": (model, wide),
        "pass cast=True to convert": (model, half),
        "torch.float32 and torch.float8_e4m3fn: they need scales": (one, in_fp8),
        "got torch.float32 and torch.int32": (one, in_whole_numbers),
        "no rank holds any tensor": (None, other),
        "no rank needs any tensor": (model, None),
        "rank 1 (32, 16) of torch.float32": (model, wide if rank else other),
        "ranks 0, 1 hold plain tensors": (plain, plain),
        "shares memory with 'weight'": (held, turned),
        "[4:8, 0:4], which no rank holds": (None if rank else linear, full),
    }
    for text, (source, to) in calls.items():
        refused_alike("ValueError", text, reshard, source, to=to, cast=to is in_fp8 or to is in_whole_numbers)
    refused_alike("ValueError", "one bucket of one byte", reshard, model, to=other, buckets=0)
    refused_alike("TypeError", "expected a model, a mapping", reshard, [model], to=other)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())
    reshard(model, to=other)  # all ranks still work


@on_ranks(2)
def test_mappings_of_tensors_move_and_the_same_memory_stays():
    rank = dist.get_rank()
    weight, mesh = torch.arange(12.0).view(6, 2), init_device_mesh("cpu", (2,))
    from_first = {"weight": weight} if rank == 0 else {}
    target = {"weight": DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False)}
    assert reshard(from_first, to=target).copied == (24 if rank == 0 else 0)
    assert torch.equal(target["weight"].to_local(), weight[3 * rank :][:3])
    full = {"weight": torch.zeros(6, 2)}
    reshard(target, to=full)
    assert torch.equal(full["weight"], weight)
    model = built_over("odd", over(2), 1)
    moved = reshard(model, to=model)
    assert (moved.received, moved.sent) == (0, 0)
    assert unequal(model, built_over("odd", over(2), 1)) == []


class FullyShardedDataParallel(nn.Linear):
    """Goes by the name of torch's, whose import takes seconds."""


class Scaled(nn.Linear):
    """Keeps a scale of its weight as layers in fp8 do."""

    def get_extra_state(self):
        return torch.ones(1)


def refusals_of_shards(rank):
    """(what is said, what is given, what it is to fill) where a shard is not what it seems."""
    full, twice = torch.arange(8.0).view(4, 2), ((range(4), range(4)),)
    fused = nn.Parameter(torch.zeros(6, 2))
    fused.tensor_model_parallel, fused.partition_dim, fused.partition_stride = True, 0, 3
    expert = nn.Linear(2, 4, bias=False)
    expert.weight.allreduce = False
    quantized = nn.Linear(2, 4, bias=False)
    quantized.weight.quant_state = object()
    merged = nn.Linear(2, 4, bias=False)
    merged.merged_adapters = ["default"]
    with torch.inference_mode():
        inferred = {"weight": torch.zeros(4, 2)}
    here = {"weight": full} if rank == 0 else None
    both = {"embed": full, "head": full + 1} if rank == 0 else None
    buffer, expanded = torch.zeros(12), torch.zeros(1, 2).expand(4, 2)
    overlapping = {"embed": buffer[:8].view(4, 2), "head": buffer[4:].view(4, 2)}
    sparse = full.to_sparse()
    repeated = TensorShard(torch.zeros(8, 2), (4, 2), 0, twice, 0, (0, 0))
    return {
        "ranges that do not overlap": (here, {"weight": repeated}),
        "3 weights in one": ({"weight": fused}, {"weight": torch.zeros(12, 2)}),
        "is of an expert": (expert, {"weight": torch.zeros(4, 2)}),
        "is wrapped by FullyShardedDataParallel": (FullyShardedDataParallel(2, 4), {"weight": full}),
        "made in inference mode": (here, inferred),
        "'embed' and 'head' are one memory, at": (both, overlapping),
        "several elements of 'weight' are one memory": (here, {"weight": expanded}),
        "elements of 'weight' are one memory, as": (here, {"weight": torch.zeros(5).unfold(0, 2, 1)}),
        "'' (Scaled) has extra state, such as": (Scaled(2, 4, bias=False), {"weight": full}),
        "'' has an adapter of peft merged": (merged, {"weight": full}),
        "'weight' is quantized by bitsandbytes": (quantized, {"weight": full}),
        "expected plain numbers, got Tensor torch.sparse_coo": ({"weight": sparse}, {"weight": full}),
        "'embed' and 'head' are one memory": (both, dict.fromkeys(("embed", "head"), torch.zeros(4, 2))),
    }


@on_ranks(2)
def test_shards_that_are_not_what_they_seem_are_refused():
    for text, (source, to) in refusals_of_shards(dist.get_rank()).items():
        refused_alike("ValueError", text, reshard, source, to=to)
    ranges = [[range(2)], [range(2, 4)]]  # as callers may write them
    half = TensorShard(torch.zeros(2, 2), (4, 2), 0, ranges, dist.get_rank(), [0, 0])
    reshard({"weight": torch.ones(4, 2)} if dist.get_rank() == 0 else None, to={"weight": half})
    assert half.local.eq(1).all()


@on_ranks(2)
def test_views_that_meet_in_part_or_read_other_numbers_are_refused_and_neighbours_filled():
    """Whatever their strides, and whether torch knows of the memory as one."""
    grid, array = torch.zeros(4, 6), np.zeros(12, np.float32)
    numbers, rounded = torch.complex(*torch.ones(2, 4)), torch.ones(4, dtype=torch.bfloat16)
    sharing = [
        (torch.from_numpy(array[:8]), torch.from_numpy(array[4:])),
        (numbers, numbers.conj()),
        (rounded, rounded.view(torch.float16)),
    ]
    for held, filled in sharing:
        source, to = {"weight": held} if dist.get_rank() == 0 else None, {"weight": filled}
        text = "'weight' shares memory with 'weight'"
        assert refused("ValueError", text, reshard, source, to=to, cast=not held.is_complex())
    for left, right, is_refused in (
        (grid[:, :4], grid[:, 2:], True),
        (grid[:3].t(), grid[2:].t(), True),
        (grid[:, :3], grid[:, 3:], False),
        (grid[:, ::2], grid[:, 1::2], False),
    ):
        given = {"left": left + 1, "right": right + 2} if dist.get_rank() == 0 else None
        move = partial(reshard, given, to={"left": left, "right": right})
        if is_refused:
            assert refused("ValueError", "'left' and 'right' are one memory", move)
            continue
        move()
        assert of_all([left.unique().tolist(), right.unique().tolist()]) == [[[1], [2]]] * 2
        grid.zero_()


def trained(model, seed):
    """An optimizer with two groups and a state, the same numbers for every number of ranks."""
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": ours[:3], "lr": 0.2 / seed}, {"params": ours[3:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1 / seed, weight_decay=0.5)
    for parameter in ours:
        parameter.grad = parameter.detach() * 3 + parameter.detach().square()  # zero for padding
    optimizer.step()
    return optimizer


class Sharding(torch.optim.SGD):
    """Keeps its state as ZeroRedundancyOptimizer does: in another optimizer."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.optim = torch.optim.AdamW(self.param_groups[0]["params"])


@on_ranks(2)
def test_options_move_but_those_of_how_an_optimizer_steps():
    """A learning rate that is a tensor becomes another one; a scale without dimensions has a state, too."""
    rank, state = dist.get_rank(), over(1)
    models = [nn.ParameterDict({"scale": torch.tensor(2.0), "weight": torch.ones(3)}) for _ in range(2)]
    (ours, theirs), (kept, resumed) = (
        models,
        (
            torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), foreach=foreach)
            for model, lr, foreach in zip(models, (0.5, 0.4), (False, None), strict=True)
        ),
    )
    if rank == 0:
        sum(parameter.sum() for parameter in ours.parameters()).backward()
        kept.step()

    def move(optimizer, to_optimizer):
        source = (ours, optimizer) if rank == 0 else (None, None)
        options = {"optimizer": source[1], "to_optimizer": to_optimizer, "state": state, "to_state": state}
        return reshard(source[0], to=theirs, **options)

    move(kept, resumed)
    (group,) = resumed.param_groups
    assert (group["foreach"], float(group["lr"])) == (None, 0.5)
    assert group["lr"] is not kept.param_groups[0]["lr"]
    assert [float(resumed.state[parameter]["step"]) for parameter in theirs.parameters()] == [1, 1]
    sharding = Sharding(theirs.parameters())
    assert refused("ValueError", "got Sharding, which keeps it in another optimizer", move, kept, sharding)
    kept.param_groups[0]["what"] = lambda: rank  # which no other process can take
    assert refused("RuntimeError", "pickle", move, kept, resumed)
    del kept.param_groups[0]["what"]
    move(kept, resumed)  # all ranks still work


def kept_by(optimizer):
    """What of an optimizer moves: options, and the state of each parameter."""
    groups = optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return options, [optimizer.state[parameter] for group in groups for parameter in group["params"]]


@on_ranks(2)
def test_optimizers_that_do_not_fit_are_refused_alike():
    model, other = (built_over("llama", dist.group.WORLD, seed) for seed in (1, 2))
    optimizer, resumed = trained(model, 1), trained(other, 2)
    before = resumed.param_groups[0]["lr"]
    one_group = torch.optim.AdamW(other.parameters())
    sgd = torch.optim.SGD([{"params": group["params"]} for group in resumed.param_groups], lr=1)
    for text, ours, theirs in (
        ("to_optimizer: expected an optimizer on at least one rank", optimizer, None),
        (": optimizer: expected an optimizer", None, resumed),
        ("parameter groups of [21] parameters", optimizer, one_group),
        ("that is not a parameter of the model", resumed, resumed),
        ("SGD has the options ['dampening'", optimizer, sgd),
    ):
        refused_alike("ValueError", text, reshard, model, to=other, optimizer=ours, to_optimizer=theirs)
    assert resumed.param_groups[0]["lr"] == before


THEIRS = {
    "huggingface": lambda full, config: to_huggingface(full),
    "megatron": lambda full, config: to_megatron(
        full, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, vocab_divisible_by=16
    ),
}


def shards_like(theirs, rank, ranks):
    """Empty shards of an engine whose ranks split matrices: by columns if rows are padded, else by rows."""
    shards = {}
    for name, full in theirs.items():
        dim = 1 if full.ndim == 2 and full.shape[0] % 16 == 0 else 0
        ranges = tuple((each,) for each in map(partial(_nth, full.shape[dim], ranks), range(ranks)))
        local = full[(slice(None),) * dim + (slice(ranges[rank][0].start, ranges[rank][0].stop),)]
        empty = torch.full_like(local.contiguous(), torch.nan)
        shards[name] = TensorShard(empty, tuple(full.shape), dim, ranges, rank, (0,) * full.ndim)
    return shards


def _nth(size, ranks, rank):
    return range(size * rank // ranks, size * (rank + 1) // ranks)


@pairwise(kind=("llama", "gpt2"), names=tuple(THEIRS), way=WAYS)
@on_ranks(4)
def test_an_engine_gets_its_own_names_and_shards(kind, names, way):
    rank, config = dist.get_rank(), CONFIGS[kind]
    trainers, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(4)][rank]
    model = built_over(kind, trainers, 1) if rank < 2 else None
    theirs = THEIRS[names](dict(built_over(kind, alone, 1).named_parameters()), config)
    target = shards_like(theirs, rank - 1, 3) if rank else None
    with moving_by(way):
        reshard(model, to=target, names=names)
    if rank:
        expected = {name: full.detach() for name, full in theirs.items()}
        for name, shard in target.items():
            held = shard.ranges[rank - 1][0]
            index = (slice(None),) * shard.dim + (slice(held.start, held.stop),)
            assert torch.equal(shard.tensor, expected[name][index]), name


@on_ranks(2)
def test_names_that_do_not_fit_are_refused_alike():
    world, rank = dist.group.WORLD, dist.get_rank()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model, full = built_over("llama", world, 1), dict(built_over("llama", alone, 1).named_parameters())
    theirs = {name: tensor.detach() for name, tensor in to_huggingface(full).items()}
    wrong = theirs | {"lm_head.weight": torch.zeros(38, 16)}
    surplus = theirs | {"model.extra": torch.zeros(1)}
    tied = built_over("gpt2", world, 1)
    expected = dict(built_over("gpt2", alone, 1).named_parameters())
    alias = {name: torch.zeros(each.shape) for name, each in to_huggingface(expected).items()}
    alias["lm_head.weight"] = alias["transformer.wte.weight"]
    calls = {
        "'lm_head.weight': expected (37, 16) in `to`, got (38, 16)": (model, wrong, "huggingface"),
        "`to` has also ['model.extra'], and lacks nothing": (model, surplus, "huggingface"),
        "and lacks ['embedding.word_embeddings.weight'": (model, theirs, "megatron"),
        "to take the numbers of heads from": (shards_of(model), theirs, "megatron"),
        "names: expected one of own, huggingface, megatron": (model, theirs, "vllm"),
    }
    for text, (source, to, names) in calls.items():
        refused_alike("ValueError", text, reshard, source, to=to, names=names)
    reshard(tied, to=alias, names="huggingface")
    assert torch.equal(alias["lm_head.weight"], expected["embedding.weight"])
