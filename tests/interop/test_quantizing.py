"""`parallelize(..., quantize=)`: products of split layers are in fp8, and all else is as it is without."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.checks import error_of
from tests.interop.split_cases import PLAN, Toy, loss_of
from tests.interop.test_architectures import GPT2, NO_IDS, SIZES
from tests.interop.test_sequence_parallel import PLAN as STACK_PLAN
from tests.interop.test_sequence_parallel import Stack
from tests.models.small import IDS
from tpkernels import Recipe, initialize_model_parallel, ops, parallelize
from tpkernels.interop.full_state_dict import full_state_dict
from tpkernels.interop.parallelize.quantizing import quantizable
from tpkernels.interop.parallelize.swaps import planned
from tpkernels.layers.world import tensor_world

PLAIN_PLAN = {name: said for name, said in PLAN.items() if name[-4:] not in (".qkv", ".out", "ks.?")}
Outcome = dict[str, Any]


def toy() -> Toy:
    torch.manual_seed(3)
    return Toy()


def stack() -> Stack:
    torch.manual_seed(4)
    return Stack()


class OnShards(nn.Module):
    """What ranks compute together of a layer that is split along its in_features, on one of them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = weight, bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        parts = zip(x.chunk(ranks, -1), self.weight.chunk(ranks, 1), strict=True)
        y = sum(ops.linear(own, weight, quantize=self.recipe) for own, weight in parts)
        return y if self.bias is None else y + self.bias


class Alone(OnShards):
    """Of any other layer: its rows have their scales wherever they are."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, quantize=self.recipe)


def in_fp8(split: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in split.named_modules() if getattr(m, "quantize", None) is not None}


def emulated(whole: nn.Module, split: nn.Module, recipe: Recipe) -> nn.Module:
    """The unsharded model, with the same products in fp8."""
    model = deepcopy(whole)
    for name, layer in in_fp8(split).items():
        old = model.get_submodule(name)
        weight = old.weight.t() if type(old).__name__ == "Conv1D" else old.weight
        kind = OnShards if type(layer).__name__.startswith("Row") else Alone
        model.set_submodule(name, kind(weight.detach(), old.bias, recipe))  # type: ignore[arg-type]
    return model


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def logits_of(model: nn.Module, **options: Any) -> Tensor:
    found: Any = model(IDS, **options)
    found = getattr(found, "logits", found)
    return found.detach()


def beside_the_unsharded(
    build: Callable[[], nn.Module], recipe: Recipe, plan: Any, sequence_parallel: bool = False
) -> Outcome:
    """How far logits are from those of the emulation, and from those without fp8; what is in fp8."""
    initialize_model_parallel(dist.get_world_size())
    whole = build()
    split = parallelize(deepcopy(whole), plan=plan, quantize=recipe, sequence_parallel=sequence_parallel)
    ours = logits_of(split)
    loss_of(split).backward()
    gradients = {name: p.grad for name, p in split.named_parameters()}
    plain = parallelize(deepcopy(whole), plan=plan, sequence_parallel=sequence_parallel)
    loss_of(plain).backward()
    norms = [(relative(gradients[n], p.grad), n) for n, p in plain.named_parameters() if p.grad is not None]
    full = full_state_dict(split)
    return {
        "emulated": relative(ours, logits_of(emulated(whole, split, recipe))),
        "unquantized": relative(ours, logits_of(whole)),
        "gradient": max(norms),
        "names": sorted(in_fp8(split)),
        "said": sum(f"quantize={recipe}" in m.extra_repr() for m in in_fp8(split).values()),
        "weights": [name for name, value in full.items() if not torch.equal(whole.state_dict()[name], value)],
    }


def of_toy(recipe: Recipe) -> Outcome:
    return beside_the_unsharded(toy, recipe, PLAN)


def of_stack(recipe: Recipe, sequence_parallel: bool) -> Outcome:
    return beside_the_unsharded(stack, recipe, STACK_PLAN, sequence_parallel)


def as_dtensors(recipe: Recipe) -> dict[str, bool]:
    """Whether logits and gradients are those of plain parameters, to the bit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain, split = (
        parallelize(toy(), mesh, plan=PLAIN_PLAN, quantize=recipe, as_dtensor=each) for each in (False, True)
    )
    found = {"logits": torch.equal(logits_of(split), logits_of(plain))}
    for model in (split, plain):
        loss_of(model).backward()
    for (name, ours), (_, other) in zip(split.named_parameters(), plain.named_parameters(), strict=True):
        if other.grad is not None and name.endswith("down.weight"):
            found[name] = torch.equal(ours.grad.to_local(), other.grad)  # type: ignore[attr-defined]
    return found


def compiled(recipe: Recipe) -> float:
    """How far logits of one graph are from those of the model."""
    initialize_model_parallel(dist.get_world_size())
    split = parallelize(toy(), plan=PLAN, quantize=recipe)
    torch._dynamo.reset()
    return relative(logits_of(torch.compile(split, backend="aot_eager", fullgraph=True)), logits_of(split))


