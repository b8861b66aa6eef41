"""`python -m tpkernels tune`: time the candidates of given shapes ahead, or list them without a GPU."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import inf
from time import monotonic

import torch

from tpkernels.cli import OneLineParser, Progress, variations, written_to
from tpkernels.cli.tune_shapes import (
    TOKENS,
    Call,
    SplitModel,
    calls_of_model,
    in_fp8,
    parsed_shapes,
)
from tpkernels.dispatch.cache import Choice, render, versions_for
from tpkernels.dispatch.candidates import candidates
from tpkernels.dispatch.chooser import Chooser, chooser_on
from tpkernels.dispatch.gpus import GPUS, Gpu
from tpkernels.dispatch.problem import layout_class
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# estimates: compiling took 0.6 to 1.7 s on average where it was measured, and each result is compared
KERNEL_SECONDS, PROBLEM_SECONDS = 2.0, 2.0


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
            report = _list(calls, GPUS[options.gpu or "h100"], options.thorough)
        else:
            chooser = chooser_on(torch.device("cuda", torch.cuda.current_device()))
            report = _tune(calls, chooser, options.again, options.thorough, options.seconds)
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
        "--shapes",
        required=True,
        metavar="LIST",
        help="TxNxK, tokens x out_features x in_features of a layer; or model:NAME,tp:N,tokens:N, the layers "
        f"of a model on one of tp ranks (default tp:1,tokens:{TOKENS}); or several of these",
    )
    parser.add_argument("--steps", default=",".join(PRODUCTS), help=f"which (default {','.join(PRODUCTS)})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default bf16")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="gelu_tanh", help="default gelu_tanh")
    parser.add_argument("--glu", choices=GATE_OF, default="swiglu", help="the gated unit (default swiglu)")
    parser.add_argument("--no-bias", action="store_true", help="layers without bias; a model knows its own")
    parser.add_argument(
        "--fp8", action="store_true", help="the same products in fp8, too, with scales of rows"
    )
    parser.add_argument("--inference", action="store_true", help="keep no pre-activations")
    parser.add_argument(
        "--thorough", action="store_true", help="also time variations of the fastest tiles, known or not"
    )
    parser.add_argument("--again", action="store_true", help="time what is known already, too")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=inf,
        metavar="S",
        help="begin nothing after so long; say what is left",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU")
    parser.add_argument("--gpu", choices=GPUS, help="of a dry run (default h100)")
    parser.add_argument("--json", type=written_to, metavar="FILE", help="also write the result into FILE")
    return parser


def positive(text: str) -> float:
    """
    >>> positive("90")
    90.0
    """
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def _calls(options: Namespace) -> list[Call]:
    """Every step of every layer, each once."""
    steps = options.steps.split(",")
    for step in steps:
        if step not in PRODUCTS:
            raise ValueError(f"expected --steps of {', '.join(PRODUCTS)}; got {step!r}")
    calls: dict[str, Call] = {}
    for named in parsed_shapes(options.shapes):
        try:
            for call in _calls_of(named, steps, options):
                for record, arguments in (call, *(in_fp8(call) if options.fp8 else ())):
                    calls[record.problem(*arguments).key] = record, arguments
        except (RuntimeError, TypeError) as error:  # a matrix larger than any address
            said = str(error).partition("\n")[0]  # in torch's words, without its stack
            shape = named if isinstance(named, SplitModel) else "x".join(map(str, named))
            raise ValueError(f"--shapes {shape}: {said}") from error
    return list(calls.values())


def _calls_of(
    named: tuple[int, int, int] | SplitModel, steps: Sequence[str], options: Namespace
) -> Iterator[Call]:
    dtype, training = DTYPES[options.dtype], not options.inference
    if isinstance(named, SplitModel):
        yield from (call for call in calls_of_model(named, dtype, training) if call[0].name in steps)
        return
    for step in steps:
        # an MLP has linear layers with and without an activation behind them
        for activation in ("none", options.activation) if step == "linear" else (options.activation,):
            layer = Layer(*named, dtype, activation, options.glu, not options.no_bias, training)
            yield PRODUCTS[step], PRODUCTS[step].sample(layer)


def _announce(calls: Sequence[Call], gpu: Gpu, thorough: bool) -> None:
    """What is to be timed, and how long that will take, as far as arithmetic knows."""
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


def _list(calls: Sequence[Call], gpu: Gpu, thorough: bool) -> str:
    """Print the candidates of each call on `gpu`, and return them as JSON."""
    _announce(calls, gpu, thorough)
    print(f"candidates on {gpu.name}, not timed:")
    listed = {}
    for record, arguments in calls:
        problem = record.problem(*arguments)
        listed[problem.key] = [candidate.name for candidate in candidates(record, problem, gpu)]
        print(f"{problem.key}\n" + "".join(f"    {name}\n" for name in listed[problem.key]), end="")
    return json.dumps({"gpu": gpu.name, "candidates": listed}, indent=1) + "\n"


def _tune(calls: Sequence[Call], chooser: Chooser, again: bool, thorough: bool, seconds: float) -> str:
    """Print the choice for each call, and return all of them as the text of a cache file.

    seconds: after which no more is timed
    """
    deadline = monotonic() + seconds
    known = [None if again or thorough else chooser.known(*call) for call in calls]
    unknown = [call for call, decision in zip(calls, known, strict=True) if decision is None]
    if unknown:
        _announce(unknown, chooser.gpu, thorough)
    search = variations.Variations(chooser, variations.Compiled(chooser.gpu))
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
    choices = {d.key: Choice(d.candidate.name, d.milliseconds) for d in timed}
    return render(versions_for(chooser.gpu.name), choices)
