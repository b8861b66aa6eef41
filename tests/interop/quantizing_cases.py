"""What ranks run to see which products of a split model are in fp8, and that they are those of our ops."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.checks import error_of
from tests.interop.architecture_cases import GPT2, NO_IDS, SIZES
from tests.interop.sequence_cases import PLAN as STACK_PLAN
from tests.interop.sequence_cases import Stack
from tests.interop.split_cases import PLAN, Toy, loss_of
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
