"""What a call takes in each way, and what of its transfers is hidden behind which products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpkernels.planning.timeline.node import Node
from tpkernels.planning.timeline.operators import OPERATORS, Sizes
from tpkernels.planning.timeline.recording import HOST, LAUNCH, PRODUCT, READY, TRANSFER, Rank
from tpkernels.planning.timeline.simulation import Ran, TimelineTask, run
from tpkernels.planning.timeline.symmetric import Decomposed, Symmetric
from tpkernels.planning.timeline.ways import C10d, GpuWay, Naive

WAYS: Mapping[str, type[GpuWay]] = {way.label: way for way in (Naive, C10d, Symmetric, Decomposed)}
MOST_RANKS = 72  # of one NVLink domain today
# Published times on 2 to 8 H100s, as parts of what the model says: the least and the most (docs/overlap.md).
# Those of symmetric and decomposed are of other people's kernels, which have the same shape.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "naive": (0.78, 1.39),
    "symmetric": (0.92, 2.23),
    "decomposed": (0.82, 3.46),
}
CALLS = 3  # in a row: the last takes what each takes where many follow each other


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a call among many like it, on the slowest rank. A model."""

    way: str
    direction: str
    seconds: float
    products: float  # of rank 0, if each had the GPU for itself
    transfers: float  # likewise, of links
    host: float  # its thread is busy for so long
    hidden: Mapping[str, Mapping[str, float]]  # transfer -> product -> seconds that both ran, on rank 0
    ran: Sequence[Ran]  # of the last call, all ranks

    @property
    def exposed(self) -> float:
        """Seconds beyond the products: transfers that nothing hides, waits, launches, sums."""
        return max(0.0, self.seconds - self.products)

    def as_json(self) -> dict[str, Any]:
        spans = [
            {"rank": ran.task.queue[0], "queue": ran.task.queue[1], "name": ran.task.name,
             "kind": ran.task.kind, "start": ran.start, "stop": ran.stop}
            for ran in self.ran
        ]  # fmt: skip
        plain = {name: value for name, value in asdict(self).items() if name != "ran"}
        return {"model": True, **plain, "exposed": self.exposed, "spans": spans}


def predict(operator: str, direction: str, way: str, sizes: Sizes, node: Node) -> Predicted:
    """operator: one of OPERATORS; direction: forward or backward; way: one of WAYS"""
    tasks = record(operator, direction, way, sizes, node)
    return _predicted(way, direction, list(run(tasks).values()))


def record(operator: str, direction: str, way: str, sizes: Sizes, node: Node) -> list[TimelineTask]:
    """What all ranks enqueue in CALLS calls."""
    steps = _found("operator", OPERATORS, operator)
    enqueue, kind = _found("direction", steps, direction), _found("way", WAYS, way)
    tasks: list[TimelineTask] = []
    for number in range(sizes.ranks):
        rank = Rank(number, sizes.ranks, tasks)
        way_of_rank = kind(rank, node)
        for rank.call in range(CALLS):
            way_of_rank.begin()
            enqueue(way_of_rank, sizes)
    return tasks


def _found(what: str, known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"{what}: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def _predicted(way: str, direction: str, ran: Sequence[Ran]) -> Predicted:
    calls = [[each for each in ran if each.task.key[1] == call] for call in range(CALLS)]
    ends = [max(each.stop for each in call) for call in calls]
    last = sorted((each for each in calls[-1] if each.task.kind != READY), key=lambda each: each.start)
    ours = [each for each in last if each.task.queue[0] == 0]

    def total(kind: str) -> float:
        return sum(each.task.seconds for each in ours if each.task.kind == kind)

    return Predicted(
        way=way,
        direction=direction,
        seconds=ends[-1] - ends[-2],
        products=total(PRODUCT),
        transfers=total(TRANSFER),
        host=sum(each.task.seconds for each in ours if each.task.queue[1] == HOST),
        hidden=_hidden(ours),
        ran=last,
    )


def _hidden(ran: Sequence[Ran]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for transfer in (each for each in ran if each.task.kind == TRANSFER):
        beside = found.setdefault(transfer.task.name, defaultdict(float))
        for other in ran:
            if other.task.kind not in (TRANSFER, LAUNCH):
                both = min(transfer.stop, other.stop) - max(transfer.start, other.start)
                if both > 0 and other.task.name != "flag":
                    beside[other.task.name] += both
    return {name: dict(beside) for name, beside in found.items()}
