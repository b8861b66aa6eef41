"""`python -m bench COMMAND`: one module a command, each imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tpkernels.cli import run_command

COMMANDS = {
    "run": "run the benchmarks of a selection and leave one JSON of what they said",
    "gate": "compare with a baseline: exit code 1 on a regression",
    "report": "one page with pictures of what results say, or of what changed between two",
    "bits": "ops and gradient buckets under schedules that delay and reorder: exit code 1 if a bit differs",
    "invariance": "runs at several tensor-parallel sizes, compared to the bit: exit code 1 if they differ",
    "invariance_cost": "what that costs products on this CPU, and bytes that ranks send",
    "fp8_numbers": "how far products in fp8 are off unquantized ones, by distribution and recipe",
    "peers": "ours against the libraries that run on a CPU, as a table",
    "buckets": "gradient buckets against both forms of DistributedDataParallel, as a table",
    "muon": "a step of Muon on shards, against gathering every matrix on every rank",
    "fp8_sums": "what sums of 14 bits add to the error of products in fp8, by depth",
    "fp8_loss": "what a small GPT learns in fp8, bf16 and fp32",
    "predicted": "compare the model of tensor-parallel calls with published times, or with a throttled link",
    "gpu": "all that is to be done on a machine with a GPU, in stages",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run_command("bench", "Benchmarks against the naive way.", COMMANDS, "bench", argv)


if __name__ == "__main__":
    sys.exit(main())
