"""`python -m tpkernels tune`: times candidates of given shapes in advance, or lists them without a GPU."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from math import inf

from tpkernels.cli import USUAL_TOKENS, BadUse, bad_use_if, require_packages, written_to
from tpkernels.kernels.activation_names import ACTIVATIONS, GATE_OF
from tpkernels.planning.gpus import GPUS

DTYPES = ("bf16", "fp16", "fp32")
STEPS = ("linear", "glu", "dgrad", "dgrad_pairs", "dgrad_act", "dglu", "wgrad", "wgrad_accumulate_")


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument(
        "--shapes",
        required=True,
        metavar="LIST",
        help="TxNxK, tokens x out_features x in_features of a layer; or model:NAME,tp:N,tokens:N, the layers "
        f"of a model on one of tp ranks (default tp:1,tokens:{USUAL_TOKENS}); or several of these",
    )
    parser.add_argument("--steps", default=",".join(STEPS), help=f"which (default {','.join(STEPS)})")
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


def main(options: Namespace) -> int:
    from tpkernels.cli import tuning  # not before the arguments are read: loading torch takes seconds

    with bad_use_if(ValueError, ArithmeticError):
        calls = tuning.primitive_calls(options)
    if options.gpu is not None and not options.dry_run:
        raise BadUse(f"--gpu {options.gpu} needs --dry-run: only the GPU that is here can be timed")
    if not options.dry_run:
        require_packages("triton")
        if not tuning.has_gpu():
            raise BadUse("there is no GPU here to time on; --dry-run lists what would be timed")
    elif find_spec("triton") is None:
        print("note: triton is not installed, so its kernels are no candidates here", file=sys.stderr)
    with bad_use_if(OSError):
        if options.dry_run:
            report = tuning.listed(calls, options.gpu or "h100", options.thorough)
        else:
            report = tuning.tuned(calls, options.again, options.thorough, options.seconds)
        if options.json is not None:
            options.json.write_text(report, encoding="utf-8")
    return 0


def positive(text: str) -> float:
    """
    >>> positive("90")
    90.0
    """
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value
