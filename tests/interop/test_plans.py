"""Models are split without a plan of the caller's: by one that they bring, or by names of layers."""

import warnings
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.interop.refused import refused_alike
from tests.interop.torch_models import assert_alike
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.groups.sizes import split_heads
from tpkernels.interop.parallelize import trial
from tpkernels.interop.parallelize.hf_modules import is_linear
from tpkernels.interop.parallelize.plan import heads_read
from tpkernels.layers.attributes import Attributes

WIDTH, HEAD, HEADS = 16, 4, 4


@dataclass
class Config:
    num_attention_heads: int = HEADS
    qk_rope_head_dim: int = 4

    def get_text_config(self):
        return self


def attended(q, k, v, sinks=None):
    """Of (batch, tokens, features), in heads of `HEAD`; keys and values may have fewer of them."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    found = scores.softmax(-1)[..., : k.shape[2]] @ v
    return found.transpose(1, 2).flatten(2)


class Grouped(nn.Module):
    """Fewer heads of keys and values than ranks, and a number for each query head."""

    def __init__(self, kv_heads):
        super().__init__()
        self.head_dim = HEAD
        self.num_key_value_groups = HEADS // kv_heads
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, HEAD * kv_heads), nn.Linear(WIDTH, HEAD * kv_heads)
        self.k_norm = nn.LayerNorm(HEAD)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, HEAD))).repeat_interleave(
            self.num_key_value_groups, 2
        )
        v = self.v_proj(x).unflatten(-1, (-1, HEAD)).repeat_interleave(self.num_key_value_groups, 2)
        return x + self.o_proj(attended(self.q_proj(x), k.flatten(2), v.flatten(2), self.sinks))


class Packed(nn.Module):
    """Queries, keys and values of other sizes in one weight, parted by numbers of the config and its own."""

    def __init__(self, kv_heads):
        super().__init__()
        self.config, self.head_dim, self.num_key_value_heads = Config(), HEAD, kv_heads
        self.qkv_proj = nn.Linear(WIDTH, HEAD * (HEADS + 2 * kv_heads))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        keys = self.num_key_value_heads * HEAD
        sizes = (self.config.num_attention_heads * HEAD, keys, keys)
        return x + self.o_proj(attended(*self.qkv_proj(x).split(sizes, -1)))


class Latent(nn.Module):
    """Keys whose last features go to all heads as they are, the others through a column layer."""

    def __init__(self):
        super().__init__()
        self.head_dim = self.v_head_dim = HEAD
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv_a_proj_with_mqa, self.kv_b_proj = nn.Linear(WIDTH, 8 + HEAD), nn.Linear(8, WIDTH)

    def forward(self, x):
        low, turned = self.kv_a_proj_with_mqa(x).split((8, HEAD), -1)
        k = self.kv_b_proj(low)
        return x + self.o_proj(attended(self.q_proj(x), k + turned.repeat(1, 1, k.shape[-1] // HEAD), k))


class Normed(nn.Module):
    """A norm over all heads: every rank needs all of them."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q = self.q_norm(self.q_proj(x))
        return x + self.o_proj(attended(q, q, q))


