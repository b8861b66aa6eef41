"""How a layer's products are computed in fp8. Loads no torch.

A recipe is a property of the products, not of what they are made from: weights, their gradients, optimizers
and checkpoints do not know of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Format = Literal["e4m3", "e5m2"]
Scaling = Literal["rows", "blocks"]
Wgrad = Literal["bf16", "fp8"]
FastAccumulate = Literal["never", "forward", "always"]
BLOCK = 128  # elements that share a scale: of a row, and of a weight's rows as well


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is rounded to fp8, and with which scales. Make one by `rowwise` or `blockwise`.

    scaling: one fp32 scale a row of activations and of weights (`rows`); or one for each 128 elements of a
        row of activations and each 128 x 128 of a weight (`blocks`)
    power_of_two: scales are powers of two, so that scaling rounds nothing by itself
    wgrad: gradients of weights are multiplied in the dtype of the activations (`bf16`), or in `fp8` too
    gradients: the format of dy; e5m2 has more range and a bit less
    head: a model's head is computed in fp8, too
    fast_accumulate: the products whose sums tensor cores may keep in few bits over all of the depth; others
        are carried over to fp32 every 128
    """

    scaling: Scaling
    power_of_two: bool = False
    wgrad: Wgrad = "bf16"
    gradients: Format = "e4m3"
    head: bool = False
    fast_accumulate: FastAccumulate = "never"

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("scaling", self.scaling, Scaling),
            ("wgrad", self.wgrad, Wgrad),
            ("gradients", self.gradients, Format),
            ("fast_accumulate", self.fast_accumulate, FastAccumulate),
        ):
            if value not in get_args(kinds):
                words = " or ".join(map(repr, get_args(kinds)))
                raise ValueError(f"Recipe: expected {name} {words}, got {value!r}")
        for name, switch in (("power_of_two", self.power_of_two), ("head", self.head)):
            if not isinstance(switch, bool):  # "no" would be true
                raise ValueError(f"Recipe: expected {name} True or False, got {switch!r}")
        if self.scaling == "blocks" and self.wgrad == "fp8":
            raise ValueError(
                "Recipe: expected wgrad='bf16' with blockwise scales, got 'fp8': a block of a row holds no "
                "scale for a column; use Recipe.rowwise(wgrad='fp8')"
            )
        if self.scaling == "blocks" and self.fast_accumulate != "never":
            raise ValueError(
                "Recipe: expected fast_accumulate='never' with blockwise scales, "
                f"got {self.fast_accumulate!r}: each {BLOCK} of depth are scaled by themselves; use "
                "Recipe.rowwise"
            )

    @classmethod
    def rowwise(
        cls,
        *,
        power_of_two: bool = False,
        wgrad: Wgrad = "bf16",
        gradients: Format = "e4m3",
        head: bool = False,
        fast_accumulate: FastAccumulate = "forward",
    ) -> Recipe:
        """One scale a row: of x and of the weight forward, of dy and of the weight's columns backward."""
        return cls("rows", power_of_two, wgrad, gradients, head, fast_accumulate)

    @classmethod
    def blockwise(
        cls, *, power_of_two: bool = False, gradients: Format = "e4m3", head: bool = False
    ) -> Recipe:
        """One scale for each 128 elements of a row, and for each 128 x 128 of a weight."""
        return cls("blocks", power_of_two, "bf16", gradients, head)

    def is_fast(self, *, forward: bool) -> bool:
        """Whether products of this pass may keep sums in few bits."""
        return self.fast_accumulate == "always" or (forward and self.fast_accumulate == "forward")

    @classmethod
    def named(cls, name: str) -> Recipe:
        """As `str` writes it: "rowwise", "blockwise+power_of_two", "rowwise+wgrad=fp8+gradients=e5m2"."""
        kind, *words = name.split("+")
        options: dict[str, Any] = {}
        kinds: dict[str, Any] = {"rowwise": cls.rowwise, "blockwise": cls.blockwise}
        for word in words:
            option, _, value = word.partition("=")
            options[option] = value or True
        try:
            made: Recipe = kinds[kind](**options)
        except (KeyError, TypeError):
            raise ValueError(
                "Recipe: expected 'rowwise' or 'blockwise', with options such as '+power_of_two' or "
                f"'+gradients=e5m2', got {name!r}"
            ) from None
        return made

    def __str__(self) -> str:
        words = ["rowwise" if self.scaling == "rows" else "blockwise"]
        words += [name for name in ("power_of_two", "head") if getattr(self, name)]
        words += [f"wgrad={self.wgrad}"] * (self.wgrad != "bf16")
        words += [f"gradients={self.gradients}"] * (self.gradients != "e4m3")
        usual = "forward" if self.scaling == "rows" else "never"
        words += [f"fast_accumulate={self.fast_accumulate}"] * (self.fast_accumulate != usual)
        return "+".join(words)
