"""What `tune --shapes` names: layers by their sizes, and models whose layers are split over ranks.

    8192x4096x4096                        a layer: tokens x out_features x in_features
    model:llama3-8b,tp:8,tokens:4096      the layers of a model on one of 8 tensor-parallel ranks

Items are separated by commas; `tp:` and `tokens:` are of the model before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer, Primitive
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.kernels.activations import GATE_OF, Activation, Glu
from tpkernels.models.config import MODELS, GPTConfig
from tpkernels.ops.vocab.chunked_head import LEAST_TOKENS
from tpkernels.planning.job import Job, Layout

Call = tuple[Primitive[..., Any], tuple[Any, ...]]  # a primitive and its arguments
TOKENS = 8192  # of all sequences that a rank computes at once


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> GPTConfig:
    """Of its sizes. Its biases, of queries, keys and values alone, are BIASED_QKV's."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads}
    return MODELS["llama3-8b"].with_sizes(vocab_size=152064, ffn_hidden_size=ffn, norm_eps=1e-6, **sizes)


BIASED_QKV = {"qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944), "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648)}
TUNED = {**MODELS, **BIASED_QKV}


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model on ranks."""

    name: str
    tensor: int = 1
    tokens: int = TOKENS

    def __str__(self) -> str:
        return f"{self.name} on {self.tensor} tensor-parallel ranks, {self.tokens} tokens at once"


def parsed_shapes(text: str) -> list[tuple[int, int, int] | SplitModel]:
    """What is named, in order; ValueError in one line."""
    found: list[tuple[int, int, int] | SplitModel] = []
    given: set[str] = set()
    for item in text.split(","):
        word, colon, value = item.partition(":")
        if not colon:
            found.append(_sizes(item))
        elif word == "model":
            if value not in TUNED:
                raise ValueError(f"--shapes: expected model: of {', '.join(TUNED)}; got {value!r}")
            found.append(SplitModel(value))
            given = set()
        elif word in ("tp", "tokens"):
            model = found[-1] if found else None
            if not isinstance(model, SplitModel) or word in given:
                raise ValueError(
                    f"--shapes: expected one {word}: after each model:NAME, such as "
                    f"model:llama3-8b,tp:8,tokens:4096; got {text!r}"
                )
            given.add(word)
            number = _positive(item, value)
            found[-1] = replace(model, tensor=number) if word == "tp" else replace(model, tokens=number)
        else:
            raise ValueError(f"--shapes: expected TxNxK, model:, tp: or tokens:, got {item!r}")
    return found


def _sizes(text: str) -> tuple[int, int, int]:
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"expected --shapes such as 8192x4096x4096 or model:llama3-8b,tp:8, got {text!r}")
    tokens, out_features, in_features = map(int, words)
    return tokens, out_features, in_features


def _positive(item: str, value: str) -> int:
    if not (value.isdecimal() and int(value) > 0):
        raise ValueError(f"--shapes: expected a number of at least 1 in {item!r}")
    return int(value)


def calls_of_model(wanted: SplitModel, dtype: torch.dtype, training: bool) -> Iterator[Call]:
    """The products of each layer and of the head, over all tokens, as a step of training makes them.

    training: else forward alone. Weight gradients are listed as new tensors and as added to fp32.

    What overlaps with transfers may be cut into chunks of fewer tokens, which are timed as they come.
    """
    model, ranks, tokens = TUNED[wanted.name], wanted.tensor, wanted.tokens
    job = Job(model=replace(model, max_positions=None), tokens=1, batch=1, sequence_parallel=False)
    job.require_split(Layout(ranks, 1, 1), batch=False)
    hidden, ffn = model.hidden_size, job.ffn // ranks
    heads, kv = (count * job.head_size // ranks for count in (model.num_heads, job.kv_heads))
    of = Layer(tokens, hidden, hidden, dtype, bias=model.bias, training=training)

    biased = replace(of, bias=model.bias or wanted.name in BIASED_QKV)
    for features in (heads, kv):
        yield _call("linear", replace(biased, out_features=features))
    # what several ranks add up gets its bias afterwards
    summed = replace(of, bias=model.bias and ranks == 1)
    yield _call("linear", replace(summed, in_features=heads))
    yield _call("linear", replace(summed, in_features=ffn))
    up = replace(of, out_features=ffn)
    down = replace(of, in_features=ffn)
    gated = model.activation in GATE_OF
    if gated:
        up, down = (replace(layer, glu=cast("Glu", model.activation)) for layer in (up, down))
        yield _call("glu", up)
    else:
        up, down = (replace(layer, activation=cast("Activation", model.activation)) for layer in (up, down))
        yield _call("linear", up)
    rows = job.vocabulary_rows(ranks)
    chunk = max(LEAST_TOKENS, -(-tokens * hidden // rows))
    chunks = {min(chunk, tokens), tokens % chunk} - {0}
    for part in sorted(chunks, reverse=True):
        yield _call("linear", replace(of, tokens=part, out_features=rows, bias=False))
    if not training:
        return

    query, key = (replace(of, out_features=features) for features in (heads, kv))
    yield _pair(query, key)
    yield _call("dgrad", key)  # of the values: pairs are of two
    yield _call("dgrad", replace(of, in_features=heads))
    if gated:
        yield _call("dglu", down)
        yield _pair(up, up)
    else:
        yield _call("dgrad_act", down)
        yield _call("dgrad", up)
    for layer in (query, key, replace(of, in_features=heads), up, down):
        yield _call("wgrad", layer)
        yield _call("wgrad_accumulate_", layer)
    for part in sorted(chunks, reverse=True):
        yield _call("dgrad", replace(of, tokens=part, out_features=rows))
        yield _call("wgrad_accumulate_", replace(of, tokens=part, out_features=rows))


def in_fp8(call: Call) -> Iterator[Call]:
    """The products in fp8 that a step makes in place of this one; gradients of weights stay in 16 bits."""
    record, (first, *others) = call
    if record.changes_first or record.kernel == "wgrad":
        return
    forward = record.kernel in ("linear", "glu")
    weights = [w for w in others if isinstance(w, Tensor) and w.ndim == 2][: 2 if record.name == "glu" else 1]
    for weight in weights if record.pairs == 1 else [others[0], others[2]]:
        cols, depth = weight.shape if forward else reversed(weight.shape)
        bias = record.name == "linear" and others[1] is not None
        *operands, dtype = scaled_linear.sample(Layer(first.shape[0], cols, depth, bias=bias))
        yield scaled_linear, (*operands, "float32" if record.pairs > 1 else dtype)  # summed, then rounded


def _call(step: str, layer: Layer) -> Call:
    return PRODUCTS[step], PRODUCTS[step].sample(layer)


def _pair(first: Layer, second: Layer) -> Call:
    return PRODUCTS["dgrad_pairs"], (first.dy(), first.weight(), second.dy(), second.weight())
