"""Lists or times the products that `tune` is called for.

`--shapes` names layers by their sizes, and models whose layers are split over ranks:

    8192x4096x4096                        a layer: tokens x out_features x in_features
    model:llama3-8b,tp:8,tokens:4096      the layers of a model on one of 8 tensor-parallel ranks

Items are separated by commas; `tp:` and `tokens:` belong to the model before them.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels.cli import USUAL_TOKENS, Progress, variations
from tpkernels.dispatch.cache import render, versions_for
from tpkernels.dispatch.candidates import TARGET_GPUS, TargetGpu, candidates
from tpkernels.dispatch.chooser import chooser_on
from tpkernels.dispatch.problem import layout_class
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer, Primitive
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.kernels.activations import GATE_OF, Activation, Glu
from tpkernels.kernels.recipe import Recipe
from tpkernels.models.config import MODELS, GPTConfig
from tpkernels.ops.vocab.linear_cross_entropy import LEAST_TOKENS
from tpkernels.planning.job import Job, RankLayout

PrimitiveCall = tuple[Primitive[..., Any], tuple[Any, ...]]  # a primitive and its arguments
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# estimates: compiling took 0.6 to 1.7 s on average where it was measured, and each result is compared
KERNEL_SECONDS, PROBLEM_SECONDS = 2.0, 2.0


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> GPTConfig:
    """Return a Qwen of these sizes; that queries, keys and values have biases is BIASED_QKV's matter."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads}
    return MODELS["llama3-8b"].with_sizes(vocab_size=152064, ffn_hidden_size=ffn, norm_eps=1e-6, **sizes)


