"""A model of torch's own layers, and what ranks run to split it and to compare it with the whole one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.checks import error_of
from tests.interop.refused import refused
from tests.models.small import IDS, TARGETS
from tpkernels import check_replicas, destroy_model_parallel, initialize_model_parallel, parallelize
from tpkernels.interop.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.interop.parallelize.plan import Divided, Split
from tpkernels.interop.shards import shards_of, unwrapped


class Block(nn.Module):
    """Attention whose heads are what is left of the features, and a gated MLP."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 3 * 4 * heads)
        self.width = 4 * heads
        self.out = nn.Linear(4 * heads, 16)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(self.width, -1)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Toy(nn.Module):
    def __init__(self, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 37, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.blocks[1].down.weight.requires_grad_(False)
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN: dict[str, Any] = {
    "embed": "embedding",
    "blocks.*.qkv": Split("column", unit=4, stacked=3),
    "blocks.?": Divided("width"),
    "blocks.*.out": Split("row", unit=4),
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "head",
}


def toy(seed: int = 3, **options: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**options).double()


def loss_of(model: nn.Module, ids: Tensor = IDS, targets: Tensor = TARGETS) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def losses_of(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def differences(split: nn.Module, whole: nn.Module, atol: float = 1e-12) -> list[str]:
    """Where logits or gradients of the two are not equal."""
    wrong = []
    ours, expected = (getattr(logits, "logits", logits) for logits in (split(IDS), whole(IDS)))
    if not torch.allclose(ours, expected, rtol=0, atol=atol):
        wrong.append("logits")
    for model in (split, whole):
        model.zero_grad()
        loss_of(model).backward()
    return wrong + wrong_gradients(split, whole, atol)


def wrong_gradients(split: nn.Module, whole: nn.Module, atol: float = 1e-12) -> list[str]:
    wrong = []
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    for name, parameter in unwrapped(split).named_parameters():
        part, gradient = shards_of(split)[name], parameter.grad
        if (gradient is None) != (expected[name] is None):
            wrong.append(f"{name} has a gradient")
        if gradient is None or expected[name] is None:
            continue
        reached = torch.zeros_like(gradient)
        for chunk, mark in zip(part.chunks(gradient), part.chunks(reached), strict=True):
            mark.view.fill_(1)
            if not torch.allclose(chunk.view, expected[name][chunk.where], rtol=0, atol=atol):
                wrong.append(name)
        if gradient[reached == 0].any():
            wrong.append(f"padding of {name}")
    return wrong


def split_alike(tensor: int) -> list[str]:
    """Every way to build and to split, against the whole model."""
    state = initialize_model_parallel(tensor)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("dp", "tp"))
    wrong = []
    for tied in (False, True):
        every = (None, state, mesh, mesh["tp"], state.process_group("tp"))
        for where in every if tensor == dist.get_world_size() == 2 and not tied else (mesh,):
            whole = toy(tied=tied, bias=not tied)
            names = [name for name, _ in whole.named_parameters()]
            split = parallelize(deepcopy(whole), where, plan=PLAN)
            wrong += differences(split, whole)
            if [name for name, _ in split.named_parameters()] != names:
                wrong.append("names")
            if tied and split.head.weight is not split.embed.weight:
                wrong.append("tie")
            if split.blocks[1].down.weight.requires_grad or not split.blocks[1].down.bias.requires_grad:
                wrong.append("frozen")
            check_replicas(split, state=where)
    gathered = full_state_dict(split)
    wrong += [name for name, value in gathered.items() if not torch.equal(value, whole.state_dict()[name])]
    drawn = toy(seed=dist.get_rank() % tensor)
    first = toy(seed=0)
    wrong += differences(parallelize(drawn, plan=PLAN, weights="broadcast"), first)
    with torch.device("meta"):
        later = Toy(bias=False).double()
    later = parallelize(later, plan=PLAN).to_empty(device="cpu")
    whole = toy(bias=False)
    load_full_state_dict(later, whole.state_dict())
    return wrong + differences(later, whole)


def compiled_copied_and_rounded() -> list[str]:
    """Also under autocast, and in bfloat16."""
    initialize_model_parallel(2)
    wrong = []
    whole = toy()
    split = parallelize(deepcopy(whole), plan=PLAN)
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    for model, reference in ((compiled, whole), (deepcopy(split), whole)):
        wrong += differences(model, reference)
    wrong += wrong_gradients(split, whole)
    single, half = toy().float(), toy().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        wrong += rounded_apart(parallelize(deepcopy(single), plan=PLAN), single)
    return wrong + rounded_apart(parallelize(deepcopy(half), plan=PLAN), half)


def rounded_apart(split: nn.Module, whole: nn.Module) -> list[str]:
    ours, expected = split(IDS), whole(IDS)
    alike = ours.dtype == expected.dtype and torch.allclose(ours, expected, rtol=0, atol=0.03)
    return [] if alike else [f"{expected.dtype} off by {(ours - expected).abs().max()}"]


def memory_of_shards() -> list[int]:
    """Bytes that parameters hold, and those of what they are views of."""
    initialize_model_parallel(dist.get_world_size())
    split = parallelize(toy(), plan=PLAN)
    return [
        sum(parameter.nbytes for parameter in split.parameters()),
        sum(parameter.untyped_storage().nbytes() for parameter in split.parameters()),
    ]


def like_parallelize_module() -> list[str]:
    """Logits and gradients, against torch's own way on the same weights."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    plan = {"*.gate": "column", "*.up": "column", "*.down": "row"}
    theirs = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    ours, other = (Toy().double() for _ in range(2))
    other.load_state_dict(ours.state_dict())
    parallelize(ours, mesh, plan=plan, weights="broadcast")
    for tensor in other.state_dict().values():
        dist.broadcast(tensor, 0)
    for block in other.blocks:
        parallelize_module(block, mesh, theirs)
    wrong = [] if torch.allclose(ours(IDS), other(IDS), rtol=0, atol=1e-12) else ["logits"]
    for model in (ours, other):
        loss_of(model).backward()
    for (name, mine), (_, their) in zip(ours.named_parameters(), other.named_parameters(), strict=True):
        expected = their.grad.to_local() if isinstance(their.grad, DTensor) else their.grad
        if mine.grad is None or not torch.allclose(mine.grad, expected, rtol=0, atol=1e-12):
            wrong += [] if mine.grad is expected is None else [name]
    return wrong


def data_parallel(wrapper: str) -> list[str]:
    """Two copies of a model that two ranks share each: loss and gradients of the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = toy()
    loss_of(whole).backward()
    split = parallelize(toy(), mesh, plan=PLAN)
    plain = deepcopy(split)
    own = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    if wrapper == "ddp":
        model: nn.Module = DistributedDataParallel(split, process_group=mesh.get_group("dp"))
    else:
        for block in split.blocks:
            fully_shard(block, mesh=mesh["dp"])
        model = fully_shard(split, mesh=mesh["dp"])
    wrong = []
    for _ in range(2):  # gradients are reduced and shards freed each time
        model.zero_grad()
        loss = loss_of(model, IDS[own], TARGETS[own])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        if not torch.allclose(mean / 2, loss_of(whole).detach(), rtol=0, atol=1e-12):
            wrong.append("loss")
    for (_, to), parameter in zip(plain.named_parameters(), split.parameters(), strict=True):
        gradient = parameter.grad
        to.grad = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return wrong + wrong_gradients(plain, whole)


def refuse() -> list[str]:
    """What is said of plans and models that do not fit, after which nothing is swapped."""
    initialize_model_parallel(2)
    rank = dist.get_rank()
    model = toy()
    before = [type(module) for module in model.modules()]
    hooked, bare, stepped = toy(), toy(tied=True), toy()
    hooked.head.register_forward_hook(lambda *_: None)
    torch.manual_seed(1)
    odd = nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.Embedding(4, 2, max_norm=1.0)})
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    single = nn.ModuleDict({"a": nn.Linear(4, 8)})
    parallelize(single, plan={"a": "column"})
    inner, outer = toy(), DistributedDataParallel(toy())
    keeps_it = DistributedDataParallel(inner)
    dropped = DistributedDataParallel(deepcopy(inner)).module
    steps_it = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(stepped.parameters()), 1)
    torch.optim.lr_scheduler.StepLR(torch.optim.SGD(dropped.parameters()), 1)
    of_outer = {f"module.{pattern}": entry for pattern, entry in PLAN.items()}
    wrapped = "DistributedDataParallel has not wrapped, but it has wrapped"
    unlike = (model, {"head": "head"}) if rank else (odd, {"a": "head"})
    divides = "that 2 ranks x unit 1 x stacked 1 = 2 divides, got"
    values: list[tuple[nn.Module, Any, str]] = [
        (model, {}, "plan: expected at least one pattern"),
        (model, {"blocks.*.gates": "column"}, "'blocks.*.gates' fits no module; there are embed, blocks"),
        (model, {"*.up": "column", "*.0.up": "row"}, "'blocks.0.up' fits both '*.up' and '*.0.up'"),
        (model, {"*.up": "columns"}, "'*.up': expected one of column, row, row_of_full, head, embedding"),
        (model, {"*.up": Split("row", stacked=2)}, "a positive unit, and stacked > 1 for a column only"),
        (odd, {"a": "column"}, f"'a': expected out_features {divides} 7"),
        (odd, {"a": "row"}, f"'a': expected in_features {divides} 5"),
        (odd, {"b": "embedding"}, "'b': expected an nn.Embedding without max_norm"),
        (model, {"*.out": Split("row", unit=16)}, "'blocks.0.out': expected in_features that 2 ranks x"),
        (model, {"blocks.?": Divided("height")}, "'blocks.0.height': expected a number that 2 ranks"),
        (hooked, PLAN, "'head': expected a module without hooks or"),
        (bare, {"embed": "embedding"}, "'head' shares a weight with 'embed', and must be split as that is"),
        (toy(seed=rank), PLAN, "'embed.weight': expected the same weights on all tensor-parallel ranks"),
        (outer, of_outer, f"{wrapped} 'module.embed.weight'"),
        (inner, PLAN, f"{wrapped} 'embed.weight', and"),
        (stepped, PLAN, "expected a model without optimizer, but one has 'embed.weight', and would go on"),
        (model, PLAN if rank else {"head": "head"}, "ranks disagree"),
        (*unlike, "ranks disagree"),
    ]
    kinds: list[tuple[nn.Module, Any, str]] = [
        (
            model,
            {"blocks.0.*": "column"},
            "'blocks.0.norm': expected an nn.Linear for 'column', got",
        ),
        (model, {"embed": "head"}, "'embed': expected an nn.Linear for 'head', got Embedding"),
        (single, {"a": "column"}, "for 'column', got ColumnLinear; it is split already"),
        (encoder, {"0.linear?": "column"}, "expected a module that its parent calls, but '0', an nn.Tr"),
    ]
    said = [
        refused(kind, part, parallelize, each, plan=plan)
        for kind, cases in (("ValueError", values), ("TypeError", kinds))
        for each, plan, part in cases
    ]
    said.append(refused("ValueError", "got 'ignore'", parallelize, model, plan=PLAN, weights="ignore"))
    assert [type(module) for module in model.modules()] == before
    for each in (model, dropped):
        parallelize(each, plan=PLAN)
    assert keeps_it.module is inner
    assert steps_it.optimizer.param_groups
    return said


