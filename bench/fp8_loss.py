"""`python -m bench fp8_loss`: trains a small GPT in fp8, bf16 and fp32 on tensor-parallel ranks.

The model and the text of `make demo`, trained by what `train` uses: the same weights and excerpts in all
runs. Without options it writes docs/fp8-loss.json and, by matplotlib, docs/fp8-loss.svg, too.
"""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.ranks import RankPool
from tpkernels.groups.initialize import create_parallel_state
from tpkernels.groups.plan import plan_groups
from tpkernels.models.config import SMALL
from tpkernels.pictures.figure import BLUE, GREEN, GREY, NO_MATPLOTLIB, ORANGE, Picture, can_draw
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
LOSSES, PICTURE = ROOT / "docs" / "fp8-loss.json", ROOT / "docs" / "fp8-loss.svg"
LAST = 50  # steps of which differences are told
BATCH = 16


@dataclass(frozen=True)
class Way:
    """How one of the runs computes. fp8: a recipe in words, if any"""

    dtype: torch.dtype
    fp8: str
    colour: str


WAYS = {
    "fp32": Way(torch.float32, "", GREY),
    "bf16": Way(torch.bfloat16, "", BLUE),
    "fp8 rowwise": Way(torch.bfloat16, "rowwise", ORANGE),
    "fp8 blockwise": Way(torch.bfloat16, "blockwise", GREEN),
}
Losses = Mapping[str, Sequence[float]]  # of each way, step by step


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="N")
    parser.add_argument("--seed", type=int, default=1234, metavar="N")
    parser.add_argument("--tp", type=int, default=2, metavar="RANKS")


def main(options: Namespace) -> int:
    with RankPool(options.tp) as pool:
        found = {
            name: pool.run(losses_of, config_of(way, options), timeout=3600.0)[0]
            for name, way in WAYS.items()
        }
    found = {name: [round(loss, 5) for loss in losses] for name, losses in found.items()}
    print(table(found))
    if not options.words:
        LOSSES.write_text(json.dumps(found) + "\n", encoding="utf-8")
        if can_draw():
            PICTURE.write_text(picture(found).svg, encoding="utf-8")
        else:
            print(NO_MATPLOTLIB)
    return 0


def config_of(way: Way, options: Namespace) -> TrainConfig:
    return TrainConfig(
        model=SMALL,
        data=str(ROOT / "data" / "alice.txt"),
        steps=options.steps,
        batch=options.batch,
        seed=options.seed,
        dtype=way.dtype,
        fp8=way.fp8,
        sequence_parallel=True,
    )


def losses_of(config: TrainConfig) -> list[float]:
    """Of each step."""
    ranks = dist.get_world_size()
    trainer = Trainer(
        config, create_parallel_state(plan_groups(world_size=ranks, tensor=ranks)), torch.device("cpu")
    )
    return [trainer.step().loss for _ in range(config.steps)]


def table(found: Losses) -> str:
    """In Markdown."""
    lines = [
        f"| | last loss | mean of the last {LAST} | from bf16: mean, largest | from fp32: mean, largest |",
        "|---|---|---|---|---|",
    ]
    for name, losses in found.items():
        apart = [_apart(losses, found[other]) if name != other else "" for other in ("bf16", "fp32")]
        mean = statistics.mean(losses[-LAST:])
        lines.append(f"| {name} | {losses[-1]:.4f} | {mean:.4f} | {apart[0]} | {apart[1]} |")
    return "\n".join(lines)


def _apart(losses: Sequence[float], others: Sequence[float]) -> str:
    apart = [abs(a - b) for a, b in zip(losses[-LAST:], others[-LAST:], strict=True)]
    return f"{statistics.mean(apart):.4f}, {max(apart):.4f}"


def picture(found: Losses) -> Picture:
    """Above, losses; below, how far they are from those of fp32."""

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        for name, losses in found.items():
            steps = range(1, len(losses) + 1)
            above.plot(steps, losses, color=WAYS[name].colour, linewidth=1.2)
            if name != "fp32":
                apart = [a - b for a, b in zip(losses, found["fp32"], strict=True)]
                below.plot(steps, apart, color=WAYS[name].colour, linewidth=0.9)
        for axes, along in ((above, "loss"), (below, "loss - fp32's")):
            axes.grid(axis="y")
            axes.margins(x=0.01)
            axes.set_ylabel(along)
        below.axhline(0, color=WAYS["fp32"].colour, linewidth=1)
        below.set_xlabel("step")

    legend = [(way.colour, name) for name, way in WAYS.items()]
    note = f"{len(found['fp32'])} steps of {BATCH} x 128 tokens, 2 tensor-parallel ranks, sequence-parallel"
    return Picture("A small GPT in fp8", 4.2, draw, note, legend)