def heads() -> dict[str, list[str]]:
    """What is in fp8 of plans that split the head in one way or another."""
    initialize_model_parallel(dist.get_world_size())
    found = {}
    tied = Toy(tied=True, bias=False)
    wide = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    cases: dict[str, tuple[nn.Module, Any, Recipe]] = {
        "gathered": (toy(), PLAN, Recipe.rowwise()),
        "asked for": (toy(), PLAN, Recipe.rowwise(head=True)),
        "tied": (tied, PLAN, Recipe.rowwise()),
        "column": (wide, {"0": "embedding", "[12]": "column"}, Recipe.rowwise()),
        "column, asked for": (wide, {"0": "embedding", "[12]": "column"}, Recipe.rowwise(head=True)),
    }
    for name, (model, plan, recipe) in cases.items():
        found[name] = quantizable(model, planned(model, plan, tensor_world()), recipe)
    return found


def refusals() -> list[tuple[str, str]]:
    initialize_model_parallel(dist.get_world_size())
    unlike: Any = Recipe.rowwise() if dist.get_rank() else Recipe.blockwise()
    said = [
        error_of(parallelize, toy(), plan=PLAN, quantize="rowwise"),
        error_of(parallelize, toy(), plan={"embed": "embedding", "head": "head"}, quantize=Recipe.rowwise()),
        error_of(parallelize, toy(), plan=PLAN, quantize=unlike),
        error_of(
            parallelize, toy(), plan={**PLAN, "blocks.*.down": "row_of_full"}, quantize=Recipe.rowwise()
        ),
    ]
    split = parallelize(toy().double(), plan=PLAN, quantize=Recipe.rowwise())
    return [*said, error_of(split, IDS)]


def of_transformers(kind: str, recipe: Recipe, sequence_parallel: bool = False) -> Outcome:
    """By the plan that `parallelize` takes."""
    name, _, one_key = kind.partition(" of one ")
    options = {"num_key_value_heads": 1} if one_key else {}
    return beside_the_unsharded(lambda: transformer(name, **options), recipe, None, sequence_parallel)


def transformer(name: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(2)
    sizes = GPT2 if name == "GPT2" else SIZES | options
    config = getattr(transformers, f"{name}Config")(**sizes, **NO_IDS)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return model


def mixture() -> list[str]:
    initialize_model_parallel(dist.get_world_size())
    model = transformer("Mixtral", num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2)
    return sorted(in_fp8(parallelize(model, quantize=Recipe.rowwise())))


BLOCK = ["down", "gate", "out", "qkv", "up"]
TOY = [f"blocks.{number}.{name}" for number in range(2) for name in BLOCK]
LAYER = ["attention.k", "attention.out", "attention.q", "attention.v", "mlp.down", "mlp.up"]
STACK = [f"layers.{number}.{name}" for number in range(2) for name in LAYER]


def check(found, names):
    assert found["names"] == names
    assert found["said"] == len(names)
    assert found["weights"] == []
    assert found["emulated"] < 2e-3  # sums in another order; few roundings to fp8 then go the other way
    assert 5e-3 < found["unquantized"] < 0.1
    assert found["gradient"] < (0.5, "")


def test_it_is_the_unsharded_model_with_the_same_products(ranks2):
    for found in ranks2.run(of_toy, Recipe.rowwise()):
        check(found, TOY)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all_tokens", "own_tokens"])
def test_so_it_is_where_ranks_share_tokens(sequence_parallel, ranks2):
    for found in ranks2.run(of_stack, Recipe.rowwise(), sequence_parallel):
        check(found, STACK)


def test_a_head_only_where_it_is_asked_for(ranks2):
    for found in ranks2.run(of_toy, Recipe.rowwise(head=True)):
        check(found, [*TOY, "head"])
    expected = {
        "gathered": TOY,
        "asked for": [*TOY, "head"],
        "tied": TOY,
        "column": ["1"],
        "column, asked for": ["1", "2"],
    }
    for found in ranks2.run(heads):
        assert {name: sorted(names) for name, names in found.items()} == expected


@pytest.mark.parametrize("recipe", [Recipe.rowwise(), Recipe.blockwise(head=True)], ids=str)
def test_parameters_may_be_dtensors(recipe, ranks2):
    for found in ranks2.run(as_dtensors, recipe):
        assert found == {"logits": True, "blocks.0.down.weight": True}


def test_it_is_one_graph(ranks2):
    assert max(ranks2.run(compiled, Recipe.rowwise(), timeout=180)) < 1e-2


def test_what_cannot_be_is_refused_on_all_ranks(ranks2):
    first, second = ranks2.run(refusals)
    assert first == second
    expected = [
        ("TypeError", "parallelize: expected quantize=tpkernels.Recipe.rowwise(), .blockwise() or None"),
        ("ValueError", "quantize: expected a plan that splits linear layers besides the head"),
        ("ValueError", "quantize=Recipe(scaling='blocks'"),
        ("ValueError", "'blocks.0.down'"),  # the comparison without fp8 finds a wrong plan
        ("TypeError", "expected x in bfloat16, float16 or float32 with quantize, got torch.float64"),
    ]
    for (kind, text), (expected_kind, part) in zip(first, expected, strict=True):
        assert (kind, part in text) == (expected_kind, True), text