def huggingface_alike(config_of: dict[str, dict[str, Any]], tensor: int) -> list[str]:
    """Models of `transformers`, split by the ready plans."""
    import transformers

    from tpkernels.interop.huggingface import gpt2_plan, llama_plan

    initialize_model_parallel(tensor)
    wrong = []
    for kind, sizes in config_of.items():
        torch.manual_seed(2)
        if kind == "llama":
            config = transformers.LlamaConfig(**sizes)
            whole: nn.Module = transformers.LlamaForCausalLM(config)
            plan = llama_plan(config)
        else:
            config = transformers.GPT2Config(**sizes)
            whole = transformers.GPT2LMHeadModel(config)
            plan = gpt2_plan(config)
        whole = whole.double()
        split = parallelize(deepcopy(whole), plan=plan)
        wrong += [f"{kind}: {name}" for name in differences(split, whole)]
        greedy = [model.generate(IDS[:, :3], max_new_tokens=4, do_sample=False) for model in (split, whole)]
        if not torch.equal(*greedy):
            wrong.append(f"{kind}: text")
        gathered = full_state_dict(split)
        if not all(torch.equal(value, whole.state_dict()[name]) for name, value in gathered.items()):
            wrong.append(f"{kind}: whole weights")
    destroy_model_parallel()
    if tensor == 4:
        initialize_model_parallel(4)
        narrow = transformers.LlamaConfig(**{**config_of["llama"], "num_key_value_heads": 2})
        problem = error_of(parallelize, transformers.LlamaForCausalLM(narrow), plan=llama_plan(narrow))
        if "k_proj': expected out_features that 4 ranks x unit 4" not in problem[1]:
            wrong.append(str(problem))
    return wrong
