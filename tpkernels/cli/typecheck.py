"""`python -m tpkernels typecheck SCRIPT`: checks the first step of a training script by types over ranks.

The script runs in this process as the only rank of a world (torch's "fake" backend): its numbers are wrong,
but their types over the tensor-parallel ranks are right (`interop.typecheck`).
"""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tpkernels.cli import BadUse, add_number, require_packages

LEGEND = (
    "Types over the tensor-parallel ranks: I replicated, with the full gradient; R replicated, its gradient "
    "a term of a sum; V a shard; P a term of a sum"
)


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    add_number(parser, "--ranks", "of the world that the script sees", 2, least=2)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script for torchrun")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its arguments")


def main(options: Namespace) -> int:
    require_packages("spmd_types")
    if not options.script.is_file():
        raise BadUse(f"expected a script, got {str(options.script)!r}, which is no file")
    from tpkernels.cli.typecheck_steps import CheckedSteps, as_rank_of, as_script

    steps = CheckedSteps()
    with as_rank_of(options.ranks), as_script(options.script, options.arguments):
        wrong = steps.run(str(options.script))
    if wrong:
        print(f"{wrong}\n\n{LEGEND}")
        return 1
    if steps.group is None:
        print(f"{options.script}: no model with tensor-parallel layers was called, so nothing was checked")
        return 1
    if not steps.stepped:
        print(
            f"{options.script}: no torch.optim.Optimizer has stepped parameters of the model that have "
            "gradients, so only what was called is checked: no fault found in it"
        )
        return 1
    print(f"{options.script}: no fault found in types over {steps.ranks} tensor-parallel ranks")
    return 0
