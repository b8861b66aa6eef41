"""Timings of products that others have published, of one H100, and the kernels they are of, compiled here.

Triton's Gluon tutorials 05-wgmma.py and 07-persistence.py (triton-lang/triton, commit 020989b9): fp16, by
`do_bench` and `do_bench_cudagraph`. `kernels` has the structures they describe, written anew. TFLOP/s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from tpkernels.gate.ahead_of_time import gpu_target
from tpkernels.gate.clock.launch import Built, SmLaunch, launch_of
from tpkernels.gate.clock.workload import Product
from tpkernels.gate.disk_cache import DiskCache

SHAPE = (8192, 8192, 16384)
# buffers, rows, columns and depth of a block, warps
AWAITED = {
    (1, 128, 256, 256, 8): 412.14,
    (1, 256, 128, 256, 8): 387.74,
    (1, 64, 256, 128, 4): 474.03,
    (1, 64, 128, 256, 4): 355.60,
    (1, 128, 128, 128, 4): 441.88,
    (1, 128, 128, 128, 8): 380.08,
    (2, 128, 256, 128, 8): 426.06,
    (2, 256, 128, 128, 8): 385.85,
    (2, 64, 256, 64, 4): 417.50,
    (2, 64, 128, 128, 4): 384.98,
    (2, 128, 128, 64, 4): 495.31,
    (2, 128, 128, 64, 8): 446.81,
    (2, 64, 256, 128, 4): 363.36,
}
# stages, depth of a block: one tile a block, persistent; 128 rows, 256 columns, 8 warps
RINGS = {(2, 128): (489.26, 502.84), (4, 64): (669.16, 658.84)}
# depth of the product: one tile a block, persistent, rotated; 3 stages of 128x256x64, 8 warps
DEPTHS = {
    512: (491.74, 485.01, 539.88),
    1024: (554.24, 575.02, 602.52),
    2048: (573.87, 594.72, 625.91),
    4096: (609.36, 630.10, 640.48),
    8192: (629.44, 646.22, 661.57),
    16384: (653.79, 660.29, 670.00),
}
# rows of tiles in a group, persistent, 3 stages
GROUPS = {1: 649.09, 2: 651.32, 4: 655.51, 6: 652.39, 8: 648.42}


@dataclass(frozen=True)
class Measured:
    """A timing, and the launch it is of: a `Workload`."""

    name: str
    kernel: str
    rows: int  # of a block
    cols: int
    depth: int
    warps: int
    stages: int
    shape: tuple[int, int, int]
    tflops: float
    fitted: bool = False  # constants were fitted to it
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def product(self) -> Product:
        return Product(self.rows, self.cols, self.depth)

    @property
    def tiles(self) -> int:
        return -(-self.shape[0] // self.rows) * -(-self.shape[1] // self.cols)

    @property
    def traffic(self) -> int:
        m, n, k = self.shape
        return 2 * (m * k + k * n + m * n)

    @property
    def least(self) -> int:
        return self.traffic

    @property
    def unit(self) -> int:
        return 1

    @property
    def group(self) -> int:
        """Tiles down a column that are computed in a row."""
        return int(self.options.get("GROUP", 0)) or -(-self.shape[0] // self.rows)

    @property
    def persistent(self) -> bool:
        return self.kernel == "rotated_kernel" or bool(self.options.get("PERSISTENT"))

    def on_one(self, built: Built, tiles: int, steps: int) -> SmLaunch:
        values = self._descriptors((tiles * self.rows, self.cols, steps * self.depth))
        return launch_of(built, values, (1 if self.persistent else tiles, 1))

    def built(self) -> Built:
        """Compiled, or from the user's cache."""
        cache, key = DiskCache.of_user("published"), self.key()
        kept = cache.get(key)
        if not isinstance(kept, dict):
            compiled = self._compiled()
            kept = {"cubin": compiled.asm["cubin"].hex(), "warps": compiled.metadata.num_warps}
            kept |= {"shared": compiled.metadata.shared}
            cache.put(key, kept)
        metadata = SimpleNamespace(num_warps=kept["warps"], shared=kept["shared"])
        return Built.of(SimpleNamespace(asm={"cubin": bytes.fromhex(kept["cubin"])}, metadata=metadata))

    def _constants(self) -> dict[str, Any]:
        rings = "BUFFERS" if self.kernel == "awaited_kernel" else "STAGES"
        return {"MMA": _layout(self), rings: self.stages, "num_warps": self.warps, **self.options}

    def _descriptors(self, shape: tuple[int, int, int]) -> list[Any]:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        m, n, k = shape
        sides = (
            ((m, k), (self.rows, self.depth)),
            ((k, n), (self.depth, self.cols)),
            ((m, n), (self.rows, self.cols)),
        )
        return [
            TensorDescriptor.from_tensor(
                torch.empty(sizes, dtype=torch.float16, device="meta"),
                list(block),
                gl.NVMMASharedLayout.get_default_for(list(block), gl.float16),
            )
            for sizes, block in sides
        ]

    def _compiled(self) -> Any:
        import triton
        from triton.experimental.gluon._runtime import GluonASTSource

        from bench.clock import kernels

        function, constants = getattr(kernels, self.kernel), self._constants()
        names = list(function.arg_names)
        types = {
            name: f"tensordesc<fp16{one.block_shape},{one.layout!r}>"
            for name, one in zip("abc", self._descriptors(self.shape), strict=True)
        }
        source = GluonASTSource(
            function,
            {name: types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {},
        )
        with TemporaryDirectory(prefix="tpkernels-") as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            return triton.compile(source, target=gpu_target("sm_90"), options={"num_warps": self.warps})

    def key(self) -> str:
        import triton

        source = Path(__file__).with_name("kernels.py").read_bytes()
        what = f"{triton.__version__} {self.kernel} {self.rows} {self.cols} {self.depth} {self._constants()}"
        return hashlib.sha256(what.encode() + source).hexdigest()


def _layout(of: Measured) -> Any:
    """Warps lie over 64 rows, then over more of them, then over columns; products are as wide as fits."""
    from triton.experimental.gluon import language as gl

    down = 4
    while down < of.warps and 16 * down < of.rows:
        down *= 2
    across = of.warps // down
    width = next(n for n in range(256, 0, -8) if n <= of.cols // across and of.cols % n == 0)
    return gl.NVMMADistributedLayout([3, 0], [down, across], [16, width, 16])


def measured() -> Iterator[Measured]:
    """All figures. Fitted are those of tutorial 05, and two of 07 at the least depth."""
    for (buffers, rows, cols, depth, warps), tflops in AWAITED.items():
        name = f"awaited, {buffers} buffer{'s' * (buffers > 1)}, {rows}x{cols}x{depth}, {warps} warps"
        yield Measured(name, "awaited_kernel", rows, cols, depth, warps, buffers, SHAPE, tflops, True)
    one, many = {"PERSISTENT": False, "GROUP": 0}, {"PERSISTENT": True, "GROUP": 0}
    for (stages, depth), found in RINGS.items():
        for words, options, tflops in zip(("", ", persistent"), (one, many), found, strict=True):
            name = f"ring, {stages} stages of depth {depth}{words}"
            yield Measured(name, "ring_kernel", 128, 256, depth, 8, stages, SHAPE, tflops, options=options)
    for depth, (single, persistent, rotated) in DEPTHS.items():
        tile, shape, least = (128, 256, 64, 8, 3), (8192, 8192, depth), depth == min(DEPTHS)
        yield Measured(f"ring, depth {depth}", "ring_kernel", *tile, shape, single, least, one)
        yield Measured(
            f"ring, persistent, depth {depth}", "ring_kernel", *tile, shape, persistent, least, many
        )
        yield Measured(f"rotated, depth {depth}", "rotated_kernel", *tile, shape, rotated)
    for group, tflops in GROUPS.items():
        options = {"PERSISTENT": True, "GROUP": group}
        name = f"ring, persistent, groups of {group}"
        yield Measured(name, "ring_kernel", 128, 256, 64, 8, 3, SHAPE, tflops, options=options)
