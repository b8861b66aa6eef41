"""`python -m tpkernels plan --reshard FROM TO`: what moving a model between two layouts of ranks takes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tpkernels.cli import size_of
from tpkernels.models.config import model_config
from tpkernels.planning.reshard import Holders, traffic

_GB = 1e9


def add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of moves between layouts")
    group.add_argument(
        "--reshard",
        nargs=2,
        required=True,
        metavar=("FROM", "TO"),
        help="such as tp=8 tp=4, or tp=8,ranks=0-511 tp=4,ranks=512-1023",
    )
    group.add_argument("--model", required=True, metavar="NAME", help="such as gpt2-small or llama3-8b")
    group.add_argument(
        "--size", action="append", default=[], metavar="NAME=VALUE", help="a size of it, as in `train`"
    )
    group.add_argument("--item-bytes", type=int, default=2, metavar="N", help="of a weight (default 2)")
    group.add_argument("--bucket-mib", type=int, default=32, metavar="N", help="of a message (default 32)")


def plan_reshard(options: Namespace) -> int:
    """Print bytes and messages."""
    model = model_config(options.model).with_sizes(**dict(size_of(text) for text in options.size))
    for name in ("item_bytes", "bucket_mib", "gpus_per_node", "world_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(options, name)}")
    source, target = (_holders(text, options.world_size) for text in options.reshard)
    found = traffic(
        model,
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
