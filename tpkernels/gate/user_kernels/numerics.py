"""A kernel of others, interpreted, against its oracle in float64.

`python -m tpkernels.gate.user_kernels.numerics`, see `children`.

As `gate.numerics` does it for ours: operands lie in NaN, outputs start as NaN, nothing else may be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.ahead_of_time import undecorated
from tpkernels.gate.numerics import BOUND, relative_error
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
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.target import INTERPRETER

SEED = 20261121
TOLERANCE = {name: BOUND[dtype] for name in DTYPES if (dtype := getattr(torch, DTYPES[name])) in BOUND}

MARGIN = 65_536  # elements on each side: tiles that reach over an edge stay within


@dataclass(frozen=True)
class Framed:
    """A view of a buffer, with the buffer as it was."""

    view: Tensor
    buffer: Tensor
    before: Tensor

    @staticmethod
    def around(values: Tensor, strides: tuple[int, ...]) -> Framed:
        """values: what the view shall hold, of any strides itself"""
        reach = 1 + sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True))
        buffer = torch.empty(reach + 2 * MARGIN, dtype=values.dtype)
        buffer.fill_(outside(values.dtype))
        view = buffer.as_strided(values.shape, strides, MARGIN)
        view.copy_(values)
        return Framed(view, buffer, buffer.clone())

    def written_outside(self) -> bool:
        """Whether anything around the view, or between its rows, is not as it was."""
        after, before = self.buffer.clone(), self.before.clone()
        for one in (after, before):
            one.as_strided(self.view.shape, self.view.stride(), MARGIN).zero_()
        return not torch.equal(_bits(after), _bits(before))

    def changed(self) -> bool:
        """Whether anything in the view is not as it was."""
        there = self.before.as_strided(self.view.shape, self.view.stride(), MARGIN)
        return not torch.equal(_bits(self.view.contiguous()), _bits(there.contiguous()))


def outside(dtype: torch.dtype) -> float | int | bool:
    """The number around a view, which nobody should read: NaN, or the largest integer."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def computed(item: ItemOfChild) -> Answer:
    """item: "name", "table" and which of its "sizes" """
    mend()
    own = own_kernel(item["name"], item["table"])
    values = own.at(own.computed[item["sizes"]], INTERPRETER.processors)
    torch.manual_seed(SEED)
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
    return Framed.around(content, values.strides[name])


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
    return error, f"is off by {error:.3g} times the bound" if error == error else "holds NaN"


if __name__ == "__main__":
    serve(computed)
