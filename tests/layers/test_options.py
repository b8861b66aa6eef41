"""Options that layers share: by keyword or as one object, with the errors and the help of plain arguments."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch

from tests.layers.worlds import posing
from tests.test_package import mypy
from tpkernels import (
    GPT,
    ColumnParallelLinear,
    GPTConfig,
    LayerNorm,
    LayerOptions,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    TransformerBlock,
    VocabParallelEmbedding,
)

REPLICATED = ["sequence_parallel", "state", "device", "dtype", "tp_invariant"]
SPLIT = [*REPLICATED, "perform_initialization"]
ALL = [field.name for field in fields(LayerOptions)]
CONFIG = GPTConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, max_positions=4)
ROOT = Path(__file__).parents[2]
LAYERS = {  # sizes, and the keywords that a layer takes
    ColumnParallelLinear: ((8, 8), ALL),
    RowParallelLinear: ((8, 8), ALL),
    ParallelMLP: ((8, 16), ALL),
    ParallelAttention: ((8, 2), ALL),
    TransformerBlock: ((8, 2), ALL),
    GPT: ((CONFIG,), ALL),
    VocabParallelEmbedding: ((8, 8), SPLIT),
    RMSNorm: ((8,), REPLICATED),
    LayerNorm: ((8,), REPLICATED),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_signature_shows_each_keyword_with_its_default(layer):
    shown = inspect.signature(layer).parameters
    _, taken = LAYERS[layer]
    found = {name: shown[name].default for name in shown if name in ALL}
    assert found == {f.name: f.default for f in fields(LayerOptions) if f.name in taken}
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in [*found, "options"])
    assert not [p for p in shown.values() if p.kind is inspect.Parameter.VAR_KEYWORD]


@pytest.mark.parametrize("layer", LAYERS)
def test_other_keywords_are_refused_by_name(layer):
    sizes, taken = LAYERS[layer]
    for wrong in ["qantize", *(name for name in ALL if name not in taken)]:
        said = f"^{layer.__name__}.__init__\\(\\) got an unexpected keyword argument '{wrong}'$"
        with pytest.raises(TypeError, match=said):
            layer(*sizes, **{wrong: None})


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer is not GPT])  # which has its own
def test_a_config_of_megatron_is_refused_with_the_page(layer):
    sizes, _ = LAYERS[layer]
    with pytest.raises(TypeError, match=r"got config=.*megatron_core \(docs/megatron.md#our-layers-inside-"):
        layer(*sizes, config=object())
    titles = (ROOT / "docs" / "megatron.md").read_text()
    assert "\n## Our layers inside Megatron-Core\n" in titles


@pytest.mark.parametrize("layer", LAYERS)
def test_one_object_gives_all_layers_their_options(layer):
    sizes, _ = LAYERS[layer]
    options = LayerOptions(dtype=torch.float64, device="meta", perform_initialization=False)
    with posing(0, 2):
        built = layer(*sizes, **({"bias": False} if layer is RowParallelLinear else {}), options=options)
    assert {(p.dtype, p.device.type) for p in built.parameters()} == {(torch.float64, "meta")}


def test_a_keyword_overrides_its_field_alone():
    options = LayerOptions(dtype=torch.float64, overlap=False)
    with posing(0, 2):
        built = ColumnParallelLinear(8, 8, options=options, dtype=torch.bfloat16)
    assert built.weight.dtype == torch.bfloat16
    assert not built.overlap


def test_without_initialization_a_model_is_nan():
    with posing(0, 2):
        model = GPT(CONFIG, perform_initialization=False)
    drawn = [name for name, p in model.named_parameters() if "norm" not in name and not p.isnan().all()]
    assert drawn == []


def test_options_are_frozen_and_show_what_is_set():
    options = LayerOptions(overlap=False)
    with pytest.raises(FrozenInstanceError):
        options.overlap = True
    assert repr(options) == "LayerOptions(overlap=False)"


CALLS = {  # and the error of a type checker
    "ColumnParallelLinear(4, 4, True, overlap=False, state=None)": "",
    "ColumnParallelLinear(4, 4, overlap=1.5)": "arg-type",
    "ColumnParallelLinear(4, 4, qantize=None)": "call-arg",
    "VocabParallelEmbedding(4, 4, quantize=None)": "call-arg",
    "RMSNorm(4, options=3)": "arg-type",
}


@pytest.fixture(scope="module")
def said_by_mypy(tmp_path_factory):
    pytest.importorskip("mypy", reason="the type checker is not installed")
    program = "\n".join(["from tpkernels import *", *CALLS])
    return mypy(program, tmp_path_factory.mktemp("calls")).stdout


@pytest.mark.sweep
@pytest.mark.parametrize("call", CALLS)
def test_type_checkers_know_the_keywords(call, said_by_mypy):
    line = f"program.py:{list(CALLS).index(call) + 2}: error:"
    found = [said.rpartition("[")[2] for said in said_by_mypy.splitlines() if said.startswith(line)]
    assert found == ([f"{CALLS[call]}]"] if CALLS[call] else [])
