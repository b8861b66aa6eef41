"""The operators of `ops/tensor_parallel`, as what they ask of a way: the same steps in the same order.

R ranks, T tokens, K in_features, N out_features (of an MLP: the width between), as in the operators' own
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpkernels.planning.timeline.ways import ELEMENT, Moving, ProductSizes, WayModel


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one call on R ranks."""

    tokens: int
    features_in: int
    features_out: int  # of column_linear all, of which a rank has a shard; of an MLP the width between
    ranks: int
    sequence_parallel: bool = True
    narrowest: int = 0  # features of a rank, where several products share one gather

    def __post_init__(self) -> None:
        for name in ("tokens", "features_in", "features_out", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.sequence_parallel and self.tokens % self.ranks:
            raise ValueError(
                f"tokens: expected a multiple of the {self.ranks} ranks with sequence parallelism, got "
                f"{self.tokens}"
            )

    def shard(self, features: int, name: str) -> int:
        if features % self.ranks:
            raise ValueError(f"{name}: expected a multiple of the {self.ranks} ranks, got {features}")
        return features // self.ranks


def column_forward(way: WayModel, sizes: Sizes) -> None:
    shard = sizes.shard(sizes.features_out, "features_out")
    product = ProductSizes("y", shard, sizes.features_in)
    _gathered_product(way, sizes, "x", sizes.features_in, product, features=sizes.narrowest or shard)


def column_backward(way: WayModel, sizes: Sizes) -> None:
    tokens, shard = sizes.tokens, sizes.shard(sizes.features_out, "features_out")
    x = way.gather("x", tokens, sizes.features_in) if sizes.sequence_parallel else None
    dx = _summed_product(
        way, sizes, "dx", ProductSizes("dgrad", sizes.features_in, shard, "dgrad"), hidden=True
    )
    if x is not None:
        way.wait(x)
    way.product(shard, ProductSizes("wgrad", sizes.features_in, tokens, "wgrad"))
    way.wait(dx)


def row_forward(way: WayModel, sizes: Sizes) -> None:
    shard = sizes.shard(sizes.features_in, "features_in")
    way.wait(_summed_product(way, sizes, "y", ProductSizes("product", sizes.features_out, shard)))


def row_backward(way: WayModel, sizes: Sizes) -> None:
    shard = sizes.shard(sizes.features_in, "features_in")
    dgrad = ProductSizes("dgrad", shard, sizes.features_out, "dgrad")
    wgrad = ProductSizes("wgrad", shard, sizes.tokens, "wgrad")
    if sizes.sequence_parallel:
        dy = way.gather("dy", sizes.tokens, sizes.features_out, shard)
        way.gradients(dy, dgrad, wgrad, sizes.features_out)
    else:
        way.product(sizes.tokens, dgrad)
        way.product(sizes.features_out, wgrad)


def mlp_forward(way: WayModel, sizes: Sizes, ups: int = 1) -> None:
    shard, hidden = sizes.shard(sizes.features_out, "features_out"), sizes.features_in
    _gathered_product(way, sizes, "x", hidden, ProductSizes("up", ups * shard, hidden), features=shard)
    way.wait(_summed_product(way, sizes, "y", ProductSizes("down", hidden, shard)))


def mlp_backward(way: WayModel, sizes: Sizes, ups: int = 1) -> None:
    tokens, hidden = sizes.tokens, sizes.features_in
    shard = sizes.shard(sizes.features_out, "features_out")
    dy = way.gather("dy", tokens, hidden, shard) if sizes.sequence_parallel else None
    x = way.gather("x", tokens, hidden) if sizes.sequence_parallel else None
    dgrad = ProductSizes("dgrad down", shard, hidden, "dgrad")
    if dy is None:
        way.product(tokens, dgrad)
    else:
        way.rowwise(dy, dgrad)
    if ups == 1:
        way.streamed("activation", 2.0 * tokens * shard * ELEMENT)
    if dy is not None:
        way.wait(dy)
    way.product(hidden, ProductSizes("wgrad down", shard, tokens, "wgrad"))
    if x is not None:
        way.wait(x)
    dx = _summed_product(
        way, sizes, "dx", ProductSizes("dgrad up", hidden, ups * shard, "dgrad"), hidden=True
    )
    for number in range(ups):
        name = f"wgrad up {number + 1}" if ups > 1 else "wgrad up"
        way.product(shard, ProductSizes(name, hidden, tokens, "wgrad"))
    way.wait(dx)


def _gathered_product(
    way: WayModel,
    sizes: Sizes,
    name: str,
    cols: int,
    product: ProductSizes,
    *,
    features: int | None = None,
) -> None:
    """Without sequence parallelism there is nothing to gather."""
    if not sizes.sequence_parallel:
        way.product(sizes.tokens, product)
        return
    moving = way.gather(name, sizes.tokens, cols, product.cols if features is None else features)
    way.rowwise(moving, product)


def _summed_product(
    way: WayModel, sizes: Sizes, name: str, product: ProductSizes, *, hidden: bool = False
) -> Moving:
    to_all = not sizes.sequence_parallel
    return way.reduce(name, sizes.tokens, product, hidden=hidden, to_all=to_all)


TimedOperator = Callable[[WayModel, Sizes], None]
OPERATORS: Mapping[str, Mapping[str, TimedOperator]] = {
    "column_linear": {"forward": column_forward, "backward": column_backward},
    "row_linear": {"forward": row_forward, "backward": row_backward},
    "mlp": {"forward": mlp_forward, "backward": mlp_backward},
    "gated_mlp": {
        "forward": lambda way, sizes: mlp_forward(way, sizes, 2),
        "backward": lambda way, sizes: mlp_backward(way, sizes, 2),
    },
}
