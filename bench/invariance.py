"""`python -m bench invariance`: runs at several tensor-parallel sizes, compared to the bit.

With the first steps with TP-invariance those of a plain run are interleaved: what it costs.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from bench.measure import Seconds, slowest
from tests.ranks import RankPool
from tests.segments import tp_invariance
from tests.training.invariant_runs import CPU, Outcome, outcome_of
from tpkernels import create_parallel_state, plan_groups
from tpkernels.models.config import GPTConfig
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import StepReport, Trainer

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
SEGMENTS = 8
PLAIN_STEPS = 12
MODELS = {
    "GPT": GPTConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=8, max_positions=64),
    "Llama": GPTConfig(
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        ffn_hidden_size=192,
        activation="swiglu",
        norm="rms_norm",
        bias=False,
        tied=False,
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """A run, and the CPU time of a step against a plain one: the lower quartile, of the slowest rank."""

    ranks: int
    sequence_parallel: bool
    outcome: Outcome
    seconds: float
    plain_seconds: float


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--steps", type=int, default=50, metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="RANKS")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])


def main(options: Namespace) -> int:
    print("| model | dtype | TP | sequence parallel | bits | loss | CPU s a step | to plain |")
    print("|---|---|---|---|---|---|---|---|")
    differing = 0
    for model in options.models:
        for dtype in options.dtypes:
            rows = _rows(MODELS[model], DTYPES[dtype], options.sizes, options.steps, f"{model} | {dtype}")
            differing += len({row.outcome.sum for row in rows}) - 1
    print(f"{differing} sums differ" if differing else "each model's sums are equal")
    return 1 if differing else 0


def config_of(model: GPTConfig, dtype: torch.dtype, steps: int) -> TrainConfig:
    return TrainConfig(
        model=model,
        data=str(TEXT),
        steps=steps,
        batch=4,
        tokens=64,
        accumulate=2,
        warmup=5,
        max_norm=0.5,
        dtype=dtype,
    )


def _rows(model: GPTConfig, dtype: torch.dtype, sizes: Sequence[int], steps: int, name: str) -> list[Row]:
    config = config_of(model, dtype, steps)
    rows = []
    for ranks in sizes:
        with RankPool(ranks) as pool:
            for split in (False, True) if ranks > 1 else (False,):
                row = _row(pool, replace(config, sequence_parallel=split))
                rows.append(row)
                print(
                    f"| {name} | {ranks} | {'on' if split else 'off'} | `{row.outcome.sum}` | "
                    f"{row.outcome.losses[-1]:.4f} | {row.seconds:.3f} | "
                    f"{row.seconds / row.plain_seconds:.2f} |",
                    flush=True,
                )
    return rows


def _row(pool: RankPool, config: TrainConfig) -> Row:
    answers = pool.run(run_beside_plain, config, timeout=3600.0)
    outcome = answers[0][0]
    assert outcome is not None, "rank 0 has it"
    seconds = slowest([times for _, times in answers])
    plain, ours = (sorted(seconds[way])[len(seconds[way]) // 4] for way in ("plain", "ours"))
    return Row(pool.world_size, config.sequence_parallel, outcome, ours, plain)


def run_beside_plain(config: TrainConfig) -> tuple[Outcome | None, Seconds]:
    """The run, and CPU time of the first steps, which a plain run's were interleaved with."""
    plan = plan_groups(world_size=dist.get_world_size(), tensor=dist.get_world_size())
    reports: dict[str, list[StepReport]] = {"ours": [], "plain": []}
    segments = {"ours": SEGMENTS, "plain": 0}
    seconds: Seconds = {way: [] for way in reports}
    trainers = {}
    for way in reports:
        with tp_invariance(segments[way]):
            trainers[way] = Trainer(config, create_parallel_state(plan), CPU)
    for step in range(config.steps):
        for way in reports if step < PLAIN_STEPS else ("ours",):
            with tp_invariance(segments[way]):
                began = time.process_time()
                reports[way].append(trainers[way].step())
                seconds[way].append(time.process_time() - began)
    with tp_invariance(SEGMENTS):
        outcome = outcome_of(trainers["ours"], reports["ours"])
    return outcome, {way: taken[2:PLAIN_STEPS] for way, taken in seconds.items()}
