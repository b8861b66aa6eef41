"""`python -m tpkernels plan`: which rank is in which group, in words and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpkernels.cli import OneLineParser, advice, require_ranks
from tpkernels.topology.draw import describe_rank
from tpkernels.topology.plan import plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER


def main(argv: Sequence[str]) -> int:
    if any(word.partition("=")[0] == "--model" for word in argv):
        return advice.main(argv)
    parser = OneLineParser(
        prog="python -m tpkernels plan",
        description="Print and draw the groups of a world. Needs no GPU and no process group.",
        epilog="With --model NAME: which sizes suit a model, see `plan --model NAME --help`.",
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="how many ranks (GPUs)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline-parallel size")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel size")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel size")
    parser.add_argument("--virtual-pipeline", type=int, metavar="N", help="interleaved stages on each rank")
    parser.add_argument("--split-rank", type=int, metavar="STAGE", help="first stage of the decoder")
    parser.add_argument(
        "--order", default=DEFAULT_ORDER, help=f"axes, fastest first (default {DEFAULT_ORDER})"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="show one rank's place only")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the groups into FILE")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="for the drawing (default 8)"
    )
    options = parser.parse_args(argv)
    try:
        require_ranks("--world-size", options.world_size)
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
    except (ValueError, ArithmeticError, OSError) as error:
        parser.error(str(error))
    return 0
