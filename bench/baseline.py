"""The ratios that a device had: what results are compared with."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bench.results import BadFile, Info, Results, read_json, slug

FOLDER = Path(__file__).parent / "baselines"
FLOOR = 0.05  # of a ratio: between two runs more changes than their rounds show
IDENTITY = ("op", "shape", "pass", "naive", "world", "dtype", "device", "backend", "flops", "bytes")
RATIOS = ("ratio", "ratio_quartile_low", "ratio_quartile_high", "rounds", "ratio_of_runs")


@dataclass(frozen=True)
class Baseline:
    device: str
    floor: float  # a fall by less is none
    made: Mapping[str, Any]  # when, on what, of what, by which command
    cases: Mapping[str, Info]  # what identifies a case, and its ratios

    def __str__(self) -> str:
        versions = self.made.get("versions", {})
        return f"{self.made.get('date')}, torch {versions.get('torch')}, revision {self.made.get('revision')}"


def path_for(device: str) -> Path:
    return FOLDER / f"{slug(device)}.json"


def this_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"


def read_baseline(path: Path, device: str) -> Baseline:
    """device: whose results are to be compared with it"""
    selection = "--smoke" if device == "cpu" else "--gpu-set"
    recipe = (
        f"python -m bench run {selection} -o out/bench.json && "
        f"python -m bench gate --update --baseline {shown(path)} out/bench.json"
    )
    if not path.exists():
        there = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json"))) or "none"
        raise BadFile(
            f"no baseline for the device {device!r}: looked for {shown(path)}; there are: {there}. "
            f"Make one, and commit it: {recipe}"
        )
    report = read_json(path, recipe)
    try:
        baseline = Baseline(**report)
        complete = all(case.keys() >= {*IDENTITY, *RATIOS} for case in baseline.cases.values())
    except (AttributeError, TypeError) as error:
        raise BadFile(f"{path}: expected a baseline; make it by {recipe}") from error
    if not complete:
        keys = ", ".join((*IDENTITY, *RATIOS))
        raise BadFile(f"{path}: expected {keys} of every case; make it by {recipe}")
    if baseline.device != device:
        raise BadFile(
            f"{shown(path)} is of {baseline.device!r}, these results are of {device!r}: ratios of one "
            f"device say nothing of another; leave --baseline out, or make one: {recipe}"
        )
    return baseline


def made_of(results: Results, floor: float, note: str) -> Baseline:
    any_case = next(iter(results.infos.values()))
    made = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": any_case["versions"],
        "revision": any_case["revision"],
        "command": results.command,
        "note": note,
    }
    cases = {
        name: {key: info[key] for key in (*IDENTITY, *RATIOS)} for name, info in sorted(results.infos.items())
    }
    return Baseline(results.device, floor, made, cases)


def write_baseline(baseline: Baseline, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(baseline), indent=1) + "\n", encoding="utf-8")


def shown(path: Path) -> str:
    """From where one stands, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
