"""`python -m bench report`: one page about results of benchmarks, that stands by itself.

python -m bench report RESULTS                       of one run
python -m bench report BEFORE AFTER                  and what changed since another
python -m bench report RESULTS out/gpu/overlap.json --png FOLDER
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench import comparison
from bench.recorded import Case, Overlaps, Run, TimeLine, Unreadable, as_object, read
from bench.results import duration
from tpkernels.cli import BadUse, bad_use_if
from tpkernels.pictures.charts import FILLS, Bar, TimedWork, bars, lanes, roofline
from tpkernels.pictures.figure import NO_MATPLOTLIB, Picture, figure, page, paragraph, save, table, verbatim
from tpkernels.planning.gpus import RATED_GPUS

MOST_BARS = 40  # of a picture
OWN_PICTURE = 8  # cases of an op that are worth one
NAIVE = "the naive way"
SIXTEEN_BITS = ("bfloat16", "float16")  # what the peaks of data sheets are of
SPREAD = "median over rounds, whiskers: interquartile range; grey: 1.0 is within it"

Section = tuple[str, str]
Pictures = dict[str, Picture]  # by what their PNG is called


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="JSON; of two runs the first is the older"
    )
    parser.add_argument("-o", type=Path, default=Path("out/report.html"), metavar="FILE", help="the page")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write each picture into FOLDER, too")


def main(options: Namespace) -> int:
    with bad_use_if(Unreadable):
        found = [read(path) for path in options.results]
    runs = [one for one in found if isinstance(one, Run)]
    if len(runs) > 2:
        raise BadUse(f"expected the results of one run, or of two to compare, got {len(runs)}")
    pictures: Pictures = {}
    sections = list(_sections(found, runs, pictures))
    try:
        options.o.parent.mkdir(parents=True, exist_ok=True)
        options.o.write_text(page("Benchmarks", sections), encoding="utf-8")
        if runs:
            print(tally(runs[-1]))
        print(f"page      {options.o}")
        if options.png:
            files = {options.png / f"{name}.png": picture for name, picture in pictures.items()}
            print(f"pictures  {save(files)}")
    except OSError as error:
        raise BadUse(f"cannot write {error.filename}: {error.strerror}") from error
    return 0


def tally(run: Run) -> str:
    """Wins, losses and what cannot be told, in a line."""
    shown = [case.bar for case in run.compared]
    verdicts = [bar.verdict for bar in shown if bar.is_drawable]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in FILLS)
    failed = f"; {len(run.failures)} failed" * bool(run.failures)
    return f"{len(run.cases)} case{'s' * (len(run.cases) != 1)}: {counts}{failed}"


def _sections(
    found: Sequence[Run | Overlaps | TimeLine], runs: Sequence[Run], pictures: Pictures
) -> Iterator[Section]:
    """As they follow each other on the page; their pictures go to `pictures`, too."""
    if runs:
        yield "", paragraph(tally(runs[-1])) + _environment(runs)
        yield from _failures(runs[-1])
        if len(runs) == 2:
            html, drawn = comparison.section(*runs)
            pictures |= drawn
            yield "What changed", html
        drawn = dict(_ratios(runs[-1].compared))
        pictures |= drawn
        yield "Against the naive way", _figures(drawn, _OF_RATIOS)
        drawn = dict(_rooflines(runs[-1].cases))
        pictures |= drawn
        if drawn:
            yield "Roofline", _figures(drawn, _OF_ROOFS)
        yield from _host_cost(runs[-1].cases)
    for one in found:
        if isinstance(one, TimeLine):
            drawn = {f"timeline-{one.path.stem}": lanes(one.path.stem, one.panels)}
            pictures |= drawn
            yield "Time line", _figures(drawn, _OF_TIME_LINES)
        elif isinstance(one, Overlaps):
            html, drawn = _overlap(one)
            pictures |= drawn
            yield "Transfers behind products", html
    if runs:
        yield "All cases", _all_cases(runs[-1].cases)


def _figures(pictures: Pictures, caption: str) -> str:
    """Numbered where there are several."""
    svgs = [picture.svg for picture in pictures.values()]
    if not any(svgs):
        return paragraph(NO_MATPLOTLIB) * bool(pictures)
    numbers = [f"{number} of {len(svgs)}. " * (len(svgs) > 1) for number in range(1, len(svgs) + 1)]
    return "".join(figure(svg, number + caption) for svg, number in zip(svgs, numbers, strict=True))


_OF_RATIOS = (
    "Each bar: the naive way's time by ours, the median over interleaved rounds, on a logarithmic axis. "
    "Right of 1 ours is faster. The whisker is the interquartile range; where it crosses 1, the bar is grey."
)
_OF_ROOFS = (
    "Medians, against the peaks of the data sheet: dense 16-bit products, and memory. Work and bytes are "
    "those of a perfect implementation."
)
_OF_TIME_LINES = (
    "A lane for what each rank computed, and one for what it received: both at once is what overlap is for. "
    "The line marks the end; panels share one scale of time."
)
_OF_OVERLAPS = "Each bar: the time of product and transfer one after the other, by their time at once."
_OF_HOST = (
    "Time of a call on tiny tensors, in times of the naive way's: the median over rounds, the interquartile "
    "range, and the most that is promised on any machine."
)
_OF_CASES = (
    "Ratio: how many times as fast as the naive way, the median over rounds. Ours, naive: median times, of "
    "the GPU, of a CPU's processor, or of the clock where ranks wait for each other. Of the roof: the share "
    "of what the data sheet allows. Promised: the least ratio on any machine. Other ways: how many times as "
    "fast as each of these."
)


def _environment(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.facts)
    rows = [[name, *(run.facts.get(name, "") for run in runs)] for name in names]
    return table(["", *(str(run.path) for run in runs)], rows, numbers=False, caption="Where this was timed.")


def _failures(run: Run) -> Iterator[Section]:
    if run.failures:
        yield "Failed", "".join(verbatim(f"{name}\n{why.strip()}") for name, why in run.failures.items())


def _ratios(cases: Sequence[Case]) -> Iterator[tuple[str, Picture]]:
    """Pictures for each op that has many cases; the others share theirs."""
    counts = Counter(case.op for case in cases)
    for op in (op for op, count in counts.items() if count >= OWN_PICTURE):
        own = [case for case in cases if case.op == op]
        naive = dict.fromkeys(case.word("naive") for case in own if case.word("naive"))
        yield from _in_parts(op, [case.bar for case in own], NAIVE if len(naive) != 1 else "".join(naive))
    others = [case for case in cases if counts[case.op] < OWN_PICTURE]
    if others:
        title = "Other ops" if len(others) < len(cases) else "All ops"
        named = [replace(case.bar, name=f"{case.op} {case.label}") for case in others]
        yield from _in_parts(title, named, NAIVE)


def _in_parts(title: str, rows: Sequence[Bar], naive: str) -> Iterator[tuple[str, Picture]]:
    for start in range(0, len(rows), MOST_BARS):
        part, numbered = rows[start : start + MOST_BARS], len(rows) > MOST_BARS
        range_ = f", {start + 1} to {start + len(part)} of {len(rows)}" if numbered else ""
        number = f"-{start // MOST_BARS + 1}" if numbered else ""
        across = f"times as fast as {naive}"
        yield f"ratios-{_file_name(title)}{number}", bars(title + range_, part, note=SPREAD, across=across)


def _rooflines(cases: Sequence[Case]) -> Iterator[tuple[str, Picture]]:
    for name, gpu in RATED_GPUS.items():
        works = [
            TimedWork(case.label, series, case.number("flops"), case.number("bytes"), 1e-3 * case.number(key))
            for case in cases
            if case.word("device") == gpu.name
            and case.word("dtype") in SIXTEEN_BITS
            and case.info.get("roofline") is not None
            for series, key in (("ours", "ours_ms"), ("naive", "naive_ms"))
        ]
        if works:
            yield f"roofline-{name}", roofline(gpu.name, works, flops=gpu.flops, bytes=gpu.bytes)


def _host_cost(cases: Sequence[Case]) -> Iterator[Section]:
    rows = []
    for case in cases:
        bar, promised = case.bar, case.number("least_ratio")
        if "host_cost" in case.op and bar.is_drawable:
            low, high = bar.spread
            most = f"{1 / promised:.2f}{_unless_kept(case)}" if promised > 0 else ""
            rows.append([case.label, f"{1 / bar.ratio:.2f}", f"{1 / high:.2f} to {1 / low:.2f}", most])
    if rows:
        head = ["", "times naive's", "interquartile range", "promised at most"]
        yield "What a call costs on the host", table(head, rows, caption=_OF_HOST)


def _unless_kept(case: Case) -> str:
    return ", not kept" if case.number("ratio") < case.number("least_ratio") else ""


def _overlap(one: Overlaps) -> tuple[str, Pictures]:
    """Time lines of copies and products: at once, and one after the other."""
    rows, shown = [], []
    for result in one.results:
        shape, times = (as_object(result.get(key)) for key in ("shape", "milliseconds"))
        label = " x ".join(str(shape.get(key, "?")) for key in ("tokens", "in", "out"))
        label += f", {shape.get('parts', '?')} parts"
        if "error" in result:
            rows.append([label, str(result["error"])])
            continue
        case = Case(label, times)
        product, transfer = case.number("product"), case.number("transfer")
        sequential, overlapped = case.number("sequential"), case.number("overlapped")
        label += f", transfer {transfer / product:.1f} of product" if product > 0 else ""
        milliseconds = (product, transfer, sequential, overlapped)
        shares = [Case("", result).number(key) for key in ("efficiency", "control_efficiency")]
        numbers = [duration(value) for value in milliseconds]
        rows.append([label, *numbers, *(_written(share, ".0%") for share in shares)])
        shown.append(Bar(label, sequential / overlapped if overlapped > 0 else float("nan")))
    head = ["", "product", "transfer", "sequential", "overlapped", "hidden", "hidden by the control"]
    drawn = {
        f"overlap-{_file_name(one.path.stem)}": bars(
            "Overlapped against sequential", shown, across="times as fast as sequential"
        )
    }
    said = "Hidden: the time saved, as a share of what could be; by the control, which may hide nothing, too."
    return _figures(drawn, _OF_OVERLAPS) + table(head, rows, caption=said), drawn


def _all_cases(cases: Sequence[Case]) -> str:
    head = ["", "ratio", "interquartile range", "ours", "naive", "of the roof", "promised", "other ways"]
    rows = []
    for case in cases:
        spread = [_written(case.number(f"ratio_quartile_{end}"), ".3f") for end in ("low", "high")]
        times = [duration(case.number(f"{who}_ms")) for who in ("ours", "naive")]
        others = ", ".join(
            f"{key.removeprefix('ratio_to_')} {_written(case.number(key), '.2f')}"
            for key in case.info
            if key.startswith("ratio_to_")
        )
        rows.append(
            [
                f"{case.op} {case.label}",
                _written(case.number("ratio"), ".3f"),
                " to ".join(end for end in spread if end),
                *times,
                _written(case.number("roofline"), ".0%"),
                _written(case.number("least_ratio"), ".3f") + _unless_kept(case),
                others,
            ]
        )
    return table(head, rows, caption=_OF_CASES)


def _written(number: float, form: str) -> str:
    """Nothing for what is not known."""
    return "" if number != number else f"{number:{form}}"


def _file_name(words: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in words)
