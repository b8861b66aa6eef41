"""`python -m tpkernels plan`: which rank is in which group, in words and as a picture.

With --model it chooses the sizes of the groups, see `advice`; with --reshard, too, it says what moving the
model between two layouts takes, see `reshard`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from tpkernels.cli import BadUse, advice, bad_use_if, reshard, written_to
from tpkernels.topology.draw import describe_rank
from tpkernels.topology.plan import plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER

MOST_RANKS = 10_000_000  # more than any machine has, and described in seconds


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.usage = (
        "%(prog)s --world-size N [options of groups]\n"
        "       %(prog)s --world-size N --model NAME [options of layouts]\n"
        "       %(prog)s --world-size N --model NAME --reshard FROM TO [options of moves]"
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="how many ranks (GPUs)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (default 8)"
    )
    if "--reshard" in words:
        reshard.add_options(parser)
        return
    is_for_model = any(word.partition("=")[0] == "--model" for word in words)
    if not is_for_model:
        _add_options_of_groups(parser)
    if is_for_model or {"-h", "--help"} & {*words}:
        advice.add_options(parser)


def main(options: Namespace) -> int:
    if options.world_size > MOST_RANKS:
        raise BadUse(f"--world-size: expected at most {MOST_RANKS}, got {options.world_size}")
    with bad_use_if(ValueError, TypeError, ArithmeticError):
        if "reshard" in options:
            return reshard.plan_reshard(options)
        return advice.advise_on(options) if "model" in options else _plan(options)


def _add_options_of_groups(parser: ArgumentParser) -> None:
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
    group.add_argument("--svg", type=written_to, metavar="FILE", help="also draw the groups into FILE")


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
