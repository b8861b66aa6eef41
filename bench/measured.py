"""`python -m bench measured`: what a run of `make gpu` measured, as a section of docs/measured.md."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.stages import PROCESS, STAGE, Result, results_in
from tpkernels.cli import BadUse, bad_use_if
from tpkernels.planning.gpus import RATED_GPUS

PAGE = Path("docs/measured.md")
HEADING = "## On a GPU"
NOTHING, SOMETHING = "**Nothing was measured on a GPU.**", "[One run on a GPU](#on-a-gpu) is below."
OF_TORCH = ("torch", "addmm_dtype_out", "naive", "scaled_mm")  # ways without a kernel of ours
Row = Sequence[object]
Machine = Mapping[str, Any]


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    results = Path("out/gpu/results.jsonl")
    parser.add_argument("results", nargs="?", type=Path, default=results, help=f"default {results}")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help=f"default {PAGE}")


def main(options: Namespace) -> int:
    with bad_use_if(OSError, ValueError):
        text = section(results_in(options.results))
        page = options.page.read_text(encoding="utf-8").replace(NOTHING, SOMETHING)
        before, _, after = page.partition(f"\n{HEADING}\n")
        _, heading, others = after.partition("\n## ")
        rest = [f"## {others.strip()}"] if heading else []
        options.page.write_text("\n\n".join([before.strip(), text, *rest]) + "\n", encoding="utf-8")
    print(f"{options.page} has a section of {options.results}")
    return 0


def section(results: Sequence[Result]) -> str:
    """The section in Markdown; BadUse if the results are of no GPU."""
    machine = next((one.values for one in results if (one.stage, one.name) == ("build", "machine")), {})
    if not machine:
        raise BadUse("expected a line of the machine in stage build; `make gpu QUICK=1` writes it")
    if machine["stands_in"]:
        raise BadUse("expected results of a GPU, got those of a rehearsal, in which nothing was measured")
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "cuda", "triton", "python"))
    commit = machine["revision"] or "unknown"
    parts = [
        HEADING,
        f"{machine['gpu']}, {machine['date'][:10]}, `{machine['command']}`, commit {commit}, {versions}. "
        "All figures were measured there, but those headed *model*.",
        _table(("stage", "begun", "result", "seconds", "passed", "failed", "skipped"), [*_stages(results)]),
    ]
    for part in PARTS:
        found = [one for one in results if one.stage == part.stage and one.values and one.name != STAGE]
        if rows := [*part.rows(found, machine)]:
            parts += [f"### {part.title}", _table(part.head, rows)]
    bad = (one for one in results if one.status in ("failed", "out of time") and one.name != STAGE)
    failed = [(one.stage, one.name, one.error or one.status) for one in bad]
    if failed:
        parts += ["### What failed", _table(("stage", "case", "error"), failed)]
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Row]) -> str:
    def line(cells: Row) -> str:
        return f"| {' | '.join(_cell(cell) for cell in cells)} |"

    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def _cell(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) and value < 100 else str(value)
    text = f"{value:.0f}" if isinstance(value, float) and value >= 100 else text
    return " ".join(text.split())[-300:].replace("|", "\\|")


def _cases(results: Sequence[Result]) -> list[Result]:
    return [one for one in results if one.name != STAGE and not one.name.startswith(PROCESS)]


def _stages(results: Sequence[Result]) -> Iterator[Row]:
    for stage in (one for one in results if one.name == STAGE):
        statuses = [one.status for one in _cases(results) if one.stage == stage.stage]
        counts = (statuses.count(status) for status in ("passed", "failed", "skipped"))
        yield stage.stage, stage.values["begun"], stage.status, stage.seconds, *counts


def _launchers(found: Sequence[Result], machine: Machine) -> Iterator[Row]:
    errors: dict[str, list[float | None]] = {}
    for one in found:
        errors.setdefault(one.name.partition("/")[0], []).append(one.values["of_bound"])
    for launcher, of_bound in errors.items():
        numbers = [error for error in of_bound if error is not None]
        yield launcher, len(of_bound), max(numbers) if len(numbers) == len(of_bound) else "not a number"


def _sms(found: Sequence[Result], machine: Machine) -> Iterator[Row]:
    for one in found:
        times = (f"{one.values[name]:.3g} ms" for name in ("alone", "beside", "reserved"))
        yield one.name, *times, "yes" if one.values["obeys"] else "no"


def _products(found: Sequence[Result], machine: Machine) -> Iterator[Row]:
    rate = next((gpu.flops * 1e-12 for gpu in RATED_GPUS.values() if gpu.name == machine["gpu"]), None)
    for one in found:
        ms, tflops = one.values["ms"], one.values["tflops"]
        torchs = [name for name in ms if name in OF_TORCH]
        ours = [name for name in ms if name not in OF_TORCH]
        best, usual = (min(names, key=ms.__getitem__, default="") for names in (ours, torchs))
        ratio = ms[usual] / ms[best] if best and usual else "none of ours"
        bound = rate if rate and one.values["dtype"] == "bfloat16" else "unknown"
        beside = one.values.get("company")
        name = f"{one.name}, beside {beside}" if beside else one.name
        yield name, tflops.get(usual, "none"), tflops.get(best, "none"), ratio, best, bound


def _overlap(found: Sequence[Result], machine: Machine) -> Iterator[Row]:
    for one in found:
        if one.status == "passed":
            times = one.values["milliseconds"]
            names = ("product", "transfer", "sequential", "overlapped")
            yield one.name, *(f"{times[name]:.3g} ms" for name in names), one.values["efficiency"]


def _host(found: Sequence[Result], machine: Machine) -> Iterator[Row]:
    return ((one.name, f"{one.values['us']:.3g} µs") for one in found)


def _registers(found: Sequence[Result], machine: Machine) -> Iterator[Row]:
    taken: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        if "registers" in one.values:
            taken.setdefault(one.values["kernel"], []).append(one.values)
    for kernel, ways in taken.items():
        yield kernel, len(ways), max(way["registers"] for way in ways), sum(way["spills"] > 0 for way in ways)


class Part(NamedTuple):
    """A table of the results of a stage."""

    stage: str
    title: str
    head: Sequence[str]
    rows: Callable[[Sequence[Result], Machine], Iterator[Row]]


PARTS = (
    Part("launchers", "Kernels against float64", ("launcher", "cases", "error, of allowed"), _launchers),
    Part(
        "reserved_sms",
        "Reserved SMs",
        ("product", "alone", "by busy SMs", "reserved", "leaves them"),
        _sms,
    ),
    Part(
        "products",
        "Llama-3 8B on one of 8 ranks and on one alone, 4096 tokens",
        ("step", "torch, TFLOP/s", "ours", "times as fast", "fastest of ours", "*model*: the data sheet"),
        _products,
    ),
    Part(
        "overlap",
        "Overlap over an emulated link",
        ("case", "product", "transfer", "sequential", "overlapped", "saved, of what could be"),
        _overlap,
    ),
    Part("host_time", "Host time of a call", ("call", "time"), _host),
    Part("registers", "Registers", ("kernel", "variants", "most registers", "with spills"), _registers),
)
