"""`python -m tpkernels plan`: describes and draws the groups of ranks.

With --model it chooses the sizes of the groups, see `advice`; with --reshard it predicts the traffic to move
the model between two layouts.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from tpkernels.cli import BadUse, add_number, advice, bad_use_if, size_of, written_to
from tpkernels.planning.reshard import Holders, traffic
from tpkernels.topology.draw import describe_rank
from tpkernels.topology.plan import plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER

_GB = 1e9
MOST_RANKS = 10_000_000  # more than any machine has; still described in seconds


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.usage = (
        "%(prog)s --world-size N [options of groups]\n"
        "       %(prog)s --world-size N --model NAME [options of layouts]\n"
        "       %(prog)s --world-size N --model NAME --reshard FROM TO [options of moves]"
    )
    add_number(parser, "--world-size", "how many ranks (GPUs)", least=1, required=True)
    add_number(parser, "--gpus-per-node", "GPUs of a node", 8, least=1)
    if "--reshard" in words:
        _add_options_of_moves(parser)
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
            return _plan_move(options)
        return advice.advise_on(options) if "model" in options else _plan(options)


def _add_options_of_groups(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of groups")
    for axis, name in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        add_number(group, f"--{axis}", f"{name}-parallel size", 1)
    add_number(group, "--virtual-pipeline", "interleaved stages on each rank")
    add_number(group, "--split-rank", "first stage of the decoder", metavar="STAGE")
    group.add_argument(
        "--order", default=DEFAULT_ORDER, help=f"axes, fastest first (default {DEFAULT_ORDER})"
    )
    add_number(group, "--rank", "show one rank's place only", metavar="R")
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


def _add_options_of_moves(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of moves between layouts")
    group.add_argument(
        "--reshard",
        nargs=2,
        required=True,
        metavar=("FROM", "TO"),
        help="such as tp=8 tp=4, or tp=8,ranks=0-511 tp=4,ranks=512-1023",
    )
    advice.add_model(group)
    add_number(group, "--item-bytes", "of a weight", 2, least=1)
    add_number(group, "--bucket-mib", "of a message", 32, least=1)


def _plan_move(options: Namespace) -> int:
    """Print the bytes and messages of a move between two layouts."""
    source, target = (_holders(text, options.world_size) for text in options.reshard)
    found = traffic(
        advice.model_of(options),
        options.world_size,
        source,
        target,
        item_bytes=options.item_bytes,
        gpus_per_node=options.gpus_per_node,
        bucket_bytes=options.bucket_mib * 2**20,
    )
    print(
        f"""{options.model}: {found.held / _GB:.2f} GB of weights, {options.item_bytes} bytes each
from   {source}
to     {target}
sent   {found.sent / _GB:.2f} GB, no less can be: what ranks need and do not hold
       {found.between_nodes / _GB:.2f} GB of it between nodes of {options.gpus_per_node} GPUs
rank   sends {found.most_sent / _GB:.2f} GB and receives {found.most_received / _GB:.2f} GB at most
copied {found.copied / _GB:.2f} GB, on the ranks that hold it
pairs  {found.pairs} of ranks, with at least {found.least_messages} messages of {options.bucket_mib} MiB"""
    )
    return 0


def _holders(text: str, world: int) -> Holders:
    words = text.split(",")
    given = dict(size_of(word) for word in words if "=" in word)
    if len(given) < len(words) or not given.keys() <= {"tp", "ranks"} or not isinstance(given.get("tp"), int):
        raise ValueError(f"--reshard: expected tp=N or tp=N,ranks=FIRST-LAST, got {text!r}")
    first, dash, last = str(given.get("ranks", f"0-{world - 1}")).partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--reshard: expected ranks=FIRST-LAST, got {text!r}")
    return Holders(given["tp"], range(int(first), int(last) + 1))
