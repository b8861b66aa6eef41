"""`python -m tpkernels tune`: time the candidates of given shapes ahead, or list them without a GPU."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from tpkernels.cli import OneLineParser, Progress, written_to
from tpkernels.dispatch.cache import Choice, render, versions_for
from tpkernels.dispatch.candidates import candidates
from tpkernels.dispatch.chooser import Chooser, chooser_on
from tpkernels.dispatch.gpus import GPUS, Gpu
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer, Primitive
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Call = tuple[Primitive[..., Any], tuple[Any, ...]]  # a primitive and its arguments


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        calls = _calls(options)
    except (ValueError, ArithmeticError) as error:
        parser.error(str(error))
    if options.gpu is not None and not options.dry_run:
        parser.error(f"--gpu {options.gpu} needs --dry-run: only the GPU that is here can be timed")
    if find_spec("triton") is None:
        if not options.dry_run:
            parser.error("triton is not installed, and there is nothing to choose without it")
        print("note: triton is not installed, so its kernels are no candidates here", file=sys.stderr)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here to time on; --dry-run lists what would be timed")
    try:
        if options.dry_run:
            report = _list(calls, GPUS[options.gpu or "h100"])
        else:
            report = _tune(
                calls, chooser_on(torch.device("cuda", torch.cuda.current_device())), options.again
            )
        if options.json is not None:
            options.json.write_text(report, encoding="utf-8")
    except OSError as error:
        parser.error(str(error))
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m tpkernels tune",
        description="Time who computes each step of a layer fastest on this GPU, and remember it.",
    )
    parser.add_argument(
        "--shapes", required=True, metavar="TxNxK,...", help="tokens x out_features x in_features of layers"
    )
    parser.add_argument("--steps", default=",".join(PRODUCTS), help=f"which (default {','.join(PRODUCTS)})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default bf16")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="gelu_tanh", help="default gelu_tanh")
    parser.add_argument("--glu", choices=GATE_OF, default="swiglu", help="the gated unit (default swiglu)")
    parser.add_argument("--no-bias", action="store_true", help="layers without bias")
    parser.add_argument("--inference", action="store_true", help="keep no pre-activations")
    parser.add_argument("--again", action="store_true", help="time what is known already")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU")
    parser.add_argument("--gpu", choices=GPUS, help="of a dry run (default h100)")
    parser.add_argument("--json", type=written_to, metavar="FILE", help="also write the result into FILE")
    return parser


def _calls(options: Namespace) -> list[Call]:
    """Every step of every layer, each once."""
    calls: dict[str, Call] = {}
    for size in options.shapes.split(","):
        for step in options.steps.split(","):
            record = PRODUCTS.get(step)
            if record is None:
                raise ValueError(f"expected --steps of {', '.join(PRODUCTS)}; got {step!r}")
            # an MLP has linear layers with and without an activation behind them
            for activation in ("none", options.activation) if step == "linear" else (options.activation,):
                layer = Layer(
                    *_sizes(size),
                    dtype=DTYPES[options.dtype],
                    activation=activation,
                    glu=options.glu,
                    bias=not options.no_bias,
                    training=not options.inference,
                )
                try:
                    arguments = record.sample(layer)
                except (RuntimeError, TypeError) as error:  # a matrix larger than any address
                    said = str(error).partition("\n")[0]  # in torch's words, without its stack
                    raise ValueError(f"--shapes {size}: {said}") from error
                calls[record.problem(*arguments).key] = record, arguments
    return list(calls.values())


def _sizes(text: str) -> tuple[int, int, int]:
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"expected --shapes such as 8192x4096x4096, got {text!r}")
    tokens, out_features, in_features = map(int, words)
    return tokens, out_features, in_features


def _list(calls: Sequence[Call], gpu: Gpu) -> str:
    """Print the candidates of each call on `gpu`, and return them as JSON."""
    print(f"candidates on {gpu.name}, not timed:")
    listed = {}
    for record, arguments in calls:
        problem = record.problem(*arguments)
        listed[problem.key] = [candidate.name for candidate in candidates(record, problem, gpu)]
        print(f"{problem.key}\n" + "".join(f"    {name}\n" for name in listed[problem.key]), end="")
    return json.dumps({"gpu": gpu.name, "candidates": listed}, indent=1) + "\n"


def _tune(calls: Sequence[Call], chooser: Chooser, again: bool) -> str:
    """Print the choice for each call, and return all of them as the text of a cache file."""
    decisions = []
    with Progress("timing", len(calls)) as step_begins:
        for record, arguments in calls:
            step_begins(record.problem(*arguments).key)
            known = None if again else chooser.known(record, arguments)
            decisions.append(known or chooser.timed(record, arguments))
    print("\n".join(map(str, decisions)))
    timed = (decision for decision in decisions if decision.milliseconds)
    choices = {d.key: Choice(d.candidate.name, d.milliseconds) for d in timed}
    return render(versions_for(chooser.gpu.name), choices)
