"""Layers and models with TP-invariance: the same bits at 1, 2 and 4 ranks, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fake_world import fake_rank
from tests.on_ranks import on_ranks
from tests.ops.invariant_cases import hash_of, whole_of
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import (
    GPT,
    ColumnParallelLinear,
    GPTConfig,
    GradientBuckets,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    ParallelState,
    RowParallelLinear,
    TransformerBlock,
    VocabParallelEmbedding,
    check,
    manual_seed,
    ops,
    use,
)
from tpkernels.groups.initialize import create_parallel_state, destroy_parallel_state
from tpkernels.groups.plan import plan_groups
from tpkernels.groups.state import ParallelStateError
from tpkernels.interop.parallelize import parallelize
from tpkernels.tp_invariance import VARIABLE

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {"max_positions": 16},
    "llama": {"num_kv_heads": 2, "ffn_hidden_size": 48, "activation": "swiglu", "norm": "rms_norm"},
    "one_key": {"num_kv_heads": 1, "tied": False},
    "one_layer": {"num_layers": 1, "num_kv_heads": 2, "norm": "rms_norm", "bias": False, "tied": False},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequential": {"overlap": False, "recompute": "selective"},
    "recomputed": {"recompute": "full"},
    "main_grad": {"gradient_accumulation_fusion": True},
}


@dataclass(frozen=True)
class Setting:
    shape: str = "gpt"
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    autocast: bool = False


def _hash(named: dict[str, Tensor | None]) -> dict[str, str]:
    return {name: hash_of(tensor) for name, tensor in named.items()}


def _whole_gradients(model: nn.Module, ids: int) -> dict[str, Tensor | None]:
    found = {}
    for name, parameter in model.named_parameters():
        dim = getattr(parameter, "partition_dim", 0)
        is_split = getattr(parameter, "tensor_model_parallel", False)
        both = [parameter.grad, getattr(parameter, "main_grad", None)]  # some layers fill either
        gradient = sum(each.float() for each in both if each is not None)
        gradient = whole_of((gradient, dim if is_split else None))
        is_table = name.split(".")[0] in ("embedding", "head")
        found[name] = gradient[:ids] if is_table and gradient is not None else gradient
    return found


@contextmanager
def tensor_ranks(count: int) -> Iterator[ParallelState]:
    """All ranks as one tensor-parallel group, with so many segments."""
    world = dist.get_world_size()
    with tp_invariance(count):
        state = create_parallel_state(plan_groups(world_size=world, tensor=world))
        with use(state):
            yield state
        destroy_parallel_state(state)


def steps_of_models(count: int, *settings: Setting) -> list[dict[str, str]]:
    """Two micro-batches through each, and hashes of losses and whole gradients."""
    found = []
    with tensor_ranks(count) as state:
        for setting in settings:
            sizes = {"vocab_size": 37, "hidden_size": 64, "num_layers": 2, "num_heads": 8}
            config = GPTConfig(**(sizes | SHAPES[setting.shape]))
            manual_seed(3)
            options = {"sequence_parallel": setting.sequence_parallel, "dtype": setting.dtype}
            model = GPT(config, state=state, **options, **setting.options)
            for parameter in model.parameters() if "gradient_accumulation_fusion" in setting.options else ():
                vars(parameter)["main_grad"] = torch.zeros_like(parameter, dtype=torch.float32)
            call = torch.compile(model, backend="aot_eager") if setting.compiled else model
            generator = torch.Generator().manual_seed(4)
            losses = []
            for _ in range(2):
                ids = torch.randint(0, 37, (2, 17), generator=generator)
                with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
                    loss = call(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
                loss.backward()
                losses.append(loss.detach())
            found.append(_hash({"losses": torch.stack(losses), **_whole_gradients(model, 37)}))
    return found


@once(
    shape=["gpt", "llama", "one_key"],
    dtype=[torch.float32, torch.bfloat16],
    sequence_parallel=[False, True],
    options=OPTIONS,
    autocast=[False, True],
)
def test_models_have_the_same_gradients_at_every_size(
    shape, dtype, sequence_parallel, options, autocast, ranks1, ranks2, ranks4
):
    setting = Setting(shape, dtype, sequence_parallel, options, autocast=autocast)
    plain, alone = ranks1.run(steps_of_models, 8, Setting(shape, dtype, autocast=autocast), setting)[0]
    if "gradient_accumulation_fusion" not in options:  # which adds in fp32
        assert alone == plain
    for ranks in (ranks2, ranks4):
        assert ranks.run(steps_of_models, 8, setting)[0] == [alone]


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        ("ranks2", torch.bfloat16),
        pytest.param("ranks2", torch.float32, marks=pytest.mark.sweep),
        pytest.param("ranks1", torch.bfloat16, marks=pytest.mark.sweep),
    ],
)
def test_compiled_models_have_the_same_gradients(ranks, dtype, ranks1, request):
    expected = ranks1.run(steps_of_models, 8, Setting("one_layer", dtype))[0]
    compiled = Setting("one_layer", dtype, sequence_parallel=True, compiled=True)
    assert request.getfixturevalue(ranks).run(steps_of_models, 8, compiled)[0] == expected


def test_models_differ_without_it(ranks1, ranks2):
    alone, two = (ranks.run(steps_of_models, 0, Setting())[0] for ranks in (ranks1, ranks2))
    assert alone != two


def masked_attention(count: int, by_head: bool) -> dict[str, str]:
    with tensor_ranks(count):
        manual_seed(3)
        attention = ParallelAttention(32, 8, num_kv_heads=4)
        drawn = torch.Generator().manual_seed(4)
        x = torch.randn(9, 2, 32, generator=drawn, requires_grad=True)
        mask = torch.randn(2, 8 if by_head else 1, 9, 9, generator=drawn)
        y, _ = attention(x, mask)
        y.sum().backward()
        return _hash({"y": y.detach(), "dx": x.grad, **_whole_gradients(attention, 0)})


@pytest.mark.parametrize("by_head", [False, True])
def test_masks_of_heads_follow_their_segments(by_head, ranks1, ranks2, ranks4):
    alone, *others = (ranks.run(masked_attention, 8, by_head)[0] for ranks in (ranks1, ranks2, ranks4))
    assert others == [alone, alone]


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "size": (lambda g: ColumnParallelLinear(8, 12, state=g), r"output_size \(12\) .* the 8 segments"),
    "depth": (lambda g: RowParallelLinear(12, 8, state=g), r"input_size \(12\) .* the 8 segments"),
    "stride": (lambda g: ColumnParallelLinear(8, 16, stride=2, state=g), "expected stride 1 .* got 2"),
    "bias": (
        lambda g: RowParallelLinear(
            8, 8, skip_bias_add=True, sequence_parallel=True, input_is_parallel=True, state=g
        ),
        "expected no skip_bias_add with sequence_parallel",
    ),
    "heads": (lambda g: ParallelAttention(24, 4, state=g), "num_heads: .* 8 segments of .*, got 4"),
    "keys": (
        lambda g: ParallelAttention(48, 24, num_kv_heads=6, head_size=4, state=g),
        "num_kv_heads: .* the 8 segments of TP-invariance, got 6",
    ),
    "dropout": (lambda g: TransformerBlock(32, 8, dropout=0.1, state=g), "dropout: expected 0 .* got 0.1"),
    "weights": (lambda g: TransformerBlock(32, 8, attention_dropout=0.1, state=g), "dropout: .* got 0.1"),
    "others": (lambda g: parallelize(nn.Linear(8, 8), g, plan={}), "expected TP-invariance to be off"),
}


@pytest.mark.parametrize(("build", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_layers_cannot_keep_is_refused_at_construction(build, expected):
    with tp_invariance(8), fake_rank(1, 2), pytest.raises(ValueError, match=expected):
        build(dist.group.WORLD)


@pytest.mark.parametrize(
    ("world", "segments", "shape"), [("ranks1", 8, (64, 4)), ("ranks2", 8, (32, 4)), ("ranks2", 0, (19, 4))]
)
@on_ranks()
def test_vocabularies_are_padded_to_segments_and_norms_add_their_own_gradients(segments, shape):
    """Where they do, nothing is left for ranks to add afterwards, nor may buckets be told so."""
    with tp_invariance(segments):
        norm = LayerNorm(8, sequence_parallel=True, state=dist.group.WORLD)
        assert norm.weight.sequence_parallel is (segments == 0)
        assert VocabParallelEmbedding(37, 4, state=dist.group.WORLD).weight.shape == shape
        marked = nn.Parameter(torch.ones(2))
        marked.sequence_parallel = True
        if segments and dist.get_world_size() > 1:
            with pytest.raises(ValueError, match="'mine' is marked sequence_parallel"):
                GradientBuckets([("mine", marked)], dist.group.WORLD, tensor_parallel_group=dist.group.WORLD)


@on_ranks(2)
def test_ranks_that_disagree_all_get_an_error():
    """Each asks for another number of segments: of a state, and of an op."""
    x, weight = torch.ones(8, 16), torch.ones(8, 16)
    with tp_invariance(8 if dist.get_rank() else 0):
        with pytest.raises((ParallelStateError, ValueError), match=f"{VARIABLE}=8"):
            create_parallel_state(plan_groups(world_size=2, tensor=2))
        with pytest.raises(ValueError, match=f"{VARIABLE}=8"):
            ops.row_linear(x, weight, None, dist.group.WORLD)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": partial(ColumnParallelLinear, 16, 32, gather_output=False),
    "row": partial(RowParallelLinear, 32, 16, input_is_parallel=True),
    "mlp": partial(ParallelMLP, 16, 64),
    "attention": partial(ParallelAttention, 16, 8, num_kv_heads=2, head_size=8),
    "norm": partial(LayerNorm, 16),
    "embedding": partial(VocabParallelEmbedding, 64, 16),
}


@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(2)
def test_layers_keep_the_segments_they_were_built_with(kind):
    """Whatever the default is when they compute, forward and backward."""

    def bits(built_in: int, computes_in: int, **given: int) -> dict[str, str]:
        torch.manual_seed(1)
        with tp_invariance(built_in):
            layer = LAYERS[kind](state=dist.group.WORLD, sequence_parallel=True, **given)
        x = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with tp_invariance(computes_in):
            y = layer((x.detach() * 9).long().abs() if kind == "embedding" else x)
            y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        named = {name: p.grad for name, p in layer.named_parameters()}
        return _hash({"y": y.detach(), "dx": x.grad, **named})

    invariant, plain = bits(8, 8), bits(0, 0)
    assert bits(8, 0) == bits(0, 8, tp_invariant=8) == invariant
    assert bits(0, 8) == bits(8, 8, tp_invariant=0) == plain
    assert invariant != plain or kind == "embedding", "else this proves nothing"


@on_ranks(2)
def test_layers_of_ranks_that_differ_and_mixed_models_are_told():
    rank = dist.get_rank()
    layer = RowParallelLinear(32, 16, input_is_parallel=True, state=dist.group.WORLD, tp_invariant=8 * rank)
    with pytest.raises(RuntimeError, match=r"left the common order of calls.* in 8 segments"):
        layer(torch.ones(8, 16))


@on_ranks(2)
def test_check_finds_layers_of_several_segments():
    build = partial(ColumnParallelLinear, 16, 32, state=dist.group.WORLD)
    model = nn.Sequential(build(tp_invariant=8), build())
    with pytest.raises(ValueError, match=r"one number of segments of TP-invariance, got \[0, 8\]"):
        check(model)
    check(nn.Sequential(build(tp_invariant=8), build(tp_invariant=8)))
