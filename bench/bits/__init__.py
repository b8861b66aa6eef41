"""`python -m bench bits`: are sums the same bits whatever the timing, with overlap on?

Each program first runs undisturbed. Then it runs under schedules that delay, reorder and stop what they can,
and every result and gradient of every rank must have the bits of the first run. Exit code 1: one has not, or
ranks hang. See docs/determinism.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tpkernels.cli import SAID_EVERY, BadUse, Progress, add_number, write_json, written_to

if TYPE_CHECKING:
    from bench.bits.rank import Digests

SCHEDULES, SEED, RANKS = 1000, 1, (2, 4)
MOST_RANKS = 16
AT_ONCE = 25  # schedules of one program in one call of the ranks
PATIENCE = 120.0  # seconds for one program under one schedule
INTERPRETED_SHARE = 100  # one schedule in so many: interpreted kernels are slow


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    add_number(parser, "--schedules", "adversarial ones, in all", SCHEDULES, least=1)
    add_number(parser, "--seed", "of the first schedule", SEED, least=0)
    parser.add_argument(
        "--world-size",
        type=_ranks,
        default=RANKS,
        metavar="LIST",
        help=f"numbers of ranks ({','.join(map(str, RANKS))})",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="what has NAME between slashes: shared/4/row, or row",
    )
    parser.add_argument(
        "--json", type=written_to, metavar="FILE", help="write all hashes and failures into FILE"
    )


def main(options: Namespace) -> int:
    """Print a table of certificates; return 1 if a bit differed or ranks hung."""
    began = time.perf_counter()
    plan = planned(options.schedules, options.world_size, options.only)
    total = sum(len(each.programs) * len([*_batches(range(count))]) for each, count in plan)
    if find_spec("triton") is None:
        print("waiting kernels are left out: triton is not installed")
    with Progress("checking bits:", total, seconds=SAID_EVERY) as step:
        found = certify(plan, options.seed, step)
    seconds = time.perf_counter() - began
    failures = [failure for certificate in found for failure in certificate.failures]
    told = {
        "versions": {name: import_module(name).__version__ for name in ("tpkernels", "torch")},
        "seed": options.seed,
        "failures": failures,
        "certificates": [asdict(each) for each in found],
    }
    write_json(options.json, told)
    print(f"{'transport':<10}{'ranks':>6}{'programs':>10}{'schedules':>11}{'hashes':>8}{'seconds':>9}")
    for each in found:
        hashes = sum(map(len, each.hashes.values()))
        print(
            f"{each.transport:<10}{each.ranks:>6}{len(each.programs):>10}{each.schedules:>11}{hashes:>8}"
            f"{each.seconds:>9.0f}"
        )
    for failure in failures:
        print(failure)
    done = sum(each.schedules for each in found)
    if not failures:
        print(f"the same bits under {done} schedules in {seconds:.0f} s, from seed {options.seed} on")
    return 1 if failures else 0


def _ranks(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and 2 <= int(number) <= MOST_RANKS for number in numbers):
        raise ArgumentTypeError(f"expected numbers from 2 to {MOST_RANKS} with commas between, got {text!r}")
    return tuple(dict.fromkeys(map(int, numbers)))


@dataclass
class Certificate:
    """What came of one transport on so many ranks."""

    transport: str
    ranks: int
    programs: tuple[str, ...]
    schedules: int = 0  # that have ended
    seconds: float = 0.0
    hashes: dict[str, list[str]] = field(default_factory=dict)  # of each program; one is right
    failures: list[str] = field(default_factory=list)


def planned(schedules: int, ranks: Sequence[int], only: str) -> list[tuple[Certificate, int]]:
    """What runs, and under how many schedules; at least so many in all.

    only: what has this between slashes in its name, such as shared/4/row or row
    """
    from bench.bits.programs import OF_TRANSPORTS, PROGRAMS

    programs = {"c10d": list(PROGRAMS), "shared": OF_TRANSPORTS, "kernels": OF_TRANSPORTS}
    if find_spec("triton") is None:
        del programs["kernels"]
    chosen = []
    for count in ranks:
        for transport, names in programs.items():
            named = {name: f"/{transport}/{count}/{name}/" for name in names}
            own = tuple(name for name in names if not only or fnmatchcase(named[name], f"*/{only}/*"))
            if own:
                chosen.append(Certificate(transport, count, own))
    if not chosen:
        raise BadUse(f"nothing has {only!r} in its name, such as shared/{ranks[0]}/row")
    quick = sum(each.transport != "kernels" for each in chosen)
    slow = len(chosen) - quick
    interpreted = max(1, schedules // (INTERPRETED_SHARE if quick else max(1, slow)))
    left = max(0, schedules - slow * interpreted)
    share = -(-left // quick) if quick else 0
    return [(each, interpreted if each.transport == "kernels" else max(1, share)) for each in chosen]


def certify(
    plan: Sequence[tuple[Certificate, int]],
    seed: int,
    step: Callable[[object], None],
    planted: str = "",
    patience: float = PATIENCE,
) -> list[Certificate]:
    """Run all that is planned. A transport whose ranks fail is left; the others go on with new ranks.

    planted: `module:function`, called first by each rank, so that tests can plant faults
    """
    from bench.bits.rank import Task, results_of
    from tests.ranks import RankFailure, RankPool

    os.environ["TRITON_INTERPRET"] = "1"  # read by the ranks
    for count in dict.fromkeys(each.ranks for each, _ in plan):
        with RankPool(count) as ranks, TemporaryDirectory() as folder:
            progress = Path(folder, "seed")  # of the schedule under which ranks run now
            for certificate, schedules in plan:
                if certificate.ranks != count:
                    continue
                began = time.perf_counter()
                try:
                    for program in certificate.programs:
                        for seeds in _batches(range(seed, seed + schedules)):
                            progress.write_text("undisturbed")
                            task = Task(certificate.transport, program, seeds, planted, str(progress))
                            limit = patience * (1 + len(seeds))
                            found = ranks.run(results_of, task, timeout=limit)
                            _compare(certificate, program, seeds, found)
                            what = f"{certificate.transport} on {count} ranks: {program}"
                            step(f"{what}, {len(seeds)} schedules")
                    certificate.schedules = schedules
                except RankFailure as error:
                    under = progress.read_text()
                    seed_of = None if under == "undisturbed" else int(under)
                    certificate.failures.append(_said(certificate, program, seed_of, str(error)))
                certificate.seconds = time.perf_counter() - began
    return [certificate for certificate, _ in plan]


def _batches(seeds: range) -> Iterator[tuple[int, ...]]:
    for first in range(0, len(seeds), AT_ONCE):
        yield tuple(seeds[first : first + AT_ONCE])


def _compare(
    certificate: Certificate, program: str, seeds: Sequence[int], found: Sequence[Sequence[Digests]]
) -> None:
    """found: of each rank, first of the undisturbed run, then under the schedule of each seed"""
    undisturbed, *others = zip(*found, strict=True)
    known = certificate.hashes.setdefault(program, [_hash(undisturbed)])
    for seed, results in zip((None, *seeds), (undisturbed, *others), strict=True):
        if (own := _hash(results)) in known:
            continue
        if len(known) == 1:  # the first difference says enough
            certificate.failures.append(_said(certificate, program, seed, _difference(undisturbed, results)))
        known.append(own)


def _hash(found: Sequence[Digests]) -> str:
    """Of all tensors of all ranks."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _difference(first: Sequence[Digests], found: Sequence[Digests]) -> str:
    apart = [
        f"{name} of rank {rank}"
        for rank, (ours, theirs) in enumerate(zip(first, found, strict=True))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    others = f" and {len(apart) - 1} other tensors differ" if len(apart) > 1 else " differs"
    return f"{apart[0]}{others} from the undisturbed run"


def _said(certificate: Certificate, program: str, seed: int | None, what: str) -> str:
    """Where it was, what it was, and how to see it again."""
    transport, ranks = certificate.transport, certificate.ranks
    under, option = "undisturbed", ""
    if seed is not None:
        under, option = f"under the schedule of seed {seed}", f" --seed {seed}"
    again = f"{option} --schedules 1 --world-size {ranks} --only {transport}/{ranks}/{program}"
    where = f"{program} over {transport} on {ranks} ranks, {under}"
    return f"{where}: {what}; again: python -m bench bits{again}"
