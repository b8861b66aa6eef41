"""`parallelize(..., quantize=)`: products of split layers are in fp8, and all else is as it is without."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.interop.models import needs_transformers
from tests.interop.refused import refused_alike
from tests.interop.test_architectures import built
from tests.interop.torch_models import PLAN, STACK_PLAN, Toy, loss_of, stack, toy
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tpkernels import Recipe, initialize_model_parallel, ops, parallelize
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.interop.parallelize.changes import planned, quantizable
from tpkernels.layers.world import tensor_world

UNSTACKED = {name: said for name, said in PLAN.items() if name[-4:] not in (".qkv", ".out", "ks.?")}
LLAMA = [*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
INSIDE = {  # the layers, and what of each is in fp8
    "toy": ("blocks", ["down", "gate", "out", "qkv", "up"]),
    "stack": ("layers", [*(f"attention.{each}" for each in ("k", "out", "q", "v")), "mlp.down", "mlp.up"]),
    "Llama": ("model.layers", LLAMA),
    "Llama of one key": ("model.layers", LLAMA),
    "GPT2": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
}


def names_of(kind):
    layers, inside = INSIDE[kind]
    return sorted(f"{layers}.{number}.{name}" for number in range(2) for name in inside)


def model_and_plan(kind):
    """The model and its plan, or None for the one that `parallelize` takes."""
    if kind in ("toy", "stack"):
        return (toy().float(), PLAN) if kind == "toy" else (stack().float(), STACK_PLAN)
    name, _, one_key = kind.partition(" of one ")
    return built(name, **{"num_key_value_heads": 1} if one_key else {})[0], None


class OnShards(nn.Module):
    """What ranks compute together of a layer that is split along its in_features, on one of them."""

    def __init__(self, weight, bias, recipe):
        super().__init__()
        self.weight, self.bias, self.recipe = weight, bias, recipe

    def forward(self, x):
        ranks = dist.get_world_size()
        parts = zip(x.chunk(ranks, -1), self.weight.chunk(ranks, 1), strict=True)
        y = sum(ops.linear(own, weight, quantize=self.recipe) for own, weight in parts)
        return y if self.bias is None else y + self.bias


class Alone(OnShards):
    """Of any other layer: its rows have their scales wherever they are."""

    def forward(self, x):
        return ops.linear(x, self.weight, self.bias, quantize=self.recipe)


def in_fp8(split):
    return {name: m for name, m in split.named_modules() if getattr(m, "quantize", None) is not None}


def emulated(whole, split, recipe):
    """The unsharded model, with the same products in fp8."""
    model = deepcopy(whole)
    for name, layer in in_fp8(split).items():
        old = model.get_submodule(name)
        weight = old.weight.t() if type(old).__name__ == "Conv1D" else old.weight
        kind = OnShards if type(layer).__name__.startswith("Row") else Alone
        model.set_submodule(name, kind(weight.detach(), old.bias, recipe))
    return model


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def logits_of(model, **options):
    found = model(IDS, **options)
    found = getattr(found, "logits", found)
    return found.detach()


@pytest.mark.parametrize(
    ("kind", "head", "sequence_parallel"),
    [
        ("toy", False, False),
        ("toy", True, False),
        ("stack", False, False),
        ("stack", False, True),
        pytest.param("Llama", False, False, marks=needs_transformers),
        pytest.param("Llama", False, True, marks=needs_transformers),
        pytest.param("Llama of one key", False, False, marks=needs_transformers),
        pytest.param("GPT2", False, False, marks=needs_transformers),
    ],
)
@on_ranks(2)
def test_it_is_the_unsharded_model_with_the_same_products(kind, head, sequence_parallel):
    initialize_model_parallel(2)
    recipe, names = Recipe.rowwise(head=head), names_of(kind) + ["head"] * head
    whole, plan = model_and_plan(kind)
    split = parallelize(deepcopy(whole), plan=plan, quantize=recipe, sequence_parallel=sequence_parallel)
    assert sorted(in_fp8(split)) == names
    assert all(f"quantize={recipe}" in module.extra_repr() for module in in_fp8(split).values())
    ours = logits_of(split)
    # sums are in another order, so a few numbers are rounded to fp8 the other way
    assert relative(ours, logits_of(emulated(whole, split, recipe))) < 2e-3
    assert 5e-3 < relative(ours, logits_of(whole)) < 0.1
    plain = parallelize(deepcopy(whole), plan=plan, sequence_parallel=sequence_parallel)
    loss_of(split).backward()
    loss_of(plain).backward()
    for (name, p), (_, q) in zip(split.named_parameters(), plain.named_parameters(), strict=True):
        assert q.grad is None or relative(p.grad, q.grad) < 0.5, name
    for name, value in full_state_dict(split).items():
        assert torch.equal(whole.state_dict()[name], value), name


@pytest.mark.parametrize("recipe", [Recipe.rowwise(), Recipe.blockwise(head=True)], ids=str)
@on_ranks(2)
def test_dtensors_have_the_bits_of_plain_parameters(recipe):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain, split = (
        parallelize(toy().float(), mesh, plan=UNSTACKED, quantize=recipe, as_dtensor=each)
        for each in (False, True)
    )
    assert torch.equal(logits_of(split), logits_of(plain))
    for model in (split, plain):
        loss_of(model).backward()
    assert torch.equal(split.blocks[0].down.weight.grad.to_local(), plain.blocks[0].down.weight.grad)


@pytest.mark.sweep  # its layers and its ops are, and without fp8 the model
@on_ranks(2)
def test_it_is_one_graph():
    initialize_model_parallel(dist.get_world_size())
    whole = toy().float()
    del whole.blocks[1]  # which would be traced as the first is
    split = parallelize(whole, plan=PLAN, quantize=Recipe.rowwise())
    torch._dynamo.reset()
    graph = torch.compile(split, backend="aot_eager", fullgraph=True)
    assert relative(logits_of(graph), logits_of(split)) < 1e-2


@on_ranks(2)
def test_a_head_only_where_it_is_asked_for():
    initialize_model_parallel(dist.get_world_size())
    tied = Toy(tied=True, bias=False)
    wide = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    columns = {"0": "embedding", "[12]": "column"}
    cases = {
        "gathered": (toy(), PLAN, Recipe.rowwise()),
        "asked for": (toy(), PLAN, Recipe.rowwise(head=True)),
        "tied": (tied, PLAN, Recipe.rowwise()),
        "column": (wide, columns, Recipe.rowwise()),
        "column, asked for": (wide, columns, Recipe.rowwise(head=True)),
    }
    found = {
        name: sorted(quantizable(model, planned(model, plan, tensor_world()), recipe))
        for name, (model, plan, recipe) in cases.items()
    }
    plain, head = names_of("toy"), [*names_of("toy"), "head"]
    expected = {"gathered": plain, "asked for": head, "tied": plain}
    assert found == {**expected, "column": ["1"], "column, asked for": ["1", "2"]}


@on_ranks(2)
def test_what_cannot_be_is_refused_on_all_ranks():
    initialize_model_parallel(dist.get_world_size())
    rowwise = Recipe.rowwise()
    model, unlike = toy().float(), rowwise if dist.get_rank() else Recipe.blockwise()
    ends, wrong = {"embed": "embedding", "head": "head"}, {**PLAN, "blocks.*.down": "row_of_full"}
    recipes = "parallelize: expected quantize=tpkernels.Recipe.rowwise(), .blockwise() or None"
    layers = "quantize: expected a plan that splits linear layers other than the head"
    differ = "ranks disagree on quantize.scaling of parallelize: rank 0 has 'blocks'; rank 1 has 'rows'"
    refused_alike("TypeError", recipes, parallelize, model, plan=PLAN, quantize="rowwise")
    refused_alike("ValueError", layers, parallelize, model, plan=ends, quantize=rowwise)
    refused_alike("ValueError", differ, parallelize, model, plan=PLAN, quantize=unlike)
    # the comparison without fp8 finds a wrong plan
    refused_alike("ValueError", "'blocks.0.down'", parallelize, model, plan=wrong, quantize=rowwise)
    split = parallelize(toy(), plan=PLAN, quantize=rowwise)
    dtypes = "expected x in bfloat16, float16 or float32 with quantize, got torch.float64"
    refused_alike("TypeError", dtypes, split, IDS)


@needs_transformers
@on_ranks(2)
def test_experts_and_routers_are_not_in_fp8():
    initialize_model_parallel(dist.get_world_size())
    model, _ = built("Mixtral", num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2)
    split = parallelize(model, quantize=Recipe.rowwise())
    assert sorted(in_fp8(split)) == sorted(f"model.layers.0.{name}" for name in LLAMA[:4])


@needs_transformers
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_is_beside_products_in_fp8(when, ranks2):
    pytest.importorskip("peft", reason="peft is not installed")
    from tests.interop.test_lora import in_fp8_and_trained

    wrapped = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    expected = sorted(
        f"base_model.model.{name}.base_layer" if name.endswith(wrapped) else f"base_model.model.{name}"
        for name in names_of("Llama")
    )
    for names, losses, apart in ranks2.run(in_fp8_and_trained, when):
        assert names == expected
        assert losses[-1] < losses[0] - 0.05
        assert 1e-5 < apart < 0.02
