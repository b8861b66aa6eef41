"""All numeric cases of a config, each computed in a child process, see `user_kernels/numerics.py`.

The parent imports no torch: where the user's cache has all answers, there is nothing to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tpkernels.gate.compile_gate import has_parts
from tpkernels.gate.user_kernels import children, recorded
from tpkernels.gate.user_kernels.config import Config

PROGRAM = "tpkernels.gate.user_kernels.numerics"
PROCESSES = 2
NOT_RECORDED = "no results are recorded of it: --update records today's"
WORTH_A_PROCESS = 10  # cases: to start one takes as long


@dataclass(frozen=True)
class Computed:
    """A case with what came of it."""

    case: str
    error: float  # the largest, as a part of what is allowed
    failure: str  # "" if there is none
    place: str = ""  # file and line of the kernel, where it is a user's


def check(
    config: Config, only: str, report: Callable[[str], None], prepare: str, update: bool = False
) -> list[Computed]:
    """All cases that `only` names, see `has_parts`; `report` hears of each as it is done.

    prepare: "module:function", which each process calls with the frames of its cases, before them
    update: record the results of tables that ask for recorded ones
    """
    cases, sketches = list(_cases_of(config)), dict[str, Any]()
    before = recorded.read(config.results)
    for name, item in cases:
        if "recorded" in item:
            item["recorded"] = None if update else before.get(name)
    wanted = [case for case in cases if has_parts(case[0], only)]
    parts = max(1, min(PROCESSES, len(wanted) // WORTH_A_PROCESS))

    def some(part: int) -> list[Computed]:
        return _computed(config, wanted[part::parts], report, prepare, None if update else before, sketches)

    with ThreadPoolExecutor(parts) as threads:
        computed = [case for row in zip_longest(*threads.map(some, range(parts))) for case in row if case]
    if update and sketches:
        known = {name: before[name] for name, _ in cases if name in before}
        recorded.write(known | sketches, config.results)
    return computed


def _cases_of(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and item of each size of each table with an oracle, then of each case of a launcher."""
    for own in config.kernels:
        for number, sizes in enumerate(own.computed):
            text = ",".join(f"{name}={size}" for name, size in sizes.items())
            name = f"{own.name}/{text}" if text else own.name
            item: dict[str, Any] = {"name": own.name, "table": own.as_table(), "sizes": number}
            if own.oracle == recorded.RECORDED:
                item["recorded"] = None
            yield name, item
            if any(kind.dtype == "bf16" for kind in own.tensors.values()):
                yield f"{name}/fp32 for bf16", {**item, "wide": True}
    if config.cases:
        assert config.imported
        for one in children.imported_attribute("cases", config.cases)():
            yield one.name, {"cases": config.cases, "name": one.name}


def _computed(
    config: Config,
    cases: Sequence[tuple[str, children.ItemOfChild]],
    report: Callable[[str], None],
    prepare: str,
    before: recorded.RecordedResults | None,
    sketches: dict[str, Any],
) -> list[Computed]:
    """before: the results that are recorded; None: they are recorded now. sketches: filled with today's"""
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    items = [{**item, "prepare": prepare} for _, item in cases]
    computed = []
    answers = children.answers(PROGRAM, config.folder, items, variables)
    for (name, item), answer in zip(cases, answers, strict=True):
        if isinstance(answer, str):
            answer = {"error": None, "failure": answer}
        elif "mistake" in answer:
            own = next(own for own in config.kernels if own.name == item["name"])
            raise config.mistake(own, answer["mistake"])
        error = float("nan") if answer["error"] is None else answer["error"]
        failure, place = answer["failure"], answer.get("place", "")
        if "sketches" in answer:
            sketches[name] = answer["sketches"]
            if before is not None and name not in before:
                failure = "; ".join(filter(None, [failure, NOT_RECORDED]))
        computed.append(Computed(name, error, failure, place))
        report(name)
    return computed
