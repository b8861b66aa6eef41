"""A case of a launcher, or a kernel against its oracle in float64: interpreted in a process of its own.

`python -m tpkernels.gate.user_kernels.numerics`, see `children`.

Operands of a kernel lie in NaN, outputs start as NaN, nothing else may be written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.ahead_of_time import undecorated
from tpkernels.gate.child import one_line_error
from tpkernels.gate.numerics import BOUND, SEED, WIDE_BOUND, Frames, NumericCase, Results, examine, outside
from tpkernels.gate.user_kernels import interpreting, recorded
from tpkernels.gate.user_kernels.children import (
    Answer,
    ItemOfChild,
    imported_attribute,
    serve,
)
from tpkernels.gate.user_kernels.entries import constant_of_toml, dtype_of, passed, place_of
from tpkernels.gate.user_kernels.record import (
    ConfigError,
    Expression,
    OwnKernel,
    Values,
    whole_number,
)
from tpkernels.gate.user_kernels.table import own_kernel

PROCESSORS = 3  # of the GPU that is interpreted
MARGIN = 65_536  # elements on each side: tiles that reach over an edge stay within


@cache
def _prepared(prepare: str) -> tuple[Frames, Callable[[bool], None]]:
    """The frames in which launchers allocate, and what says whether bf16 keeps all bits of fp32."""
    frames = Frames()
    return frames, imported_attribute("prepare", prepare)(frames)


@cache
def _cases(place: str) -> Mapping[str, NumericCase]:
    return {case.name: case for case in imported_attribute("cases", place)()}


def answered(item: ItemOfChild) -> Answer:
    """item: what to "prepare"; "cases" and the "name" of one, or "name", "table" and which of its "sizes",
    and whether it is "wide": bf16 is fp32 then; results as they were "recorded", where a table asks for these
    """
    frames, widen = _prepared(item["prepare"])
    widen(item.get("wide", False))
    if "table" in item:
        interpreting.mend()
    torch.manual_seed(SEED)  # the same operands, whatever else is computed
    if item.get("table", {}).get("oracle") == recorded.RECORDED:
        return _beside_recorded(item, frames)
    case = _cases(item["cases"])[item["name"]] if "cases" in item else case_of(item, frames)
    found = examine(case, frames)
    place = "" if "cases" in item else _place(item)
    return {"error": _or_none(found.error), "failure": found.failure, "place": place}


def _or_none(number: float) -> float | None:
    return number if number == number else None


def _place(item: ItemOfChild) -> str:
    return place_of(imported_attribute("kernel", item["table"]["kernel"]), sys.argv[1])


def case_of(item: ItemOfChild, frames: Frames) -> NumericCase:
    """item: "name", "table" and which of its "sizes" """
    own, values, tensors, bounds = _operands(item, frames)
    exact = _expected(own, values, tensors)

    def run() -> Results:
        _launch(own, values, tensors)
        return {name: (tensors[name], one) for name, one in exact.items()}

    return NumericCase(own.name, run, bounds)


def _operands(
    item: ItemOfChild, frames: Frames
) -> tuple[OwnKernel, Values, dict[str, Tensor], dict[torch.dtype, float]]:
    """The kernel, its launch, its tensors in frames, and by how much each dtype may be off."""
    own = own_kernel(item["name"], item["table"])
    values = own.at(own.computed[item["sizes"]], PROCESSORS)
    wide = item.get("wide", False)
    tensors = {name: _framed(own, name, values, frames, wide) for name in own.tensors}
    bounds = {**BOUND, **{dtype_of(name): bound for name, bound in own.tolerance.items()}}
    if wide:  # what is allowed more in bf16 is so here
        bounds[torch.float32] = max(WIDE_BOUND, WIDE_BOUND * bounds[torch.bfloat16] / BOUND[torch.bfloat16])
    for name in own.outputs:
        if tensors[name].is_floating_point() and tensors[name].dtype not in bounds:
            dtype = own.tensors[name].dtype
            raise ConfigError(f"tolerance.{dtype}", f"is needed for {name}: there is none for {dtype}")
    return own, values, tensors, bounds


def _beside_recorded(item: ItemOfChild, frames: Frames) -> Answer:
    """The sketches of the outputs, how far they are from those recorded, and how each tensor was used."""
    own, values, tensors, bounds = _operands(item, frames)
    place, before = _place(item), item["recorded"]
    try:
        _launch(own, values, tensors)
    except Exception as error:  # a kernel that does not run is a finding
        frames.take_faults()
        return {"error": None, "failure": one_line_error(error), "place": place}
    uses = sorted(frames.take_uses())
    sketches = {name: recorded.sketch(tensors[name]) for name in own.outputs}
    failures, largest = frames.take_faults(), 0.0
    for name in own.outputs if before is not None else ():
        allowed = bounds.get(tensors[name].dtype, 1.0)
        part = recorded.moved(sketches[name], before[name]) / allowed if name in before else float("inf")
        largest = max(largest, part)
        if not part < 1:
            off = f"off by {part:.3g} times the bound from" if part < float("inf") else "not comparable with"
            failures.append(f"{name} is {off} what was recorded")
    told = {"error": _or_none(largest), "failure": "; ".join(failures), "place": place}
    return {**told, "sketches": sketches, "uses": uses}


def _framed(own: OwnKernel, name: str, values: Values, frames: Frames, wide: bool) -> Tensor:
    dtype, is_output = dtype_of(own.tensors[name].dtype), name in own.outputs
    if wide and dtype == torch.bfloat16:
        dtype = torch.float32
    shape, fill = values.shapes[name], own.fill.get(name)
    if fill is None and is_output:
        content = torch.full(shape, outside(dtype), dtype=dtype)
    else:
        content = _filled(f"fill.{name}", fill or "normal", shape, dtype, values.names)
    return frames.hold(name, is_output, content, values.strides[name], MARGIN)


def _filled(
    key: str,
    fill: str | Sequence[Expression],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    names: Mapping[str, float],
) -> Tensor:
    if not isinstance(fill, str):
        try:
            low, high = (whole_number(one, names, -(2**63)) for one in fill)
            return torch.randint(low, high, shape).to(dtype)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(key, error) from error
    if dtype == torch.bool:
        return torch.rand(shape) < {"zeros": 0, "ones": 2}.get(fill, 0.5)
    makers = {"normal": torch.randn, "uniform": torch.rand, "zeros": torch.zeros, "ones": torch.ones}
    return makers[fill](shape).to(dtype)


def _expected(own: OwnKernel, values: Values, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the oracle returns, by output."""
    assert own.oracle is not None
    oracle = imported_attribute("oracle", own.oracle)
    offered = dict(values.names) | {name: constant_of_toml(value) for name, value in own.constants.items()}
    offered |= {name: _exactly(tensor) for name, tensor in tensors.items()}
    try:
        returned = oracle(**_asked(own.oracle, oracle, offered))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError("oracle", f"{own.oracle} raised {one_line_error(error)}") from error
    return dict(_checked(own, values, _by_output(own, returned)))


