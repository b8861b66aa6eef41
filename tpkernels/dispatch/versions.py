"""What a timing is valid for: the GPU, and the versions of all that runs on it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

KERNELS = Path(__file__).parents[1] / "kernels"


@dataclass(frozen=True, slots=True)
class Versions:
    """Choices made under one of these say nothing under another."""

    gpu: str
    torch: str  # with the CUDA version behind it: "2.11.0+cu130"
    triton: str
    kernels: str  # hash of our kernels' source

    @property
    def slug(self) -> str:
        """All of it as a file name."""
        return f"{gpu_slug(self.gpu)}_torch-{self.torch}_triton-{self.triton}_kernels-{self.kernels}"


def versions_for(gpu: str) -> Versions:
    """Those of this process, on a GPU of this name."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return Versions(gpu, torch.__version__, triton, source_hash(KERNELS))


@cache
def source_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpu_slug(gpu: str) -> str:
    """A GPU's name as part of a file name.

    >>> gpu_slug("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
