"""Models of torch's own layers, their plans, and what of them is compared with the unsharded ones."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.small import IDS, TARGETS
from tpkernels import GradientBuckets, finalize_gradients
from tpkernels.checkpoints.shards import shards_of, unwrapped
from tpkernels.interop.parallelize import trial
from tpkernels.interop.parallelize.plan import Divided, Split

STEPS = 3


class Block(nn.Module):
    """Attention whose heads are what is left of the features, and a gated MLP."""

    def __init__(self, heads=4):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 3 * 4 * heads)
        self.width = 4 * heads
        self.out = nn.Linear(4 * heads, 16)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x):
        heads = [
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(self.width, -1)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Toy(nn.Module):
    def __init__(self, tied=False, bias=True):
        super().__init__()
        self.embed = nn.Embedding(37, 16, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 37, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.blocks[1].down.weight.requires_grad_(False)
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "embed": "embedding",
    "blocks.*.qkv": Split("column", unit=4, stacked=3),
    "blocks.?": Divided("width"),
    "blocks.*.out": Split("row", unit=4),
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "head",
}


def toy(seed=3, **options):
    torch.manual_seed(seed)
    return Toy(**options).double()


class Attention(nn.Module):
    """Four heads, with norms of queries and keys; as in `transformers`, shapes are those of the input."""

    def __init__(self, scalar):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.scale = nn.Parameter(torch.rand(4))
        self.temperature = nn.Parameter(torch.full(() if scalar else (1,), 0.7))
        self.out = nn.Linear(16, 16)

    def forward(self, hidden_states, rotated):
        heads = *hidden_states.shape[:-1], -1, 4
        q, k, v = (layer(hidden_states).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q) * rotated * self.temperature, self.k_norm(k) * rotated
        y = F.scaled_dot_product_attention(q, k, v * self.scale, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


class MLP(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 24), nn.Linear(24, 16), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.down(F.gelu(self.up(x))))


class Mixture(nn.Module):
    """Experts that all take all tokens, in the proportions of a router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self, mlp, between, scalar):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(16), Attention(scalar)
        self.norm2, self.mlp = nn.LayerNorm(16), mlp
        self.between = between

    def forward(self, hidden_states, rotated):
        y, _ = self.attention(hidden_states=self.norm1(hidden_states), rotated=rotated)
        hidden_states = hidden_states + y
        if self.between is not None:
            hidden_states = self.between(hidden_states)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class Stack(nn.Module):
    """kind: gpt, mixture, tied, or what is wrong with it; scalar: of attentions' temperatures"""

    checkpointing: bool | None = None  # with use_reentrant

    def __init__(self, kind="gpt", scalar=True):
        super().__init__()
        self.kind = kind
        self.embed, self.positions = nn.Embedding(37, 16), nn.Embedding(8, 16)
        made = {"mixture": Mixture, "dropout inside": lambda: MLP(0.5)}.get(kind, MLP)
        between = {
            "mean": lambda x: x - x.mean(-2, keepdim=True),
            "dropout": nn.Dropout(0.5),
            "convolution": Convolution(),
        }.get(kind)
        self.layers = nn.ModuleList(Layer(made(), between, scalar) for _ in range(2))
        if kind == "twice":
            self.layers.append(self.layers[0])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 37, bias=kind != "tied")
        if kind == "tied":
            self.head.weight = self.embed.weight
            self.layers[1].mlp.down.weight.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        rotated = torch.arange(ids.shape[1]).add(1).to(x.dtype).cos()[:, None]
        for layer in reversed(self.layers) if self.kind == "backward" else self.layers:
            if self.checkpointing is None:
                x = layer(x, rotated=rotated)
            else:
                x = checkpoint(layer, x, rotated, use_reentrant=self.checkpointing)
        return self.head(self.norm(x))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


STACK_PLAN = {
    "embed": "embedding",
    "layers.*.attention.[qkv]": Split("column", unit=4),
    "layers.*.attention.out": Split("row", unit=4),
    "layers.*.mlp*.up": "column",
    "layers.*.mlp*.down": "row",
    "head": "head",
}


def stack(kind="gpt", scalar=True):
    torch.manual_seed(4)
    return Stack(kind, scalar).double()


def loss_of(model, ids=IDS, targets=TARGETS):
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def losses_of(model, how="plain", state=None, data=None):
    """Losses of some steps of AdamW.

    data: ranks with copies of the model, of which each takes a part of the batch
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    buckets = None
    if how == "buckets":
        dp, tp = (state.process_group(name) for name in ("dp", "tp"))
        buckets = GradientBuckets(model, dp, tensor_parallel_group=tp)
    parts = [slice(0, 1), slice(1, 2)] if how == "accumulated" else [slice(0, 2)]
    if data is not None:
        parts = [slice(data.rank(), data.rank() + 1)]
    losses = []
    for step in range(STEPS):
        if how == "frozen":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.endswith("q_norm.weight") or step > 1)
        buckets.zero() if buckets else optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            loss = loss_of(model, IDS[part], TARGETS[part]) / len(parts)
            loss.backward()
            total += loss.detach()
        if buckets:
            buckets.finish()
        if how == "finalized":
            finalize_gradients(model)
        optimizer.step()
        if data is not None:
            dist.all_reduce(total, group=data)
            total /= data.size()
        losses.append(total.item())
    return losses


@contextmanager
def sharings():
    """What shares tokens, of each model that is split inside."""
    kept, seen = trial.sharing_of, []
    with patch.object(trial, "sharing_of", lambda *args: seen.append(kept(*args)) or seen[-1]):
        yield seen


def assert_alike(split, whole, atol=1e-12, ids=IDS, targets=TARGETS):
    """Logits and gradients of the split model are those of the unsharded one."""
    ours, expected = (getattr(logits, "logits", logits) for logits in (split(ids), whole(ids)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
    for model in (split, whole):
        model.zero_grad()
        loss_of(model, ids, targets).backward()
    assert_gradients_alike(split, whole, atol)


def assert_gradients_alike(split, whole, atol=1e-12):
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    shards = shards_of(split)
    for name, parameter in unwrapped(split).named_parameters():
        part, gradient = shards[name], parameter.grad
        assert (gradient is None) == (expected[name] is None), name
        if gradient is None:
            continue
        reached = torch.zeros_like(gradient)
        for chunk, mark in zip(part.chunks(gradient), part.chunks(reached), strict=True):
            mark.view.fill_(1)
            torch.testing.assert_close(chunk.view, expected[name][chunk.where], rtol=0, atol=atol, msg=name)
        assert not gradient[reached == 0].any(), f"padding of {name}"
