"""A second opinion on who is in which group, written without strides: by listing and comparing ranks.

`Classic` answers what Megatron's two initializers answer, for one rank of one world.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AXES = {"tp": 0, "dp": 1, "pp": 2}


def place(rank: int, world: int, tp: int, pp: int) -> tuple[int, int, int]:
    """(tensor, data, pipeline) position of a rank: tensor fastest, then data, then pipeline."""
    dp = world // (tp * pp)
    places = [(t, d, p) for p in range(pp) for d in range(dp) for t in range(tp)]
    return places[rank]


def peers(rank: int, world: int, tp: int, pp: int, along: tuple[str, ...]) -> list[int]:
    """The ranks whose positions agree with `rank`'s on every axis but those `along`."""
    fixed = [index for axis, index in AXES.items() if axis not in along]
    own = place(rank, world, tp, pp)
    places = [place(other, world, tp, pp) for other in range(world)]
    return [other for other in range(world) if all(places[other][i] == own[i] for i in fixed)]


@dataclass(frozen=True)
class Classic:
    world: int
    tp: int
    pp: int
    virtual: int | None
    split: int | None
    rank: int

    def group(self, kind: str) -> list[int]:
        along = ("tp", "pp") if kind == "model" else (kind,)
        return peers(self.rank, self.world, self.tp, self.pp, along)

    def embedding(self) -> list[int]:
        pipeline = self.group("pp")
        stages = {0, self.pp - 1} | (set() if self.split is None else {self.split})
        return [rank for stage, rank in enumerate(pipeline) if stage in stages]

    def position_embedding(self) -> list[int]:
        pipeline = self.group("pp")
        return [rank for stage, rank in enumerate(pipeline) if stage in (0, self.split)]

    def answers(self, virtual_rank: int | None) -> Iterator[tuple[str, tuple, object]]:
        """(function of parallel_state, its arguments, the answer), while at `virtual_rank`."""
        tensor, data, stage = place(self.rank, self.world, self.tp, self.pp)
        pipeline = self.group("pp")
        last = self.pp - 1
        no_virtual = self.virtual is None
        first_here = stage == 0 and (no_virtual or virtual_rank == 0)
        last_here = stage == last and (no_virtual or virtual_rank == self.virtual - 1)

        yield "model_parallel_is_initialized", (), True
        yield "get_tensor_model_parallel_world_size", (), self.tp
        yield "get_tensor_model_parallel_rank", (), tensor
        yield "get_pipeline_model_parallel_world_size", (), self.pp
        yield "get_pipeline_model_parallel_rank", (), stage
        yield "get_data_parallel_world_size", (), self.world // (self.tp * self.pp)
        yield "get_data_parallel_rank", (), data
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
        yield "is_pipeline_stage_before_split", (), before[stage]
        yield "is_pipeline_stage_after_split", (), after[stage]
        yield "is_pipeline_stage_at_split", (), before[stage] and after[stage + 1]
        for other in range(self.pp):
            yield "is_pipeline_stage_before_split", (other,), before[other]
            yield "is_pipeline_stage_after_split", (other,), after[other]


def all_settings(worlds: tuple[int, ...]) -> Iterator[tuple[int, int, int, int | None, int | None]]:
    """(world, tp, pp, virtual, split) for every way to split each world."""
    for world in worlds:
        for tp in range(1, world + 1):
            for pp in range(1, world + 1):
                if world % (tp * pp):
                    continue
                for virtual in [None, 1, 2, 3] if pp > 1 else [None]:
                    for split in [None, *range(pp)]:
                        yield world, tp, pp, virtual, split