BIASED_QKV = {"qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944), "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648)}
TUNED = {**MODELS, **BIASED_QKV}


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model whose layers are split over tensor-parallel ranks."""

    name: str
    tensor: int = 1
    tokens: int = USUAL_TOKENS

    def __str__(self) -> str:
        return f"{self.name} on {self.tensor} tensor-parallel ranks, {self.tokens} tokens at once"


def parsed_shapes(text: str) -> list[tuple[int, int, int] | SplitModel]:
    """Return the layers and models that `--shapes` names, in order."""
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
            if not (value.isdecimal() and int(value) > 0):
                raise ValueError(f"--shapes: expected a number of at least 1 in {item!r}")
            number = int(value)
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


def primitive_calls(options: Namespace) -> list[PrimitiveCall]:
    """Return the primitive calls of every requested step of every requested layer, each once."""
    steps = options.steps.split(",")
    for step in steps:
        if step not in PRODUCTS:
            raise ValueError(f"expected --steps of {', '.join(PRODUCTS)}; got {step!r}")
    calls: dict[str, PrimitiveCall] = {}
    for named in parsed_shapes(options.shapes):
        try:
            for call in _primitive_calls(named, steps, options):
                for record, arguments in (call, *(in_fp8(call) if options.fp8 else ())):
                    calls[record.problem(*arguments).key] = record, arguments
        except (RuntimeError, TypeError) as error:  # a matrix larger than any address
            said = str(error).partition("\n")[0]  # torch's message, without its stack
            shape = named if isinstance(named, SplitModel) else "x".join(map(str, named))
            raise ValueError(f"--shapes {shape}: {said}") from error
    return list(calls.values())


def _primitive_calls(
    named: tuple[int, int, int] | SplitModel, steps: Sequence[str], options: Namespace
) -> Iterator[PrimitiveCall]:
    dtype, training = DTYPES[options.dtype], not options.inference
    if isinstance(named, SplitModel):
        yield from (call for call in model_calls(named, dtype, training) if call[0].name in steps)
        return
    for step in steps:
        # an MLP has linear layers with and without an activation after them
        for activation in ("none", options.activation) if step == "linear" else (options.activation,):
            layer = Layer(*named, dtype, activation, options.glu, not options.no_bias, training)
            yield PRODUCTS[step], PRODUCTS[step].sample(layer)


def model_calls(wanted: SplitModel, dtype: torch.dtype, training: bool) -> Iterator[PrimitiveCall]:
    """Yield the products of each layer and of the head, over all tokens, of a training step.

    training: False: forward only. Weight gradients are listed as new tensors and as sums in fp32.

    Products that overlap with transfers may use chunks of fewer tokens, which are timed at run time.
    """
    model, ranks, tokens = TUNED[wanted.name], wanted.tensor, wanted.tokens
    job = Job(model=replace(model, max_positions=None), tokens=1, batch=1, sequence_parallel=False)
    job.require_split(RankLayout(ranks, 1, 1), batch=False)
    hidden, ffn = model.hidden_size, job.ffn // ranks
    heads, kv = (count * job.head_size // ranks for count in (model.num_heads, job.kv_heads))
    of = Layer(tokens, hidden, hidden, dtype, bias=model.bias, training=training)

    biased = replace(of, bias=model.bias or wanted.name in BIASED_QKV)
    for features in (heads, kv):
        yield _call("linear", replace(biased, out_features=features))
    # the sum over several ranks gets its bias afterwards
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


def in_fp8(call: PrimitiveCall) -> Iterator[PrimitiveCall]:
    """Yield the products in fp8 that replace this call, as by `Recipe.rowwise`: forward accumulates fast.

    Gradients of weights stay in 16 bits.
    """
    record, (first, *others) = call
    if record.changes_first or record.kernel == "wgrad":
        return
    forward = record.kernel in ("linear", "glu")
    fast = Recipe.rowwise().is_fast(forward=forward)
    weights = [w for w in others if isinstance(w, Tensor) and w.ndim == 2][: 2 if record.name == "glu" else 1]
    for weight in weights if record.pairs == 1 else [others[0], others[2]]:
        cols, depth = weight.shape if forward else reversed(weight.shape)
        bias = record.name == "linear" and others[1] is not None
        layer = Layer(first.shape[0], cols, depth, bias=bias, fast=fast)
        *operands, dtype, _ = scaled_linear.sample(layer)
        # the terms of a sum are rounded once, after it
        yield scaled_linear, (*operands, "float32" if record.pairs > 1 else dtype, fast)


def _call(step: str, layer: Layer) -> PrimitiveCall:
    return PRODUCTS[step], PRODUCTS[step].sample(layer)


def _pair(first: Layer, second: Layer) -> PrimitiveCall:
    return PRODUCTS["dgrad_pairs"], (first.dy(), first.weight(), second.dy(), second.weight())


def _announce(calls: Sequence[PrimitiveCall], gpu: TargetGpu, thorough: bool) -> None:
    """Print the numbers of problems and candidates to time, and an estimate of the duration."""
    offered, kernels = 0, set[tuple[object, ...]]()
    for record, arguments in calls:
        problem = record.problem(*arguments)
        found = candidates(record, problem, gpu)
        offered += len(found)
        # another size with the same tile is not compiled again
        like = record.name, problem.dtype, problem.options, tuple(map(layout_class, problem.layouts))
        kernels.update((one.name, *like) for one in found if one.tile)
    seconds = KERNEL_SECONDS * len(kernels) + PROBLEM_SECONDS * len(calls)
    print(
        f"{len(calls)} problems, {offered} candidates, {len(kernels)} kernels to compile: about "
        f"{minutes(seconds)} ({KERNEL_SECONDS:g} s a kernel, {PROBLEM_SECONDS:g} s a problem)"
        + f"; variations: at most {minutes(len(calls) * variations.SECONDS)} more"
        * thorough
    )


def minutes(seconds: float) -> str:
    """
    >>> minutes(45), minutes(200)
    ('45 s', '4 min')
    """
    return f"{math.ceil(seconds)} s" if seconds < 60 else f"{math.ceil(seconds / 60)} min"


def listed(calls: Sequence[PrimitiveCall], name: str, thorough: bool) -> str:
    """Print the candidates of each call on the GPU of this name, and return them as JSON."""
    gpu = TARGET_GPUS[name]
    _announce(calls, gpu, thorough)
    print(f"candidates on {gpu.name}, not timed:")
    names = {}
    for record, arguments in calls:
        problem = record.problem(*arguments)
        names[problem.key] = [candidate.name for candidate in candidates(record, problem, gpu)]
        print(f"{problem.key}\n" + "".join(f"    {one}\n" for one in names[problem.key]), end="")
    return json.dumps({"gpu": gpu.name, "candidates": names}, indent=1) + "\n"


def has_gpu() -> bool:
    return torch.cuda.is_available()


def tuned(calls: Sequence[PrimitiveCall], again: bool, thorough: bool, seconds: float) -> str:
    """Time and print the choice for each call; return all choices as the text of a cache file.

    seconds: after this time no further problem is timed
    """
    chooser = chooser_on(torch.device("cuda", torch.cuda.current_device()))
    deadline = monotonic() + seconds
    known = [None if again or thorough else chooser.known(*call) for call in calls]
    unknown = [call for call, decision in zip(calls, known, strict=True) if decision is None]
    if unknown:
        _announce(unknown, chooser.gpu, thorough)
    search = variations.Variations(chooser, variations.CompiledTiles(chooser.gpu))
    decisions, left = [], []
    with Progress("timing", len(calls)) as step_begins:
        for (record, arguments), decision in zip(calls, known, strict=True):
            key = record.problem(*arguments).key
            step_begins(key)
            if decision is None and monotonic() >= deadline:
                left.append(key)
                continue
            if decision is None and thorough:
                decision = search.timed(record, arguments)
            decisions.append(decision or chooser.timed(record, arguments, seconds=inf))
    print(
        "\n".join([*map(str, decisions), *(f"{key}: left, --seconds {seconds:g} are over" for key in left)])
    )
    timed = (decision for decision in decisions if decision.milliseconds)
    choices = {d.key: d.choice for d in timed}
    return render(versions_for(chooser.gpu.name), choices)
