"""Searches variations of the fastest shipped tiles, step by step (`tune --thorough`).

From the fastest tile of each kind of kernel, all tiles that differ from it in one number are timed with it,
interleaved; then tiles that differ from the fastest of these, until none gains GAIN. Tiles that cannot be
launched, by arithmetic, are not compiled. The others are compiled in several processes at once. Tiles that
spill, wait for each product, or take the registers of a neighbouring block are not timed. The winner is timed
once more, with torch and the fastest shipped tile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from tpkernels.dispatch import log
from tpkernels.dispatch.candidates import TORCH, Candidate, TargetGpu, obstacle, of_tile
from tpkernels.dispatch.chooser import Chooser, Decision
from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.record import Primitive
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import Form

GAIN = 0.01  # less is noise
NEAR = 1.25  # times the fastest, torch included: slower kinds are not varied
SECONDS = 120.0  # of a problem; a step in progress is finished
GROUPS = (4, 8, 16)
MOST_STAGES = 6

Prune = Callable[[Primitive[..., Any], tuple[Any, ...], Sequence[Candidate]], list[Candidate]]


def neighbours(tile: MatmulTile, form: Form) -> Iterator[MatmulTile]:
    """Yield all tiles that differ from this one in one number, or in being flattened."""
    changes: list[dict[str, Any]] = [{"group": group} for group in GROUPS if group != tile.group]
    changes += [{"num_stages": tile.num_stages + step} for step in (-1, 1)]
    changes += [{"parts": tile.parts * 2}, {"parts": tile.parts // 2}]
    if form == "descriptor":  # others have a program a tile
        changes += [{"flatten": not tile.flatten}, {"per_processor": 3 - tile.per_processor}]
    for change in changes:
        if change.get("num_stages", 1) <= MOST_STAGES and change.get("per_processor", 1) > 0:
            try:
                yield replace(tile, **change)
            except ValueError:  # parts too narrow, or no stages
                continue


@dataclass(frozen=True)
class Variations:
    """Finds the fastest candidate of a problem among shipped tiles and their variations."""

    chooser: Chooser
    prune: Prune
    seconds: float = SECONDS
    clock: Callable[[], float] = perf_counter

    def timed(self, record: Primitive[..., Any], arguments: tuple[Any, ...]) -> Decision[Candidate]:
        """Return the fastest candidate, and keep it on disk."""
        shipped = self.chooser.timed(record, arguments, seconds=float("inf"))
        if shipped.source != "timed":
            return shipped
        problem = record.problem(*arguments)
        by_name = {one.name: one for one in self.chooser.candidates(record, problem)}
        starts = fastest_of_each_kind([by_name[name] for name in shipped.milliseconds], shipped.milliseconds)
        ends = self.clock() + self.seconds
        try:
            found = [self._descend(start, ends, record, problem, arguments) for start in starts]
            finalists = {one.name: one for one in (TORCH, shipped.candidate, *starts[:1], *found)}
            if found == starts:
                return shipped
            wanted = list(finalists.values())
            return self.chooser.keep(problem, wanted, self.chooser.times(record, problem, wanted, arguments))
        except Exception as error:  # such as out of memory: the shipped tiles have been timed
            log.warnings.warning("cannot vary the tiles of %s: %s", problem.key, error)
            return shipped

    def _descend(
        self,
        best: Candidate,
        ends: float,
        record: Primitive[..., Any],
        problem: Problem,
        arguments: tuple[Any, ...],
    ) -> Candidate:
        """Return the last of a chain of candidates, each faster than the one before."""
        seen = {best.name}
        while self.clock() < ends:
            fresh = [one for one in self._around(best, problem) if one.name not in seen]
            seen.update(one.name for one in fresh)
            fresh = self.prune(record, arguments, fresh)
            if not fresh:
                break
            milliseconds = self.chooser.times(record, problem, [best, *fresh], arguments).eager
            name = min(milliseconds, key=milliseconds.__getitem__)
            if best.name not in milliseconds or milliseconds[name] > (1 - GAIN) * milliseconds[best.name]:
                break
            best = next(one for one in fresh if one.name == name)
        return best

    def _around(self, one: Candidate, problem: Problem) -> list[Candidate]:
        """Return launchable candidates that differ from this one in one number."""
        form, tile = one.form, one.tile
        assert form is not None, "torch is not varied"
        assert tile is not None
        gpu = self.chooser.gpu
        others = (other for other in neighbours(tile, form) if not obstacle(problem, form, other, gpu))
        return [of_tile(form, other) for other in others]


def fastest_of_each_kind(timed: Sequence[Candidate], milliseconds: Mapping[str, float]) -> list[Candidate]:
    """Return the fastest of our kernels of each form, without much slower kinds."""
    ours = sorted((one for one in timed if one.tile is not None), key=lambda one: milliseconds[one.name])
    near = [one for one in ours if milliseconds[one.name] <= NEAR * min(milliseconds.values())]
    kinds: dict[object, Candidate] = {}
    for one in near:
        kinds.setdefault(one.form, one)
    return list(kinds.values())


@dataclass(frozen=True)
class CompiledTiles:
    """Removes candidates that fail the rules of `check`, compiled in other processes."""

    gpu: TargetGpu
    processes: int = max(1, min(8, (os.cpu_count() or 1) - 1))

    def __call__(
        self, record: Primitive[..., Any], arguments: tuple[Any, ...], wanted: Sequence[Candidate]
    ) -> list[Candidate]:
        from tpkernels.gate import ahead_of_time  # here: they need Triton
        from tpkernels.gate.rules import violations

        target = self.gpu.target
        architecture = f"sm_{target.capability}"
        if target.backend != "cuda" or architecture not in ahead_of_time.ARCHITECTURES:
            return list(wanted)  # there are no rules for it
        launched: list[Candidate] = []
        jobs = []
        for one in wanted:
            with suppress(ValueError):  # the launcher refuses the tile
                entry = _entry(record, arguments, one, self.gpu, architecture)
                jobs.append(ahead_of_time.CompileJob(entry, architecture))
                launched.append(one)
        sound = []
        results = ahead_of_time.compile_all(jobs, self.processes, lambda job: None) if jobs else []
        for one, job, facts in zip(launched, jobs, results, strict=True):
            if not isinstance(facts, str) and not any(violations(job.entry.rules, architecture, facts)):
                sound.append(one)
        return sound


def _entry(
    record: Primitive[..., Any], arguments: tuple[Any, ...], one: Candidate, gpu: TargetGpu, architecture: str
) -> Any:
    """Return the catalog entry of this candidate's launch."""
    from tpkernels.dispatch.recording import EntrySpec, MetaOperands

    problem = record.problem(*arguments)
    ragged = any(layout.tma_obstacle() for layout in problem.layouts)
    return EntrySpec(
        f"{problem.kernel}/{one.name}/{record.name}" + "/ragged" * ragged,
        lambda of: one.bind(record)(*arguments),
        MetaOperands(*problem.product, problem.depth, problem.dtype, ragged=ragged),
        gpu.target,
        (architecture,),
        precision="tf32" if problem.tf32 else "ieee",
    ).entry()