class Experts(nn.Module):
    """Stacked experts, each with a gate, an identity among them, and biases."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * 24, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(3, WIDTH, 24) / 4)
        self.down_proj_bias = nn.Parameter(torch.randn(3, WIDTH))
        self.identity_expert = nn.Identity()

    def forward(self, x, chosen, share):
        gate, up = torch.einsum("btk,btok->bto", x, self.gate_up_proj[chosen]).chunk(2, -1)
        y = torch.einsum("btk,btok->bto", F.silu(gate) * up, self.down_proj[chosen])
        return (y + self.down_proj_bias[chosen] + self.identity_expert(x)) * share


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), Experts()

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        chosen = shares.argmax(-1)
        return x + self.experts(x, chosen, shares.gather(-1, chosen[..., None]))


class Packer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class ScaledTable(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


class Unusual(nn.Module):
    """Brings a plan."""

    def __init__(self, kv_heads=2):
        super().__init__()
        self.config = Config()
        self.embed_tokens = ScaledTable(37, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(
            [Grouped(1), Packed(kv_heads), Latent(), Normed(), Mixture(), Packer(), Grouped(2)]
        )
        self.lm_head = nn.Linear(WIDTH, 37, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        linear = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        grouped = linear | {"k_norm": "replicated_with_grad_allreduce", "sinks": "colwise"}
        self._tp_plan = {f"layers.{i}.{name}": style for i in (0, 6) for name, style in grouped.items()}
        self._tp_plan |= {"layers.0": "local_params", "layers.6": "local_params"}
        self._tp_plan |= {
            "layers.1.qkv_proj": "colwise_gather_output",
            "layers.1.o_proj": "rowwise_split_input",
            "layers.2.q_proj": "colwise",
            "layers.2.kv_a_proj_with_mqa": "mla_kv_a_proj",
            "layers.2.kv_b_proj": "colwise",
            "layers.2.o_proj": "rowwise",
            "layers.3.q_proj": "colwise_rep",
            "layers.3.o_proj": "rowwise_rep",
            "layers.*.experts": "moe_tp_experts",
            "layers.*.experts.gate_up_proj": "packed_colwise",
            "layers.*.experts.down_proj": "rowwise",
            "layers.*.experts.identity_expert": "moe_identity_expert",
            "layers.5.gate_up_proj": "colwise_gather_output",
            "layers.5.down_proj": "rowwise_split_input",
            "layers.*.no_such_layer": "colwise",
            "lm_head": "colwise_gather_output",
        }

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x) / 64  # about 1: what is compared differs by 1e-12 at most


def unusual(**options):
    torch.manual_seed(3)
    return Unusual(**options).double()


def split_by_its_own_plan(kv_heads):
    """The split model is the unsharded one; its weights go out, and back into another."""
    initialize_model_parallel(torch.distributed.get_world_size())
    whole = unusual(kv_heads=kv_heads)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallelize")  # none of its plans fails
        split = parallelize(deepcopy(whole))
    assert_alike(split, whole)
    marks = {name: Attributes.of(p) for name, p in split.named_parameters()}
    assert {name: Attributes.of(p) for name, p in deepcopy(split).named_parameters()} == marks
    assert sum(p.numel() for p in split.parameters()) < 0.8 * sum(p.numel() for p in whole.parameters())
    full = [full_state_dict(split)]
    torch.distributed.broadcast_object_list(full)
    expected = dict(whole.named_parameters())
    for name, p in expected.items():
        assert torch.equal(full[0][name], p), name
    other = parallelize(unusual(kv_heads=kv_heads).float().double())
    load_full_state_dict(other, full[0])
    for name, p in other.state_dict().items():
        assert torch.equal(p, split.state_dict()[name]), name


@on_ranks(2)
def test_it_is_built_without_memory():
    initialize_model_parallel(2)
    whole = unusual()
    with torch.device("meta"):
        split = unusual()
    parallelize(split).to_empty(device="cpu")
    load_full_state_dict(split, dict(whole.state_dict()))
    assert_alike(split, whole)


class Named(nn.Module):
    """Brings no plan; known by the names of its layers."""

    def __init__(self, wrong=False):
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.self_attn = Grouped(2)
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.middle = nn.LayerNorm(24) if wrong else nn.GELU()
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, ids):
        x = self.self_attn(self.embed(ids))
        return self.head(x + self.mlp.fc2(self.middle(self.mlp.fc1(x))))


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "next_plan_is_taken"])
@on_ranks(2)
def test_layers_are_known_by_their_names(wrong):
    initialize_model_parallel(2)
    torch.manual_seed(3)
    whole = Named(wrong).double()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        split = parallelize(deepcopy(whole))
    assert_alike(split, whole)
    assert bool(told) == (wrong and torch.distributed.get_rank() == 0)
    for each in told[:1]:
        assert "'middle' does not take this rank's features" in str(each.message)
        assert "a plan by names of layers (gathered) does" in str(each.message)


class Asking(Named):
    """Wants more than can be made up, and is judged by a call only."""

    def __init__(self):
        super().__init__()
        self.mlp.middle = nn.LayerNorm(24)

    def forward(self, ids, more):
        return super().forward(ids) + more


class Waves(Named):
    main_input_name = "waves"
    config = SimpleNamespace()


class Endless(Named):
    def forward(self, ids):
        return super().forward(ids) / 0


NO_INPUTS = "no inputs with which it runs could be made up. Pass verify="


class Crooked(Unusual):
    """What the plan says of it is wrong, for every name."""

    def forward(self, ids):
        read = self.layers[0].o_proj.weight.sum() + self.layers[5].down_proj.weight.sum()
        return super().forward(ids) + read


@on_ranks(2)
def test_unknown_styles_and_layers_are_refused():
    initialize_model_parallel(2)
    strange, unheard = unusual(), Named().double()
    strange._tp_plan["layers.5.down_proj"] = "sideways"
    narrow = nn.Sequential(nn.Embedding(37, WIDTH), nn.Linear(WIDTH, 37))
    torch.manual_seed(3)
    crooked = Crooked().double()
    before = deepcopy(crooked.state_dict())
    style = "'layers.5.down_proj': expected a style among all_reduce, colwise"
    nameless = "the model brings none and none of its layers is known by name"
    unlike = "the split model computes something else than the unsharded model"
    assert "got 'sideways'" in refused_alike("ValueError", style, parallelize, strange)
    refused_alike("ValueError", nameless, parallelize, narrow)
    said = refused_alike("ValueError", unlike, parallelize, crooked)
    assert "that were tried splits Crooked correctly. Pass a plan" in said[:100]
    first, *each = said.split("\n  - ")
    assert first.startswith(f"plan: none of the {len(each)} that were tried")
    assert first.endswith("the model is unchanged")
    assert all(one.startswith(("a plan by names of layers (", "the plan that the model")) for one in each)
    assert max(map(len, each)) < 500
    said = []
    uncalled = Asking().double(), {"plan": {"mlp.fc1": "column", "mlp.fc2": "row"}}
    unrunnable = "the unsharded model does not run with these inputs. Call it with them"
    cases = [
        (Asking().double(), {}, 2**27, NO_INPUTS),
        (*uncalled, 2**27, NO_INPUTS),
        (Waves(), {}, 2**27, NO_INPUTS),
        (unheard, {}, 100, "it has 2857 numbers, and a comparison takes 26 bytes for each; a smaller Named"),
        (Endless(), {}, 2**27, "with the inputs that were made up it raises an error. Pass verify="),
        (Endless(), {"verify": IDS}, 2**27, "not on these inputs. Pass others, with which"),
        (Asking(), {"verify": IDS}, 2**27, unrunnable),
    ]
    for model, options, most, lead in cases:
        with patch.object(trial, "VERIFIED_PARAMETERS", most):
            said.append(refused_alike("NotCompared", lead, parallelize, model, **options))
        assert lead in said[-1][:200]
    assert "with ((3, 5),) it raises TypeError" in said[0]
    assert "'mlp.middle.weight' is next to split layers" in said[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in crooked.state_dict().items())
    assert torch.is_tensor(crooked(IDS))


@pytest.mark.parametrize(
    ("ranks", "kv_heads"),
    [(2, 2), (4, 2), *(pytest.param(*each, marks=pytest.mark.sweep) for each in ((2, 1), (4, 4)))],
)
def test_a_model_that_brings_a_plan_is_the_whole_one(ranks, kv_heads, request):
    pool = request.getfixturevalue(f"ranks{ranks}")
    pool.run(split_by_its_own_plan, kv_heads)


class OfOwnWords(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class CutOff(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.001


class Added(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(()))  # a number that will not stay zero


@pytest.mark.parametrize(
    ("kind", "linear"),
    [(nn.Linear, True), (OfOwnWords, True), (CutOff, False), (Scaled, False), (Added, False)],
)
def test_a_derived_layer_is_linear_if_it_computes_what_a_linear_one_does(kind, linear):
    assert is_linear(kind(8, 12)) is linear


@pytest.mark.parametrize(
    ("heads", "queries", "ranks"),
    [
        *[(1, 4, 4), (2, 8, 4), (2, 8, 2), (3, 12, 2), (3, 12, 4), (6, 12, 4), (3, 6, 2)],
        *[
            (6, 6, 4),
            (3, 6, 4),
            (2, 6, 4),
            (1, 6, 4),
            (2, 14, 4),
            (4, 28, 8),
            (4, 28, 3),
            (2, 2, 8),
            (5, 15, 2),
        ],
    ],
)
def test_ranks_compute_as_many_heads_and_read_the_right_ones(heads, queries, ranks):
    counts, split = set(), split_heads(queries, ranks=ranks, kv_heads=heads)
    assert [query for rank in range(ranks) for query in split.heads_of(rank)] == list(range(queries))
    for rank in range(ranks):
        read = heads_read(rank, heads=heads, queries=queries, ranks=ranks)
        counts.add(len(read))
        for place, query in enumerate(split.heads_of(rank)):
            assert read[place * len(read) // split.slots] == query * heads // queries
    assert len(counts) == 1
