"""Sorts all layouts of a number of GPUs for a job: layouts that fit by time, others by excess memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tpkernels.planning.job import Hardware, Job, RankLayout, layouts
from tpkernels.planning.memory import MemoryUse, memory_of
from tpkernels.planning.step_time import BlockExposed, StepTime, step_time


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory and time of a layout."""

    layout: RankLayout
    memory: MemoryUse  # on a GPU of the stage that needs most
    time: StepTime
    excess: int  # bytes above the usable memory; negative: bytes left

    @property
    def fits(self) -> bool:
        return self.excess <= 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": asdict(self.layout),
            "bytes": {**asdict(self.memory), "peak": self.memory.peak},
            "seconds": {**asdict(self.time), "step": self.time.total},
            "excess": self.excess,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """All layouts, each in one of these lists."""

    fitting: list[Prediction]  # the fastest first
    too_large: list[Prediction]  # the least excess first
    impossible: list[tuple[RankLayout, str]]  # and the error of the sizes


def advise(
    job: Job, machine: Hardware, world_size: int, most_tensor: int, block_exposed: BlockExposed
) -> Advice:
    for name, count in {"world_size": world_size, "max_tp": most_tensor}.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    predictions, impossible = [], []
    for layout in layouts(world_size, most_tensor):
        try:
            job.require_split(layout)
        except ValueError as error:
            impossible.append((layout, str(error)))
        else:
            predictions.append(predict(job, machine, layout, block_exposed))
    return Advice(
        fitting=sorted(
            (found for found in predictions if found.fits), key=lambda p: (p.time.total, p.memory.peak)
        ),
        too_large=sorted((found for found in predictions if not found.fits), key=lambda p: p.excess),
        impossible=impossible,
    )


def predict(job: Job, machine: Hardware, layout: RankLayout, block_exposed: BlockExposed) -> Prediction:
    memory = memory_of(job, layout)
    time = step_time(job, layout, machine, block_exposed)
    return Prediction(layout, memory, time, memory.peak - machine.usable_memory)
