"""Warp-specialised products for Hopper and Blackwell, in Gluon: Triton 3.7 or later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpkernels.kernels.gluon.constants import Epilogue
from tpkernels.kernels.launch import ProductLaunch
from tpkernels.kernels.matmul_tile import compiles, triton_for
from tpkernels.kernels.recipe import BLOCK


def multiply(
    epilogue: Epilogue,
    product: ProductLaunch,
    operands: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor] = (),
    vector: Tensor | None = None,
    activation: str = "none",
    adds: bool = False,
) -> None:
    """Launch the product that a tile with consumers stands for; see `matmul` for what goes where."""
    obstacle = _obstacle(product, (90, 100) if product.tile.blocks == 2 else (90,))
    if not obstacle and product.tile.halves:
        obstacle = "a product of fp8, where consumers share a tile"
    if obstacle:
        raise ValueError(f"{epilogue}: tile {product.tile.name} expected {obstacle}")
    from tpkernels.kernels.gluon.matmul import launch_matmul  # Triton before 3.7 lacks what it imports

    launch_matmul(
        *(epilogue, product, operands, outputs),
        inputs=inputs,
        vector=vector,
        activation=activation,
        adds=adds,
    )


def multiply_scaled(
    product: ProductLaunch,
    operands: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    outputs: Sequence[Tensor],
    *,
    activation: str,
    promote: bool,
) -> None:
    """Launch the product of fp8 that a tile with consumers stands for; see `scaled` for what goes where."""
    obstacle = _obstacle(product, (90,))
    if not obstacle and not product.tile.halves:
        obstacle = "consumers that share a tile, for a product of fp8"
    elif not obstacle and scales[0].shape[1] != 1:
        obstacle = "one scale a row, got blockwise scales"
    elif not obstacle and product.tile.block_depth > BLOCK:
        obstacle = f"at most {BLOCK} depth"
    if obstacle:
        raise ValueError(f"scaled_linear: tile {product.tile.name} expected {obstacle}")
    from tpkernels.kernels.gluon.scaled import launch_scaled  # like `launch_matmul`

    launch_scaled(product, operands, scales, bias, outputs, activation=activation, promote=promote)


def _obstacle(product: ProductLaunch, capabilities: tuple[int, ...]) -> str | None:
    """What any kernel in roles misses here."""
    target = product.target
    if target.backend != "cuda" or target.capability not in capabilities:
        able = " or ".join(f"{one // 10}.{one % 10}" for one in capabilities)
        return f"a GPU of compute capability {able}, got {target.backend} {target.capability}"
    if product.form != "descriptor":
        return "matrices that the copy engine can move (bfloat16, float16 or fp8, aligned to 16 bytes)"
    if not compiles(product.tile):
        return "Triton {}.{} or later".format(*triton_for(product.tile))
    return None
