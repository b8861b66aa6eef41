"""Draws the pictures of the pages: `python -m docs.pictures`, into docs/*.svg. Needs matplotlib.

One shows buckets of a run that `docs/record_runs.py` recorded, another the groups that
`initialize_model_parallel` makes. `overlap-timeline.svg` was drawn by commit 881e42bb.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tpkernels.groups.kinds import GroupKind
from tpkernels.pictures.figure import BLUE, GREEN, GRID, INK, ORANGE, PAPER, QUIET, VIOLET, Picture, hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).parent
LAYOUT = DOCS / "bucket-layout.json"
PIXELS = 700  # what a page shows without scaling
WIDTH = PIXELS / 96  # inches
PALE, CARD = "#f1f4f7", "#cfe0f3"  # what other things lie on

Point = tuple[float, float]


def canvas(figure: Figure, height: float) -> Axes:
    """Axes in pixels, from the top left, below the heading."""
    figure.set_layout_engine("none")
    share = height / 96 / figure.get_figheight()
    axes = figure.add_axes((0, 0, 1, share), xlim=(0, PIXELS), ylim=(height, 0))
    axes.set_axis_off()
    return axes


def box(axes: Axes, at: Point, size: Point, text: str = "", fill: str = PALE, *, ink: str = PAPER) -> None:
    """A rectangle with words in its middle."""
    from matplotlib.patches import Rectangle

    edge, order = (GRID if fill == PALE else fill), (1 if fill in (PALE, CARD) else 2.5)
    axes.add_patch(Rectangle(at, *size, facecolor=fill, edgecolor=edge, linewidth=0.75, zorder=order))
    words(axes, (at[0] + size[0] / 2, at[1] + size[1] / 2), text, ink=ink, ha="center")


def words(
    axes: Axes, at: Point, text: str, *, ink: str = INK, ha: str = "left", size: float = 9, bold: bool = False
) -> None:
    weight = "bold" if bold else "normal"
    axes.text(*at, text, color=ink, ha=ha, va="center_baseline", size=size, weight=weight, linespacing=1.35)


def path(axes: Axes, *points: Point, colour: str = INK, width: float = 1.6, head: bool = True) -> None:
    """A line through the points, perhaps with a head at its end."""
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=colour, linewidth=width, solid_capstyle="butt", solid_joinstyle="miter")
    if head:
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 0, "mutation_scale": 11}
        axes.annotate("", points[-1], points[-2], arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0})


ON_TOP = ("cli", "training", "planning", "optim", "interop", "models", "registered")
BELOW = (
    ("buckets", "gradients over data-parallel ranks"),
    ("groups", "ranks and their process groups"),
    ("checkpoints", "shards of tensors"),
)
CHECKS = (
    ("gate", "compiles and interprets kernels"),
    ("pictures", "draws results"),
)
LANES = {  # room: what it does with x
    "layers": "check sizes, hold weights",
    "ops": "forward and backward",
    "comm": "moves rows of ranks",
    "dispatch": "chooses who computes",
    "kernels": "Triton, or torch",
}


def way_of_x() -> Picture:
    height, lane, left = 500, 48, 174

    def middle(room: str) -> float:
        return 100 + (lane + 8) * list(LANES).index(room) + lane / 2

    def draw(figure: Figure) -> None:
        axes = canvas(figure, height)
        words(axes, (8, 24), "on top", ink=QUIET)
        x = 62.0
        for name in ON_TOP:
            width = 32 + 5.7 * len(name)
            box(axes, (x, 10), (width, 28), name, ink=INK)
            x += width + 5
        for room, does in LANES.items():
            box(axes, (0.5, middle(room) - lane / 2), (PIXELS - 1, lane))
            words(axes, (10, middle(room) - 9), room, bold=True)
            words(axes, (10, middle(room) + 9), does, ink=QUIET, size=8)
        column, row, bottom = left + 60, left + 335, middle("kernels")
        for start, end in zip(list(LANES)[:-1], list(LANES)[1:], strict=True):
            chunks = (-18, -6, 6, 18) if start == "comm" else (0,)
            for off in chunks:
                path(axes, (column + off, middle(start) + 17), (column + off, middle(end) - 17))
            if "comm" not in (start, end):
                path(axes, (row, middle(start) + 17), (row, middle(end) - 17))
        path(axes, (row, middle("ops") + 17), (row, middle("dispatch") - 17))
        path(axes, (column, 72), (column, middle("layers") - 17))
        top = middle("layers")
        path(axes, (column + 70, bottom), (340, bottom), (340, top), (row - 70, top))
        for off in (-18, -6, 6, 18):  # of the partial sums, each when it is computed
            path(axes, (632 + off, bottom - 17), (632 + off, middle("comm") + 17))
        path(axes, (632, middle("comm") - 17), (632, 72))
        for room, x, width, text, fill in (
            ("layers", column - 70, 140, "ColumnParallelLinear", BLUE),
            ("ops", column - 70, 140, "column_linear", BLUE),
            ("comm", column - 70, 140, "all-gather of x,\nchunk by chunk", ORANGE),
            ("dispatch", column - 70, 140, "linear", BLUE),
            ("kernels", column - 70, 140, "x W₁ᵀ, GELU", GREEN),
            ("layers", row - 70, 140, "RowParallelLinear", BLUE),
            ("ops", row - 70, 140, "row_linear", BLUE),
            ("dispatch", row - 70, 140, "linear", BLUE),
            ("kernels", row - 70, 255, "h W₂ᵀ: partial sums, chunk by chunk", GREEN),
            ("comm", 572, 120, "reduce-scatter,\nchunk by chunk", ORANGE),
        ):
            box(axes, (x, middle(room) - 17), (width, 34), text, fill)
        words(axes, (column, 60), "x: this rank's tokens, (16, 2, 256)", ha="center")
        words(axes, (PIXELS - 8, 60), "y: this rank's tokens, (16, 2, 256)", ha="right")
        words(axes, (348, middle("comm")), "h: all tokens, half of\nthe features, (32, 2, 512)")
        for y, label, rooms in ((392, "below", BELOW), (446, "checks", CHECKS)):
            words(axes, (8, y + 20), label, ink=QUIET)
            for number, (name, does) in enumerate(rooms):
                x = 62 + 213 * number
                box(axes, (x, y), (207, 42))
                words(axes, (x + 8, y + 13), name, bold=True)
                words(axes, (x + 8, y + 30), does, ink=QUIET, size=8)

    note = "Forward on one of two tensor-parallel ranks, with sequence parallelism."
    heading = "The package, and the way of x through a column-row pair"
    return Picture(heading, height / 96, draw, note, width=WIDTH)


def groups_built(world: int, tensor: int, pipeline: int) -> dict[GroupKind, list[list[int]]]:
    """The groups that `initialize_model_parallel` makes, asked of each rank in turn."""
    import torch.distributed as dist

    from tests.fake_world import each_rank
    from tpkernels.groups.initialize import initialize_model_parallel

    found: dict[GroupKind, set[tuple[int, ...]]] = {"tp": set(), "dp": set(), "pp": set()}
    for _ in each_rank(world):
        state = initialize_model_parallel(tensor, pipeline)
        for kind in found:
            found[kind].add(tuple(dist.get_process_group_ranks(state.process_group(kind))))
    return {kind: sorted(map(list, groups)) for kind, groups in found.items()}


def groups() -> Picture:
    height, tensor, pipeline = 330, 2, 4
    built = groups_built(16, tensor, pipeline)
    sizes = {kind: len(each[0]) for kind, each in built.items()}
    stage = {rank: number for group in built["pp"] for number, rank in enumerate(group)}
    replica = {rank: number for group in built["dp"] for number, rank in enumerate(group)}

    def place(rank: int) -> Point:
        """The middle of its tile; the ranks of a tensor group lie diagonally."""
        shard = next(group.index(rank) for group in built["tp"] if rank in group)
        return 104 + 156 * stage[rank] + 66 * shard, 66 + 118 * replica[rank] + 40 * shard

    def draw(figure: Figure) -> None:
        axes = canvas(figure, height)
        for number in range(pipeline):
            words(axes, (137 + 156 * number, 18), f"stage {number}", ink=QUIET, ha="center")
        for number in range(sizes["dp"]):
            words(axes, (8, 86 + 118 * number), f"replica {number}", ink=QUIET, size=8)
        for group in built["tp"]:
            (x, y), (right, low) = place(group[0]), place(group[-1])
            box(axes, (x - 36, y - 24), (right - x + 72, low - y + 48), fill=CARD)
        for group in built["dp"]:
            path(axes, *map(place, group), colour=VIOLET, width=3, head=False)
        for group in built["pp"]:
            path(axes, *map(place, group), colour=ORANGE, width=3, head=False)
        for rank in stage:
            x, y = place(rank)
            box(axes, (x - 28, y - 14), (56, 28), f"GPU {rank}", INK)
        x = 70.0
        shown = ((CARD, "shards of a layer"), (VIOLET, "other samples"), (ORANGE, "other layers"))
        for kind, (colour, does) in zip(built, shown, strict=True):
            box(axes, (x, 288), (16, 16), fill=colour)
            words(axes, (x + 23, 289), f"{len(built[kind])} {kind} groups of {sizes[kind]}", bold=True)
            words(axes, (x + 23, 306), f"{does}: {built[kind][0]}", ink=QUIET, size=8)
            x += 205

    by_axis = f"tensor {tensor} x data {sizes['dp']} x pipeline {pipeline}"
    note = f"initialize_model_parallel({tensor}, {pipeline}) on 16 ranks: {by_axis}"
    return Picture("Process groups of 16 ranks, one a GPU", height / 96, draw, note, width=WIDTH)


def buckets() -> Picture:
    run = json.loads(LAYOUT.read_text())
    sent = run["launched_in_backward"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, bucket in enumerate(run["buckets"]):
            bottom = 0.0
            for name, size in bucket:
                fill = BLUE if number < sent else ORANGE
                bar = axes.bar(number, size / 2**20, 0.84, bottom, color=fill, edgecolor=PAPER, linewidth=0.7)
                hint(bar[0], f"{name}: {size:,} bytes")
                bottom += size / 2**20
            axes.text(number, bottom + 0.3, f"{bottom:.1f}", ha="center", va="bottom", size=8)
        axes.set_xticks(range(len(run["buckets"])))
        axes.set_xlabel("bucket, in the order of sending: backward begins at the last layer")
        axes.set_ylabel("MiB; a segment is a parameter")
        axes.grid(axis="y")
        axes.margins(y=0.1)

    late = len(run["buckets"]) - sent
    legend = [(BLUE, f"sent in backward: {sent}"), (ORANGE, f"sent by finish(): {late}")]
    note = f"{run['model']}, fp32, two CPU ranks; second step of a run of {made_on(LAYOUT)}."
    return Picture("Gradient buckets", 2.9, draw, note, legend[: 1 + bool(late)], WIDTH)


def made_on(record: Path) -> str:
    return str(json.loads(record.read_text())["recorded"])


DRAWN = {
    "way-of-x.svg": way_of_x,
    "groups-16.svg": groups,
    "bucket-layout.svg": buckets,
}


def main(folder: Path = DOCS) -> None:
    for name, draw in DRAWN.items():
        draw().write(folder / name)


if __name__ == "__main__":
    main()
