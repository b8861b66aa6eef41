"""A second opinion on who is in which group, written without strides: by listing and comparing ranks.

`Classic` answers what Megatron's two initializers answer, for one rank of one world.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product


def listed(rank: int, sizes: Mapping[str, int], along: Collection[str]) -> list[int]:
    """The ranks that differ from `rank` along some axes only, by listing all places of a grid.

    sizes: of the axes, the fastest first
    """
    slowest_first = list(reversed(sizes))
    grid = product(*(range(sizes[axis]) for axis in slowest_first))
    places = [dict(zip(slowest_first, place, strict=True)) for place in grid]
    fixed = sizes.keys() - set(along)
    return [other for other, at in enumerate(places) if all(at[axis] == places[rank][axis] for axis in fixed)]


@dataclass(frozen=True)
class Classic:
    world: int
    tp: int
    pp: int
    virtual: int | None
    split: int | None
    rank: int

    def group(self, kind: str) -> list[int]:
        sizes = {"tp": self.tp, "dp": self.world // (self.tp * self.pp), "pp": self.pp}
        return listed(self.rank, sizes, ("tp", "pp") if kind == "model" else (kind,))

    def place(self, kind: str) -> int:
        return self.group(kind).index(self.rank)

    def embedding(self) -> list[int]:
        pipeline = self.group("pp")
        stages = {0, self.pp - 1} | (set() if self.split is None else {self.split})
        return [rank for stage, rank in enumerate(pipeline) if stage in stages]

    def position_embedding(self) -> list[int]:
        pipeline = self.group("pp")
        return [rank for stage, rank in enumerate(pipeline) if stage in (0, self.split)]

    def answers(self, virtual_rank: int | None) -> Iterator[tuple[str, tuple, object]]:
        """(function of parallel_state, its arguments, the answer), while at `virtual_rank`."""
        pipeline, stage, last = self.group("pp"), self.place("pp"), self.pp - 1
        no_virtual = self.virtual is None
        first_here = stage == 0 and (no_virtual or virtual_rank == 0)
        last_here = stage == last and (no_virtual or virtual_rank == self.virtual - 1)

        yield "model_parallel_is_initialized", (), True
        for axis, kind in {"tensor_model": "tp", "pipeline_model": "pp", "data": "dp"}.items():
            yield f"get_{axis}_parallel_world_size", (), len(self.group(kind))
            yield f"get_{axis}_parallel_rank", (), self.place(kind)
        yield "get_virtual_pipeline_model_parallel_world_size", (), self.virtual
        yield "get_virtual_pipeline_model_parallel_rank", (), virtual_rank
        yield "get_tensor_model_parallel_src_rank", (), self.group("tp")[0]
        yield "get_data_parallel_src_rank", (), self.group("dp")[0]
        yield "get_pipeline_model_parallel_first_rank", (), pipeline[0]
        yield "get_pipeline_model_parallel_last_rank", (), pipeline[-1]
        yield "get_pipeline_model_parallel_next_rank", (), (pipeline + pipeline)[stage + 1]
        yield "get_pipeline_model_parallel_prev_rank", (), pipeline[stage - 1]
        yield "is_pipeline_first_stage", (), first_here
        yield "is_pipeline_first_stage", (True,), stage == 0
        yield "is_pipeline_last_stage", (), last_here
        yield "is_pipeline_last_stage", (True,), stage == last

        holds_embedding = self.rank in self.embedding()
        yield "is_rank_in_embedding_group", (True,), holds_embedding
        if stage == 0:
            holds_embedding = holds_embedding and first_here
        elif stage == last:
            holds_embedding = holds_embedding and last_here
        yield "is_rank_in_embedding_group", (), holds_embedding
        yield "is_rank_in_position_embedding_group", (), self.rank in self.position_embedding()

        no_split = self.pp == 1 or self.split is None
        before = [no_split or s < self.split for s in range(self.pp + 1)]
        after = [no_split or s >= self.split for s in range(self.pp + 1)]
        for asked, of in (((), stage), *(((other,), other) for other in range(self.pp))):
            yield "is_pipeline_stage_before_split", asked, before[of]
            yield "is_pipeline_stage_after_split", asked, after[of]
        yield "is_pipeline_stage_at_split", (), before[stage] and after[stage + 1]


def all_settings(worlds: tuple[int, ...]) -> Iterator[tuple[int, int, int, int | None, int | None]]:
    """(world, tp, pp, virtual, split) for every way to split each world."""
    for world in worlds:
        for tp, pp in product(range(1, world + 1), repeat=2):
            if world % (tp * pp) == 0:
                virtuals, splits = [None, 1, 2, 3] if pp > 1 else [None], [None, *range(pp)]
                yield from product([world], [tp], [pp], virtuals, splits)
