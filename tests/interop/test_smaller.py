"""A model that is too large is compared as a smaller one of its class; what that lacks is named."""

import re
import warnings
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.interop.models import needs_transformers
from tests.interop.refused import refused_alike
from tests.interop.verify_cases import added_twice
from tests.on_ranks import on_ranks
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.interop.parallelize import trial
from tpkernels.interop.parallelize.hf_modules import RowLinear
from tpkernels.interop.parallelize.plan import Divided, Split
from tpkernels.interop.parallelize.smaller import smaller_of
from tpkernels.layers.attributes import Attributes


@dataclass
class Config:
    """Layers are of two kinds, of which the second comes late."""

    vocab_size: int = 1101
    hidden_size: int = 64
    intermediate_size: int = 256
    num_attention_heads: int = 4
    num_hidden_layers: int = 6
    layer_types: list[str] = field(default_factory=lambda: [*"aaabab"])
    pad_token_id: int = 1100


class Layer(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        hidden, self.heads, self.kind = config.hidden_size, config.num_attention_heads, kind
        self.norm = nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up = nn.Linear(hidden, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, hidden)

    def forward(self, x):
        h = self.norm(x)
        heads = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.kind == "a")
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "embed": "embedding",
    "layers.*.[qkv]": Split("column", unit=16),
    "layers.?": Divided("heads"),
    "layers.*.out": Split("row", unit=16),
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head": "head",
}


def large(**options):
    torch.manual_seed(2)
    return Model(Config(**options))


@contextmanager
def without_comparison():
    """As if the model were too large."""
    with patch.object(trial, "VERIFIED_PARAMETERS", 100_000):
        yield


def test_kinds_of_layers_and_padding_of_a_vocabulary_stay():
    model = large()
    smaller = smaller_of(model, 2, torch.device("cpu"))
    config = smaller.model.config
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (32, 128, 4)
    assert (config.vocab_size, config.layer_types) == (513, [*"aaab"])
    assert config.pad_token_id < 512
    assert smaller.name_of("layers.5.q.weight") == "layers.3.q.weight"
    assert smaller.name_of("layers.4.q.weight") == "layers.0.q.weight"
    assert model.config == Config()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_a_right_plan_passes_without_a_warning(sequence_parallel):
    initialize_model_parallel(2)
    model, drawn = large(), torch.get_rng_state()
    whole, ids = deepcopy(model), torch.arange(12).view(2, 6)
    with without_comparison(), warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model, plan=PLAN, sequence_parallel=sequence_parallel)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.testing.assert_close(model(ids), whole(ids))
    assert Attributes.of(model.layers[5].q.weight).tensor_model_parallel


@pytest.mark.parametrize("fault", ["plan", "layer"])
@on_ranks(2)
def test_a_wrong_plan_is_refused_and_the_module_named(fault):
    initialize_model_parallel(2)
    plan = PLAN if fault == "layer" else {name: said for name, said in PLAN.items() if name != "layers.?"}
    text = "the first module whose output differs is 'layers.0.out'"
    layers_fault = patch.object(RowLinear, "forward", added_twice) if fault == "layer" else nullcontext()
    with without_comparison(), layers_fault:
        refused_alike("ValueError", text, parallelize, large(), plan=plan)


def own_forward(model):
    model.layers[5].down.forward = nn.Linear(1, 1).forward


def hooked(model):
    model.layers[5].down.register_forward_hook(lambda *_: None)


def replaced(model):
    model.layers[1].norm = nn.RMSNorm(64)


class Fixed(Model):
    def __init__(self, config=None):
        assert config is None
        super().__init__(Config())


UNLIKE = {
    own_forward: "'layers.5.down' has a forward or hooks of its own",
    hooked: "'layers.5.down' has a forward or hooks of its own",
    replaced: "'layers.1.norm' (RMSNorm or LayerNorm)",
    Fixed: "Fixed(config) raises AssertionError",
}


@pytest.mark.parametrize("change", UNLIKE, ids=lambda change: change.__name__)
def test_what_a_smaller_model_cannot_stand_for_is_named(change):
    model = Fixed() if change is Fixed else large()
    if change is not Fixed:
        change(model)
    with pytest.raises(ValueError, match=re.escape(UNLIKE[change])):
        smaller_of(model, 2, torch.device("cpu"))


@on_ranks(2)
def test_a_model_is_not_compared_with_the_reason_told():
    initialize_model_parallel(2)
    model = large()
    replaced(model)
    with without_comparison(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, plan=PLAN)
    told = [str(warning.message) for warning in caught]
    assert len(told) == (dist.get_rank() == 0)
    assert all("a smaller Model does not stand for it: 'layers.1.norm'" in text for text in told)


LARGE = {
    "Llama": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_257},
    "Mixtral": {},
    "Qwen3Moe": {},
    "DeepseekV3": {},
    "Gemma2": {},
    "Gemma3": {},
    "GptOss": {},
    "OPT": {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"word_embed_proj_dim": 4096},
}
A_FEW = (("Llama", False), ("Mixtral", False), ("DeepseekV3", True))


def on_meta(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    cls = getattr(transformers, f"{kind}ForCausalLM")
    with torch.device("meta"):
        return cls(cls.config_class(**LARGE.get(kind, {})))


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "sequence_parallel"),
    [
        pytest.param(*each, marks=() if each in A_FEW else pytest.mark.sweep)
        for each in product(LARGE, (False, True))
    ],
)
@on_ranks(2)
def test_large_models_of_transformers_are_compared(kind, sequence_parallel):
    """At their real sizes, on the meta device: up to 671 thousand million parameters."""
    initialize_model_parallel(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallelize")
        parallelize(on_meta(kind), sequence_parallel=sequence_parallel)


@needs_transformers
@on_ranks(2)
def test_large_models_of_transformers_that_are_split_wrongly_are_refused():
    initialize_model_parallel(2)
    with patch.object(RowLinear, "forward", added_twice):
        text = "the first module whose output differs is 'model.decoder.layers.0.self_attn.out_proj'"
        refused_alike("ValueError", text, parallelize, on_meta("OPT"))
    text = "on tensor rank 0, it raises in 'model.layers.0', RuntimeError"
    refused_alike("ValueError", text, parallelize, on_meta("Gemma4"), sequence_parallel=True)
