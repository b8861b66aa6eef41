"""A case of a launcher, or a kernel against its oracle in float64: interpreted in a process of its own.

`python -m tpkernels.gate.user_kernels.numerics`, see `children`.

Operands of a kernel lie in NaN, outputs start as NaN, nothing else may be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.ahead_of_time import undecorated
from tpkernels.gate.numerics import (
    BOUND,
    SEED,
    Framed,
    Frames,
    NumericCase,
    examine,
    off_by,
    outside,
    relative_error,
)
from tpkernels.gate.user_kernels.children import (
    Answer,
    ItemOfChild,
    imported_attribute,
    one_line_error,
    serve,
)
from tpkernels.gate.user_kernels.entries import constant_of_toml
from tpkernels.gate.user_kernels.record import (
    DTYPES,
    ConfigError,
    Expression,
    OwnKernel,
    Values,
    whole_number,
)
from tpkernels.gate.user_kernels.table import own_kernel

TOLERANCE = {name: BOUND[dtype] for name in DTYPES if (dtype := getattr(torch, DTYPES[name])) in BOUND}
PROCESSORS = 3  # of the GPU that is interpreted
MARGIN = 65_536  # elements on each side: tiles that reach over an edge stay within


@cache
def _prepared(prepare: str) -> Frames:
    """The frames in which launchers allocate."""
    frames = Frames()
    imported_attribute("prepare", prepare)(frames)
    return frames


@cache
def _cases(place: str) -> Mapping[str, NumericCase]:
    return {case.name: case for case in imported_attribute("cases", place)()}


def answered(item: ItemOfChild) -> Answer:
    """item: what to "prepare"; "cases" and the "name" of one, or "name", "table" and which of its "sizes" """
    frames = _prepared(item["prepare"])
    torch.manual_seed(SEED)  # the same operands, whatever else is computed
    if "cases" not in item:
        return computed(item)
    found = examine(_cases(item["cases"])[item["name"]], frames)
    return {"error": found.error if found.error == found.error else None, "failure": found.failure}


def computed(item: ItemOfChild) -> Answer:
    """item: "name", "table" and which of its "sizes" """
    own = own_kernel(item["name"], item["table"])
    values = own.at(own.computed[item["sizes"]], PROCESSORS)
    tensors = {name: _framed(own, name, values) for name in own.tensors}
    exact = _expected(own, values, tensors)
    try:
        _launch(own, values, tensors)
    except Exception as error:  # a kernel that does not run is a finding
        return {"error": None, "failure": one_line_error(error)}
    errors, failures = [], []
    for name, wanted in exact.items():
        part, flaw = _compared(own, name, tensors[name].view, wanted)
        errors.append(part)
        failures += [f"{name} {flaw}"] * bool(flaw)
    for name, framed in tensors.items():
        if framed.written_outside():
            failures.append(f"written outside {name}")
        if name not in own.outputs and framed.changed():
            failures.append(f"writes into {name}, which is none of its outputs")
    known = [part for part in errors if part == part]
    return {"error": max(known, default=None), "failure": "; ".join(failures)}


def _framed(own: OwnKernel, name: str, values: Values) -> Framed:
    dtype = getattr(torch, DTYPES[own.tensors[name].dtype])
    shape, fill = values.shapes[name], own.fill.get(name)
    if fill is None and name in own.outputs:
        content = torch.full(shape, outside(dtype), dtype=dtype)
    else:
        content = _filled(f"fill.{name}", fill or "normal", shape, dtype, values.names)
    return Framed.around(content, values.strides[name], MARGIN)


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


def _expected(own: OwnKernel, values: Values, tensors: Mapping[str, Framed]) -> dict[str, Tensor]:
    """What the oracle returns, by output."""
    assert own.oracle is not None
    oracle = imported_attribute("oracle", own.oracle)
    offered = dict(values.names) | {name: constant_of_toml(value) for name, value in own.constants.items()}
    offered |= {name: _exactly(framed.view) for name, framed in tensors.items()}
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


def _launch(own: OwnKernel, values: Values, tensors: Mapping[str, Framed]) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = undecorated(imported_attribute("kernel", own.kernel))
    arguments: dict[str, Any] = {name: constant_of_toml(value) for name, value in own.constants.items()}
    arguments |= values.numbers
    for name, kind in own.tensors.items():
        view = tensors[name].view
        if kind.block:
            arguments[name] = TensorDescriptor(view, list(view.shape), list(view.stride()), list(kind.block))
        else:
            arguments[name] = view
    kernel[values.grid](**arguments)


def _compared(own: OwnKernel, name: str, actual: Tensor, exact: Tensor) -> tuple[float, str]:
    """The error as a part of what is allowed, and in words what is wrong."""
    dtype = own.tensors[name].dtype
    if not actual.dtype.is_floating_point:
        wrong = int((actual != exact).sum())
        return float(wrong > 0), f"differs in {wrong} of {actual.numel()} elements" if wrong else ""
    bound = own.tolerance.get(dtype) or TOLERANCE.get(dtype)
    if bound is None:
        raise ConfigError(f"tolerance.{dtype}", f"is needed for {name}: there is none for {dtype}")
    error = relative_error(actual, exact) / bound
    if error < 1:
        return error, ""
    return error, off_by(error)


if __name__ == "__main__":
    serve(answered)
