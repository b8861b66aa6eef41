"""Published times of gathers with products, and of products with reduce-scatters, on H100s in one machine.

Half of the sources was kept back: no constant of the model was chosen with them. `python -m bench predicted
published` compares. Shapes are as the sources' scripts use them: tokens of all ranks, what is gathered or
reduced in full, and the other width of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.streams.times import Host

FITTED, KEPT_BACK = "fitted", "kept back"
THEIR_HOST = Host(75.0, 50.0, 35.0, 35.0, 9.0)  # of the sources' Python, with which constants were fitted


@dataclass(frozen=True)
class Published:
    """Microseconds of one call, as its source gives them."""

    source: str
    use: str  # FITTED or KEPT_BACK
    operator: str
    tokens: int
    features_in: int
    features_out: int
    ranks: int
    way: str  # that has this shape
    name: str  # of the way in the source
    microseconds: float


def _gathers(
    source: str, use: str, ranks: int, names: Sequence[tuple[str, str]], rows: Sequence[Sequence[float]]
) -> list[Published]:
    """rows: tokens of a rank, features of a rank, depth, then a time for each name"""
    return [
        Published(
            source, use, "column_linear", int(tokens * ranks), int(depth), int(features * ranks), ranks, way,
            name, time,
        )
        for tokens, features, depth, *times in rows
        for (way, name), time in zip(names, times, strict=True)
    ]  # fmt: skip


def _reduces(
    source: str, use: str, names: Sequence[tuple[str, str]], rows: Sequence[Sequence[float]]
) -> list[Published]:
    """rows: ranks, tokens, features, depth of a rank, then a time for each name"""
    return [
        Published(
            source, use, "row_linear", int(tokens), int(depth * ranks), int(features), int(ranks), way, name,
            time,
        )
        for ranks, tokens, features, depth, *times in rows
        for (way, name), time in zip(names, times, strict=True)
    ]  # fmt: skip


_KRAKEN = (("naive", "nccl"), ("decomposed", "torch_symm_mem"), ("symmetric", "triton"))
_KRAKEN_GATHERS = (  # meta-pytorch/kraken, pull request 2
    (128, 6656, 4096, 141.984, 277.184, 194.624),
    (128, 6656, 8192, 284.288, 635.072, 395.040),
    (128, 6656, 16384, 513.600, 1166.944, 849.024),
    (256, 6656, 4096, 272.992, 309.920, 282.752),
    (256, 6656, 8192, 499.392, 548.480, 553.088),
    (256, 6656, 16384, 953.216, 1333.120, 1217.248),
    (512, 6656, 4096, 514.496, 455.776, 455.296),
    (512, 6656, 8192, 912.384, 837.792, 810.368),
    (512, 6656, 16384, 1810.432, 1633.312, 1679.776),
)
_TORCH = (("naive", "nccl + cublas"), ("decomposed", "decomp-based"), ("symmetric", "comm-aware"))
_HELION = (("naive", "nccl"), ("decomposed", "torch_symm_mem"))
_HELION_GATHERS = (  # pytorch/helion, pull request 400, without (768, 768, 768): NCCL took 2,373 µs
    (256, 256, 256, 41.156, 431.319),
    (384, 384, 384, 42.737, 424.313),
    (512, 512, 512, 51.284, 952.367),
    (640, 640, 640, 54.416, 946.200),
    (896, 896, 896, 79.772, 450.538),
    (1024, 1024, 1024, 100.879, 628.553),
    (1152, 1152, 1152, 122.012, 628.340),
    (1280, 1280, 1280, 159.020, 433.261),
    (1408, 1408, 1408, 194.298, 433.295),
)
_FLUX = (("naive", "torch"), ("symmetric", "flux"))
_FLUX_REDUCES = (  # bytedance/flux, issue 90: gemm_rs, N 8192, K 28672 over 8 ranks
    (8, 1024, 8192, 3584, 180.0, 183.25),
    (8, 2048, 8192, 3584, 289.5, 331.0),
    (8, 4096, 8192, 3584, 542.25, 632.875),
    (8, 8192, 8192, 3584, 1040.0, 1241.0),
    (8, 16384, 8192, 3584, 2010.63, 2458.5),
    (8, 32768, 8192, 3584, 3978.0, 4986.37),
)
_TRITON_DISTRIBUTED = (("naive", "PyTorch"), ("symmetric", "gemm_rs"))
_TRITON_REDUCES = (  # ByteDance-Seed/Triton-distributed, pull request 166
    (2, 4096, 4096, 4096, 275.0, 259.0),
    (4, 4096, 4096, 2048, 205.0, 286.0),
    (8, 4096, 4096, 1024, 167.0, 323.0),
    (2, 8192, 8192, 14784, 3077.0, 2886.0),
    (4, 8192, 8192, 7392, 1707.0, 1548.0),
    (8, 8192, 8192, 3696, 1045.0, 855.0),
)
_COPY_ENGINE = (("naive", "Torch+NCCL"), ("decomposed", "Async-TP"), ("symmetric", "Triton-CE"))
_COPY_ENGINE_REDUCES = (  # meta-pytorch/kraken, pull request 19
    (8, 512, 4096, 14336, 133.653, 613.784, 307.717),
    (8, 1024, 4096, 14336, 223.621, 666.917, 314.597),
    (8, 2048, 4096, 14336, 422.704, 755.246, 409.870),
)

PUBLISHED = (
    *_gathers("meta-pytorch/kraken, PR 2", FITTED, 8, _KRAKEN, _KRAKEN_GATHERS),
    *_gathers("pytorch/pytorch, PR 143160", FITTED, 8, _TORCH, [(256, 3584, 8192, 301.0, 354.0, 295.0)]),
    *_gathers("pytorch/helion, PR 400", KEPT_BACK, 8, _HELION, _HELION_GATHERS),
    *_reduces("bytedance/flux, issue 90", KEPT_BACK, _FLUX, _FLUX_REDUCES),
    *_reduces("Triton-distributed, PR 166", KEPT_BACK, _TRITON_DISTRIBUTED, _TRITON_REDUCES),
    *_reduces("meta-pytorch/kraken, PR 19", KEPT_BACK, _COPY_ENGINE, _COPY_ENGINE_REDUCES),
)
