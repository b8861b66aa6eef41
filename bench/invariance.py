"""`python -m bench invariance`: runs at several tensor-parallel sizes, compared to the bit."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import RankPool
from tests.segments import tp_invariance
from tests.training.invariant_runs import CPU, Outcome, outcome_of
from tpkernels import create_parallel_state, plan_groups
from tpkernels.models.config import GPTConfig
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import Trainer

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
SEGMENTS = 8
SMALL = GPTConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=8, max_positions=64)
LLAMA = {"num_kv_heads": 2, "ffn_hidden_size": 192, "activation": "swiglu", "norm": "rms_norm"}
MODELS = {"GPT": SMALL, "Llama": replace(SMALL, **LLAMA, bias=False, tied=False)}  # type: ignore[arg-type]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--steps", type=int, default=50, metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="RANKS")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])


def main(options: Namespace) -> int:
    print("| model | dtype | TP | sequence parallel | bits | loss |\n|---|---|---|---|---|---|")
    differing = 0
    for model in options.models:
        for dtype in options.dtypes:
            config = config_of(MODELS[model], DTYPES[dtype], options.steps)
            differing += len(_sums(config, options.sizes, f"{model} | {dtype}")) - 1
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


def _sums(config: TrainConfig, sizes: Sequence[int], name: str) -> set[str]:
    """Train at each size, print a row for each run, and return the sums of all."""
    sums = set()
    for ranks in sizes:
        with RankPool(ranks) as pool:
            for split in (False, True) if ranks > 1 else (False,):
                outcome = pool.run(trained, replace(config, sequence_parallel=split), timeout=3600.0)[0]
                assert outcome is not None, "rank 0 has it"
                sums.add(outcome.sum)
                cells = [
                    name,
                    ranks,
                    "on" if split else "off",
                    f"`{outcome.sum}`",
                    f"{outcome.losses[-1]:.4f}",
                ]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return sums


def trained(config: TrainConfig) -> Outcome | None:
    """On each rank."""
    plan = plan_groups(world_size=dist.get_world_size(), tensor=dist.get_world_size())
    with tp_invariance(SEGMENTS):
        trainer = Trainer(config, create_parallel_state(plan), CPU)
        return outcome_of(trainer, [trainer.step() for _ in range(config.steps)])
