"""`python -m tpkernels qualify`: tries kernels and transports on this machine's GPUs, or on its CPU.

Alone it starts a rank for each GPU, or two on the CPU; under torchrun it uses that world.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from tpkernels.cli import BadUse, add_number, require_packages, written_to

SECONDS = 120.0
CPU_RANKS = 2


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--json", type=written_to, metavar="FILE", help="also write the report into FILE")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"about how long ({SECONDS:g})"
    )
    add_number(parser, "--seed", "of shapes and numbers, to see a run again")
    parser.add_argument("--quick", action="store_true", help="a little of each: shows that the command works")


def main(options: Namespace) -> int:
    if not 0 < options.seconds < 86400:
        raise BadUse(f"expected --seconds between 0 and a day, got {options.seconds:g}")
    require_packages("triton")
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported; ranks inherit it
    if "RANK" in os.environ:
        from tpkernels.cli.qualify_ranks import qualify_as_rank

        return qualify_as_rank(options)
    from tpkernels.training.launch import run_ranks

    command = [sys.executable, "-m", "tpkernels", "qualify", *options.words]
    return run_ranks(command, torch.cuda.device_count() or CPU_RANKS)