def _asked(place: str, oracle: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    asked = signature(oracle).parameters.values()
    if any(one.kind is Parameter.VAR_KEYWORD for one in asked):
        return dict(offered)
    for one in asked:
        if one.name not in offered and one.default is Parameter.empty:
            raise ConfigError("oracle", f"{place} asks for {one.name!r}; there are {', '.join(offered)}")
    return {one.name: offered[one.name] for one in asked if one.name in offered}


def _by_output(own: OwnKernel, returned: Any) -> dict[str, Any]:
    if isinstance(returned, Tensor):
        returned = (returned,)
    if isinstance(returned, Mapping) and set(returned) == set(own.outputs):
        return dict(returned)
    if isinstance(returned, tuple | list) and len(returned) == len(own.outputs):
        return dict(zip(own.outputs, returned, strict=True))
    got = f"a {type(returned).__name__}"
    if isinstance(returned, Mapping):
        got = f"{', '.join(map(repr, returned)) or 'nothing'}"
    elif isinstance(returned, tuple | list):
        got = f"{len(returned)}"
    raise ConfigError("oracle", f"{own.oracle} returned {got}, expected tensors for {', '.join(own.outputs)}")


def _checked(own: OwnKernel, values: Values, returned: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, exact in returned.items():
        if not isinstance(exact, Tensor):
            raise ConfigError("oracle", f"{own.oracle} returned {type(exact).__name__} for {name}")
        if tuple(exact.shape) != values.shapes[name]:
            told = (
                f"{own.oracle} returned {name} of shape {tuple(exact.shape)}, expected {values.shapes[name]}"
            )
            raise ConfigError("oracle", told)
        if exact.isnan().any():
            raise ConfigError("oracle", f"{own.oracle} returned NaN in {name}")
        yield name, exact


def _exactly(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype.is_floating_point else tensor.clone()


def _launch(own: OwnKernel, values: Values, tensors: Mapping[str, Tensor]) -> None:
    kernel = undecorated(imported_attribute("kernel", own.kernel))
    arguments: dict[str, Any] = {name: constant_of_toml(value) for name, value in own.constants.items()}
    arguments |= values.numbers
    arguments |= {name: passed(own, name, tensor) for name, tensor in tensors.items()}
    kernel[values.grid](**arguments)


if __name__ == "__main__":
    serve(answered)
