"""`python -m tpkernels tune`: times candidates of given shapes in advance, or lists them without a GPU.

`--shapes` names layers by their sizes, and models whose layers are split over ranks:

    8192x4096x4096                        a layer: tokens x out_features x in_features
    model:llama3-8b,tp:8,tokens:4096      the layers of a model on one of 8 tensor-parallel ranks

Items are separated by commas; `tp:` and `tokens:` belong to the model before them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import inf
from time import monotonic
from typing import Any, cast

import torch

from tpkernels.cli import USUAL_TOKENS, BadUse, Progress, bad_use_if, require_packages, written_to
from tpkernels.dispatch.autotune import autotuner_on
from tpkernels.dispatch.cache import Choice
from tpkernels.dispatch.candidates import TARGET_GPUS, candidates, tune_key
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer, Primitive
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF, Activation, Glu
from tpkernels.kernels.target import Target
from tpkernels.models.config import MODELS, GPTConfig
from tpkernels.ops.vocab.head_chunks import LEAST_TOKENS
from tpkernels.planning.gpus import GPUS
from tpkernels.planning.job import Job, RankLayout

PrimitiveCall = tuple[Primitive[..., Any], tuple[Any, ...]]  # a primitive and its arguments
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# an estimate: compiling took 0.6 to 1.7 s on average where it was measured, and each result is compared
CANDIDATE_SECONDS = 2.5


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument(
        "--shapes",
        required=True,
        metavar="LIST",
        help="TxNxK, tokens x out_features x in_features of a layer; or model:NAME,tp:N,tokens:N, the layers "
        f"of a model on one of tp ranks (default tp:1,tokens:{USUAL_TOKENS}); or several of these",
    )
    steps = ",".join(PRODUCTS)
    parser.add_argument("--steps", default=steps, help=f"which (default {steps})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default bf16")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="gelu_tanh", help="default gelu_tanh")
    parser.add_argument("--glu", choices=GATE_OF, default="swiglu", help="the gated unit (default swiglu)")
    parser.add_argument("--no-bias", action="store_true", help="layers without bias; a model knows its own")
    parser.add_argument("--inference", action="store_true", help="keep no pre-activations")
    parser.add_argument("--again", action="store_true", help="time what is known already, too")
    begun = "begin nothing after so long; say what is left"
    parser.add_argument("--seconds", type=float, default=inf, metavar="S", help=begun)
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU")
    parser.add_argument("--gpu", choices=TARGET_GPUS, help="of a dry run (default h100)")
    parser.add_argument("--json", type=written_to, metavar="FILE", help="also write the result into FILE")


def main(options: Namespace) -> int:
    with bad_use_if(ValueError, ArithmeticError):
        calls = primitive_calls(options)
    if not options.seconds > 0:
        raise BadUse(f"expected --seconds above 0, got {options.seconds:g}")
    if options.gpu is not None and not options.dry_run:
        raise BadUse(f"--gpu {options.gpu} needs --dry-run: only the GPU that is here can be timed")
    if not options.dry_run:
        require_packages("triton")
        if not torch.cuda.is_available():
            raise BadUse("there is no GPU here to time on; --dry-run lists what would be timed")
    elif find_spec("triton") is None:
        print("note: triton is not installed, so its kernels are no candidates here", file=sys.stderr)
    with bad_use_if(OSError):
        if options.dry_run:
            report = listed(calls, options.gpu or "h100")
        else:
            report = tuned(calls, options.again, options.seconds)
        if options.json is not None:
            options.json.write_text(report, encoding="utf-8")
    return 0


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


def parsed_shapes(text: str) -> dict[str, tuple[int, int, int] | SplitModel]:
    """Return the layers and models that `--shapes` names, by item, in order."""
    found: dict[str, tuple[int, int, int] | SplitModel] = {}
    for item in re.split(",(?!tp:|tokens:)", text):
        if sizes := re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)", item):
            tokens, out_features, in_features = map(int, sizes.groups())
            found[item] = tokens, out_features, in_features
            continue
        words = [tuple(word.split(":")) for word in item.split(",")]
        given = dict(word for word in words if len(word) == 2)
        name, counts = given.pop("model", ""), {"tp": "1", "tokens": str(USUAL_TOKENS)} | given
        numbered = all(re.fullmatch("[1-9][0-9]*", count) for count in counts.values())
        if name not in TUNED or len(given) + 1 < len(words) or len(counts) > 2 or not numbered:
            raise ValueError(
                "expected --shapes such as 8192x4096x4096, or model:NAME with at most one tp:N and one "
                f"tokens:N; NAME is one of {', '.join(TUNED)}; got {item!r}"
            )
        found[item] = SplitModel(name, int(counts["tp"]), int(counts["tokens"]))
    return found


def primitive_calls(options: Namespace) -> list[PrimitiveCall]:
    """Return the primitive calls of every requested step of every requested layer, each once."""
    steps = options.steps.split(",")
    if unknown := set(steps) - PRODUCTS.keys():
        raise ValueError(f"expected --steps of {', '.join(PRODUCTS)}; got {', '.join(sorted(unknown))!r}")
    calls: dict[str, PrimitiveCall] = {}
    for item, named in parsed_shapes(options.shapes).items():
        try:
            for call in _primitive_calls(named, steps, options):
                calls[str(tune_key(call[0], *call[1]))] = call
        except (RuntimeError, TypeError) as error:  # a matrix larger than any address
            said = str(error).partition("\n")[0]  # torch's message, without its stack
            raise ValueError(f"--shapes {item}: {said}") from error
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
    query, key = (replace(of, out_features=features) for features in (heads, kv))
    output = replace(of, in_features=heads)
    up, down = replace(of, out_features=ffn), replace(of, in_features=ffn)
    gated = model.activation in GATE_OF
    if gated:
        up, down = (replace(layer, glu=cast("Glu", model.activation)) for layer in (up, down))
    else:
        up, down = (replace(layer, activation=cast("Activation", model.activation)) for layer in (up, down))
    rows = job.vocabulary_rows(ranks)
    chunk = max(LEAST_TOKENS, -(-tokens * hidden // rows))
    chunks = sorted({min(chunk, tokens), tokens % chunk} - {0}, reverse=True)
    head = [replace(of, tokens=part, out_features=rows, bias=False) for part in chunks]

    for layer in (query, key):
        yield _call("linear", replace(layer, bias=model.bias or wanted.name in BIASED_QKV))
    for layer in (
        output,
        replace(of, in_features=ffn),
    ):  # the sum over several ranks gets its bias afterwards
        yield _call("linear", replace(layer, bias=model.bias and ranks == 1))
    yield _call("glu" if gated else "linear", up)
    for layer in head:
        yield _call("linear", layer)
    if not training:
        return
    yield _pair(query, key)
    for layer in (key, output, *head):  # key: of the values, as pairs are of two
        yield _call("dgrad", layer)
    yield _call("dglu" if gated else "dgrad_act", down)
    yield _pair(up, up) if gated else _call("dgrad", up)
    for layer in (query, key, output, up, down):
        yield _call("wgrad", layer)
    for layer in (query, key, output, up, down, *head):
        yield _call("wgrad_accumulate_", layer)


def _call(step: str, layer: Layer) -> PrimitiveCall:
    return PRODUCTS[step], PRODUCTS[step].sample(layer)


def _pair(first: Layer, second: Layer) -> PrimitiveCall:
    return PRODUCTS["dgrad_pairs"], (first.dy(), first.weight(), second.dy(), second.weight())


def listed(calls: Sequence[PrimitiveCall], name: str) -> str:
    """Print the candidates of each call on the GPU of this name, and return them as JSON."""
    target, gpu = TARGET_GPUS[name], GPUS[name].name
    _announce(calls, target)
    print(f"candidates on {gpu}, not timed:")
    names = {}
    for record, arguments in calls:
        key = tune_key(record, *arguments)
        names[str(key)] = [candidate.name for candidate in candidates(record, key, target)]
        print("\n    ".join([str(key), *names[str(key)]]))
    return json.dumps({"gpu": gpu, "candidates": names}, indent=1) + "\n"


def tuned(calls: Sequence[PrimitiveCall], again: bool, seconds: float) -> str:
    """Time and print the choice for each call; return all choices that were timed, with their times, as JSON.

    seconds: after this time no further shape is timed
    """
    tuner = autotuner_on(torch.device("cuda", torch.cuda.current_device()))
    deadline = monotonic() + seconds
    requests = [tuner.request(record, arguments) for record, arguments in calls]
    known = [None if again else tuner.known(request) for request in requests]
    # one that was timed beside other work is made again
    known = [None if choice and choice.company else choice for choice in known]
    unknown = [call for call, choice in zip(calls, known, strict=True) if choice is None]
    if unknown:
        _announce(unknown, tuner.target)
    choices, left = dict[str, Choice](), []
    with Progress("timing", len(calls)) as step_begins:
        for request, choice in zip(requests, known, strict=True):
            step_begins(request.name)
            if choice is None and monotonic() >= deadline:
                left.append(f"{request.name}: left, --seconds {seconds:g} are over")
            else:
                choices[request.name] = choice or tuner.timed(request, seconds=inf)
    print(*(f"{key}: {choice}" for key, choice in choices.items()), *left, sep="\n")
    timed = {key: choice.as_json() for key, choice in choices.items() if choice.milliseconds}
    return json.dumps({"versions": asdict(tuner.cache.versions), "choices": timed}, indent=1) + "\n"


def _announce(calls: Sequence[PrimitiveCall], target: Target) -> None:
    """Print how much there is to time, and an estimate of the duration."""
    offered = sum(len(candidates(record, tune_key(record, *args), target)) for record, args in calls)
    minutes = math.ceil(offered * CANDIDATE_SECONDS / 60)
    print(
        f"{len(calls)} shapes, {offered} candidates: at most about {minutes} min "
        f"({CANDIDATE_SECONDS:g} s a candidate)"
    )
