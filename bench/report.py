"""`python -m bench report`: one page about results of benchmarks, that stands by itself.

`bench gate` compares two runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.results import BadFile, Info, Results, duration, label, read
from tpkernels.cli import BadUse, bad_use_if
from tpkernels.pictures.charts import FILLS, Bar, bars
from tpkernels.pictures.figure import (
    NO_MATPLOTLIB,
    Picture,
    facts,
    figure,
    page,
    paragraph,
    save,
    table,
    verbatim,
)

MOST_BARS = 40  # of a picture
OWN_PICTURE = 8  # cases of an op that are worth one
FACTS = ("device", "backend", "dtype", "world", "revision")
SPREAD = "median over rounds, whiskers: interquartile range; grey: 1.0 is within it"
OF_RATIOS = (
    "Each bar: the naive way's time by ours, the median over interleaved rounds, on a logarithmic axis. "
    "Right of 1 ours is faster. The whisker is the interquartile range; where it crosses 1, the bar is grey."
)
OF_CASES = (
    "Ratio: how many times as fast as the naive way, the median over rounds. Ours, naive: median times, of "
    "the GPU, of a CPU's processor, or of the clock where ranks wait for each other. Of the roof: the share "
    "of what the data sheet allows. Promised: the least ratio on any machine. Other ways: how many times as "
    "fast as each of these."
)


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS", help="the JSON of a run")
    parser.add_argument("-o", type=Path, default=Path("out/report.html"), metavar="FILE", help="the page")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write each picture into FOLDER, too")


def main(options: Namespace) -> int:
    with bad_use_if(BadFile):
        now = read(options.results)
    sections = [("", paragraph(tally(now)) + _environment(now))]
    if now.failures:
        told = (verbatim(f"{name}\n{why.strip()}") for name, why in now.failures.items())
        sections.append(("Failed", "".join(told)))
    pictures = dict(_ratios(now.infos))
    sections.append(("Against the naive way", _figures(pictures)))
    sections.append(("All cases", _all_cases(now.infos)))
    try:
        options.o.parent.mkdir(parents=True, exist_ok=True)
        options.o.write_text(page("Benchmarks", sections), encoding="utf-8")
        print(f"{tally(now)}\npage      {options.o}")
        if options.png:
            files = {options.png / f"{name}.png": picture for name, picture in pictures.items()}
            print(f"pictures  {save(files)}")
    except OSError as error:
        raise BadUse(f"cannot write {error.filename}: {error.strerror}") from error
    return 0


def tally(run: Results) -> str:
    """Wins, losses and what cannot be told, in a line."""
    verdicts = [bar.verdict for bar in map(_bar, run.infos.values()) if bar.is_drawable]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in FILLS)
    failed = f"; {len(run.failures)} failed" * bool(run.failures)
    return f"{len(run.infos)} case{'s' * (len(run.infos) != 1)}: {counts}{failed}"


def _bar(info: Info, name: str = "") -> Bar:
    low, high = info["ratio_quartile_low"], info["ratio_quartile_high"]
    return Bar(name or label(info), info["ratio"], low, high)


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _environment(run: Results) -> str:
    """What it was timed on; several values with commas between."""
    infos = [info | info["versions"] for info in run.infos.values()]
    names = (*FACTS, *dict.fromkeys(name for info in infos for name in info["versions"]))
    found = {name: _distinct(info.get(name) for info in infos) for name in names} | {"command": run.command}
    return facts([(name, value) for name, value in found.items() if value])


def _figures(pictures: Mapping[str, Picture]) -> str:
    svgs = [picture.svg for picture in pictures.values()]
    if not any(svgs):
        return paragraph(NO_MATPLOTLIB) * bool(pictures)
    return "".join(figure(svg, OF_RATIOS) for svg in svgs)


def _ratios(infos: Mapping[str, Info]) -> Iterator[tuple[str, Picture]]:
    """Pictures for each op that has many cases; the others share theirs."""
    counts = Counter(info["op"] for info in infos.values())
    titles = [op for op, count in counts.items() if count >= OWN_PICTURE] + ["Others"]
    for title in titles:
        rows = [
            _bar(info, label(info) if title == info["op"] else f"{info['op']} {label(info)}")
            for info in infos.values()
            if title == (info["op"] if counts[info["op"]] >= OWN_PICTURE else "Others")
        ]
        for start in range(0, len(rows), MOST_BARS):
            number = f", {start // MOST_BARS + 1}" * (len(rows) > MOST_BARS)
            part = rows[start : start + MOST_BARS]
            picture = bars(f"{title}{number}", part, note=SPREAD, across="times as fast as the naive way")
            yield f"ratios-{title}{start // MOST_BARS}", picture


def _all_cases(infos: Mapping[str, Info]) -> str:
    head = ["", "ratio", "ours", "naive", "of the roof", "promised", "other ways"]
    rows = []
    for info in infos.values():
        roof, promised = info.get("roofline"), info.get("least_ratio")
        others = ", ".join(
            f"{key.removeprefix('ratio_to_')} {value:.2f}"
            for key, value in info.items()
            if key.startswith("ratio_to_")
        )
        rows.append([
            f"{info['op']} {label(info)}",
            f"{info['ratio']:.3f}",
            *(duration(info[f"{way}_ms"]) for way in ("ours", "naive")),
            "" if roof is None else f"{roof:.0%}",
            "" if promised is None else f"{promised:.3f}",
            others,
        ])  # fmt: skip
    return table(head, rows, caption=OF_CASES)
