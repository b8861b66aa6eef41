"""Made-up results in the form of recorded ones, for tests: no figure here was measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bench.shapes import MODELS, RATED_GPUS, shapes_of

H100 = RATED_GPUS["h100"]
PASSES = ("forward", "wgrad", "wgrad_add")


def info(draw: random.Random, op: str, shape: str, pass_: str, **more: Any) -> dict[str, Any]:
    ratio = draw.lognormvariate(0.05, 0.2)
    return {
        "op": op,
        "shape": shape,
        "pass": pass_,
        "naive": "F.linear",
        "ratio": ratio,
        "ratio_quartile_low": 0.98 * ratio,
        "ratio_quartile_high": 1.03 * ratio,
        "rounds": 21,
        "ours_ms": 1.0,
        "naive_ms": ratio,
        "least_ratio": None,
        "roofline": None,
        "backend": "auto",
        "world": 1,
        "dtype": "bfloat16",
        "device": H100.name,
        "versions": {"python": "3.12.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
        "revision": "0123456789ab",
        "ratio_to_compiled": 1.01,
    } | more


def results(seed: int = 0) -> dict[str, Any]:
    """A run on a GPU: linear layers of all models, and what a call costs."""
    draw = random.Random(seed)
    infos = []
    for shape in (shape for model in MODELS for tensor in (1, 8) for shape in shapes_of(model, tensor, 4096)):
        for pass_ in PASSES:
            share = draw.uniform(0.5, 0.85)
            ours = 1e3 * H100.floor(shape.flops, shape.traffic) / share
            one = info(draw, "linear", str(shape), pass_)
            work = {"flops": shape.flops, "bytes": shape.traffic, "roofline": share}
            infos.append(one | work | {"ours_ms": ours, "naive_ms": ours * one["ratio"]})
    infos.append(info(draw, "host_cost", "4x16x16", "forward", least_ratio=0.4))
    return {
        "benchmarks": [
            {"fullname": f"bench/test_{one['op']}.py::test_{one['op']}[{number}]", "extra_info": one}
            for number, one in enumerate(infos)
        ],
        "machine_info": {"cpu": {"brand_raw": "A Processor"}},
        "datetime": "2026-01-02T03:04:05.678",
        "outcomes": {"passed": len(infos), "failures": {"bench/test_x.py::test_y[<z>]": "E  off by 1 & 2"}},
        "command": "python -m bench run",
    }


def overlaps() -> list[dict[str, Any]]:
    one = {
        "link": "emulated link",
        "gpu": H100.name,
        "shape": {"tokens": 8192, "in": 4096, "out": 8192, "parts": 4},
        "milliseconds": {
            "product": 1.0,
            "transfer": 0.8,
            "sequential": 1.8,
            "overlapped": 1.2,
            "control": 1.8,
        },
        "efficiency": 0.75,
        "control_efficiency": 0.0,
        "sweep": [],
    }
    return [one, {"link": "emulated link", "error": "nothing was timed"}]


def written(folder: Path, name: str, content: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
