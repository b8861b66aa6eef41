"""`python -m bench COMMAND`: one module a command, each imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tpkernels.cli import run_command

COMMANDS = {
    "run": "run the benchmarks of a selection and leave one JSON of what they said",
    "gate": "compare with a baseline: exit code 1 on a regression",
    "report": "one page with pictures of what results say, or of what changed between two",
    "streams": "what ranks enqueue, run in many orders without a GPU: exit code 1 if one fails",
    "bits": "ops and gradient buckets under schedules that delay and reorder: exit code 1 if a bit differs",
    "invariance": "runs at several tensor-parallel sizes, compared to the bit: exit code 1 if they differ",
    "record_regressions": "is each kernel told that became slower, and none that did not?",
    "peers": "ours against the libraries that run on a CPU, as a table",
    "buckets": "gradient buckets against both forms of DistributedDataParallel, as a table",
    "gpu": "all that is to be done on a machine with a GPU, in stages",
    "measured": "write what a run of `gpu` measured into docs/measured.md",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run_command("bench", "Benchmarks against the naive way.", COMMANDS, "bench", argv)


if __name__ == "__main__":
    sys.exit(main())
