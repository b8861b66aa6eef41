"""Two runs side by side: which ratios changed by more than both runs' spreads."""

from __future__ import annotations

from bench.recorded import Case, Run
from tpkernels.pictures.charts import EVEN, Bar, bars
from tpkernels.pictures.figure import Picture, figure, paragraph, table


def change(before: Case, after: Case) -> Bar | None:
    """How many times its former ratio a case has; None where a ratio or its spread is not known.

    The spread is the widest that both runs' allow, so that 1.0 is outside of it where they do not touch.
    """
    old, new = before.bar, after.bar
    spreads = [case.number(f"ratio_quartile_{end}") for case in (before, after) for end in ("low", "high")]
    if not (old.is_drawable and new.is_drawable and all(end > 0 for end in spreads)):
        return None
    (old_low, old_high), (new_low, new_high) = old.spread, new.spread
    return Bar(f"{after.op} {after.label}", new.ratio / old.ratio, new_low / old_high, new_high / old_low)


def section(before: Run, after: Run) -> tuple[str, dict[str, Picture]]:
    """Its HTML, and its pictures by name."""
    was, now = ({case.name: case for case in run.cases} for run in (before, after))
    both = [name for name in now if name in was]
    changes = {name: change(was[name], now[name]) for name in both}
    known = {name: bar for name, bar in changes.items() if bar is not None}
    changed = {name: bar for name, bar in known.items() if bar.verdict != EVEN}
    said = (
        f"{len(changed)} of {len(known)} ratios changed by more than the spreads of both runs."
        + f" {len(both) - len(known)} lack a ratio or its spread." * (len(both) > len(known))
        + f" Only in {before.path}: {len(was) - len(both)}." * (len(was) > len(both))
        + f" Only in {after.path}: {len(now) - len(both)}." * (len(now) > len(both))
    )
    differing = [
        name
        for name in ("device", "backend", "dtype", "torch", "triton", "processor")
        if before.facts.get(name) != after.facts.get(name)
    ]
    if differing:
        said += f" The runs differ in {', '.join(differing)}: a change may come from there."
    if not changed:
        return paragraph(said), {}
    farthest = sorted(changed, key=lambda name: changed[name].ratio)
    picture = bars(
        "Ratios that changed",
        [changed[name] for name in farthest[:20] + farthest[20:][-20:]],
        note=f"the {min(40, len(farthest))} that changed most; whiskers: what both spreads allow",
        across="times the former ratio",
    )
    rows = [
        [changed[name].name, *(f"{case.number('ratio'):.3f}" for case in (was[name], now[name]))]
        for name in farthest
    ]
    shown = figure(
        picture.svg, "Each bar: the ratio after, in parts of the ratio before; right of 1 it rose."
    )
    listed = table(["", "before", "after"], rows, caption="How many times as fast as the naive way.")
    return paragraph(said) + shown + listed, {"changes": picture}
