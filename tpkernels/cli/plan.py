"""`python -m tpkernels plan`: which rank is in which group, in words and as a picture.

With --model it chooses the sizes of the groups, see `advice`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tpkernels.cli import OneLineParser, advice, require_ranks
from tpkernels.topology.draw import describe_rank
from tpkernels.topology.plan import plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER


def main(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m tpkernels plan",
        usage="%(prog)s --world-size N [options of groups]\n"
        "       %(prog)s --world-size N --model NAME [options of layouts]",
        description="Print and draw the groups of a world; with --model predict memory and time of each "
        "layout of ranks for a model. Needs no GPU and no process group.",
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="how many ranks (GPUs)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (default 8)"
    )
    is_for_model = any(word.partition("=")[0] == "--model" for word in argv)
    if not is_for_model:
        _add_options(parser)
    if is_for_model or {"-h", "--help"} & {*argv}:
        advice.add_options(parser)
    options = parser.parse_args(argv)
    try:
        require_ranks("--world-size", options.world_size)
        return advice.advise_on(options) if is_for_model else _plan(options)
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        parser.error(str(error))


def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of groups")
    for axis, name in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        group.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"{name}-parallel size (default 1)"
        )
    group.add_argument("--virtual-pipeline", type=int, metavar="N", help="interleaved stages on each rank")
    group.add_argument("--split-rank", type=int, metavar="STAGE", help="first stage of the decoder")
    group.add_argument(
        "--order", default=DEFAULT_ORDER, help=f"axes, fastest first (default {DEFAULT_ORDER})"
    )
    group.add_argument("--rank", type=int, metavar="R", help="show one rank's place only")
    group.add_argument("--svg", type=Path, metavar="FILE", help="also draw the groups into FILE")


def _plan(options: Namespace) -> int:
    plan = plan_groups(
        world_size=options.world_size,
        tensor=options.tp,
        pipeline=options.pp,
        context=options.cp,
        expert=options.ep,
        virtual_pipeline=options.virtual_pipeline,
        split_rank=options.split_rank,
        order=options.order,
    )
    text = plan.describe() if options.rank is None else describe_rank(plan, options.rank)
    if options.svg is not None:
        options.svg.write_text(plan.to_svg(gpus_per_node=options.gpus_per_node), encoding="utf-8")
        text += f"\n\ndrawn into {options.svg}"
    print(text)
    return 0
