"""Warp-specialised products for Hopper and Blackwell, in Gluon: Triton 3.7 or later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpkernels.kernels.gluon.constants import Epilogue
from tpkernels.kernels.launch import ProductLaunch
from tpkernels.kernels.matmul_tile import compiles, triton_for


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
    target, obstacle = product.target, None
    pair = product.tile.blocks == 2
    if target.backend != "cuda" or target.capability not in (90, 100)[: 1 + pair]:
        able = "9.0" + " or 10.0" * pair
        obstacle = f"a GPU of compute capability {able}, got {target.backend} {target.capability}"
    elif product.form != "descriptor":
        obstacle = "matrices that the copy engine can move (bfloat16 or float16, aligned to 16 bytes)"
    elif not compiles(product.tile):
        obstacle = "Triton {}.{} or later".format(*triton_for(product.tile))
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
