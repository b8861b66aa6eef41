"""Keeps tied weights and fills buffers when `to_empty` gives memory to a model from the meta device.

`to_empty` gives each module a parameter of its own. Here modules that shared a parameter share it again.

It leaves non-persistent buffers with arbitrary numbers, and no checkpoint holds them. They are computed
again by the `_init_weights` of `transformers`, by `reset_parameters`, or by the module's class with its
config. If none of these computes a module's buffers, the module refuses to run until they are set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ParameterPlace = tuple[nn.Module, str]  # a module, and the name of one of its parameters


def keep_ties(model: nn.Module) -> None:
    """Keep parameters on the meta device shared between modules when they get memory."""
    places: dict[int, list[ParameterPlace]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(id(parameter), []).append((owner, name))
    shared = [each for each in places.values() if len(each) > 1]
    if shared:
        inner = vars(model).get("_apply")
        model._apply = partial(_apply_and_tie, model, inner, shared)  # type: ignore[method-assign]


def _apply_and_tie(
    model: nn.Module,
    inner: Callable[..., nn.Module] | None,
    shared: list[list[ParameterPlace]],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """Replace the model's `_apply`, which `to_empty`, `to` and similar methods call."""
    tied = [places for places in shared if len({id(owner._parameters[name]) for owner, name in places}) == 1]
    inner(fn, recurse) if inner else type(model)._apply(model, fn, recurse)
    for (first, short), *others in tied:
        for owner, name in others:
            owner._parameters[name] = first._parameters[short]
    return model


def remember_buffers(model: nn.Module) -> None:
    """Fill non-persistent buffers on the meta device when they get memory, or refuse to run without them.

    Buffers with values keep them if parameters are on the meta device, as `accelerate` builds models.
    """
    any_meta = any(parameter.is_meta for parameter in model.parameters())
    for prefix, owner in model.named_modules():
        buffers = {name: buffer for name, buffer in owner._buffers.items() if buffer is not None}
        names = [n for n, b in buffers.items() if b.is_meta and n in owner._non_persistent_buffers_set]
        if not names and (not any_meta or all(buffer.is_meta for buffer in buffers.values())):
            continue
        values = dict.fromkeys(names) | (_computed(model, prefix, owner, names) if names else {})
        later = _Later(owner, prefix, values)
        owner._apply = later.apply
        if None in values.values():
            for module in {model, owner}:
                module.register_forward_pre_hook(later.require_set)


class _Later:
    """Buffers of one module, `owner`, that must be filled.

    values: by name; None: unknown
    unset: buffers that hold arbitrary numbers, each with its version when it got them
    """

    def __init__(self, owner: nn.Module, prefix: str, values: dict[str, Tensor | None]) -> None:
        self.owner = owner
        self.prefix = prefix
        self.values = values
        self.unset: dict[str, tuple[Tensor, int]] = {}

    def is_unset(self, name: str) -> bool:
        """Whether a buffer still has the arbitrary numbers that it got with its memory."""
        buffer = self.owner._buffers[name]
        if buffer is None or name not in self.unset:
            return False
        unset, version = self.unset[name]
        return buffer is unset and buffer._version == version

    @torch.no_grad()
    def apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Replace the module's `_apply`, which `to_empty`, `to` and similar methods call."""
        owner = self.owner
        before = dict(owner._buffers)
        empty = {
            n for n in self.values if (b := before.get(n)) is not None and (b.is_meta or self.is_unset(n))
        }
        type(owner)._apply(owner, fn, recurse)
        for name, old in before.items():
            new = owner._buffers.get(name)
            if old is None or new is None or new is old or new.is_meta:
                continue
            if name in empty:
                self._fill(name, new)
            elif not old.is_meta:
                new.copy_(old)
        return owner

    def _fill(self, name: str, buffer: Tensor) -> None:
        """Write the value of a buffer that has got memory; without a value, note that it is unset."""
        value = self.values[name]
        if value is not None:
            buffer.copy_(value)
            return
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        self.unset[name] = buffer, buffer._version

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, whose tensors start at version 0."""
        unset = {name: where for name, where in self.unset.items() if self.is_unset(name)}
        return vars(self) | {"unset": unset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.unset = {name: (buffer, buffer._version) for name, (buffer, _) in self.unset.items()}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def require_set(self, *_: Any) -> None:
        """Raise if a buffer is unset: a forward pre-hook."""
        names = [name for name in self.unset if self.is_unset(name)]
        if names:
            full = ", ".join(f"'{self.prefix}.{name}'" if self.prefix else f"'{name}'" for name in names)
            raise RuntimeError(
                f"expected the numbers of {full}, which the model was built without (on the meta device) and "
                "no checkpoint holds (persistent=False); set them after to_empty, or give their module a "
                "reset_parameters() that does"
            )


def _computed(model: nn.Module, prefix: str, owner: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Compute values on the CPU for all of these buffers; return none if one cannot be computed."""
    for compute in _ways(model, prefix, owner):
        empty = _writable_copy(owner, names)
        before = {name: (empty._buffers[name], _version(empty, name)) for name in names}
        try:
            with torch.random.fork_rng(), torch.device("cpu"), torch.no_grad():
                made = compute(empty)
        except Exception:  # it may need a real parameter, for instance; another way may not
            continue
        found = made if isinstance(made, nn.Module) else empty
        values: dict[str, Tensor] = {}
        for name, (buffer, version) in before.items():
            value, expected = found._buffers.get(name), owner._buffers[name]
            written = value is not buffer or _version(found, name) > version
            if value is not None and expected is not None and written and value.shape == expected.shape:
                values[name] = value
        if len(values) == len(names):
            return values
    return {}


def _ways(model: nn.Module, prefix: str, owner: nn.Module) -> Iterator[Callable[[nn.Module], Any]]:
    """Yield functions of a copy of `owner` that may write its buffers, or return a module with them."""
    steps = prefix.split(".") if prefix else []
    for length in range(len(steps), -1, -1):  # the nearest ancestor first
        ancestor = model.get_submodule(".".join(steps[:length]))
        if callable(init := getattr(ancestor, "_init_weights", None)):
            yield init
    if callable(getattr(owner, "reset_parameters", None)):
        yield lambda empty: empty.reset_parameters()  # type: ignore[operator]
    if hasattr(owner, "config") and not any(True for _ in owner.parameters()):
        yield lambda empty: type(owner)(empty.config)


def _writable_copy(owner: nn.Module, names: list[str]) -> nn.Module:
    """A copy whose parameters stay on the meta device, and whose buffers can be written to."""
    memo: dict[int, Any] = {}
    for name in names:
        buffer = owner._buffers[name]
        assert buffer is not None
        memo[id(buffer)] = torch.zeros_like(buffer, device="cpu")
    return deepcopy(owner, memo)


def _version(module: nn.Module, name: str) -> int:
    buffer = module._buffers.get(name)
    return -1 if buffer is None else buffer._version
