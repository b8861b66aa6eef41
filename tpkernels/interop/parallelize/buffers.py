"""Buffers that no checkpoint holds, of a model built on the meta device: computed again, or refused.

`to_empty` leaves them with arbitrary numbers, and no file brings others. What computes them again: the
`_init_weights` of `transformers`, `reset_parameters`, or the module's class with its config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def remember_buffers(model: nn.Module) -> None:
    """Have non-persistent buffers on the meta device filled once they get memory, or refuse to run."""
    filled: dict[nn.Module, list[str]] = {}
    for prefix, owner in model.named_modules():
        names = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        names = [name for name in names if name in owner._non_persistent_buffers_set]
        if not names:
            continue
        filled[owner] = names
        later = _Later(prefix, {name: None for name in names} | _computed(model, prefix, owner, names))
        owner._apply = partial(_apply, owner, later)
        if None in later.values.values():
            for module in {model, owner}:
                module.register_forward_pre_hook(later.require_set)
    if any(p.is_meta for p in model.parameters()) and not all(b.is_meta for b in model.buffers()):
        model.to_empty = partial(_to_empty, model, filled)  # type: ignore[method-assign]


class _Later:
    """Of one module.

    values: of its buffers; None: nobody knows
    unset: buffers that hold arbitrary numbers, and how often they were written to by then
    """

    def __init__(self, prefix: str, values: dict[str, Tensor | None]) -> None:
        self.prefix = prefix
        self.values = values
        self.unset: dict[str, tuple[nn.Module, Tensor, int]] = {}

    def holds_nothing(self, owner: nn.Module, name: str) -> bool:
        buffer = owner._buffers[name]
        if buffer is None or name not in self.unset:
            return False
        _, was, writes = self.unset[name]
        return buffer is was and buffer._version == writes

    def fill(self, owner: nn.Module, name: str) -> None:
        buffer, value = owner._buffers[name], self.values[name]
        assert buffer is not None
        if value is not None:
            buffer.copy_(value)
            return
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        self.unset[name] = owner, buffer, buffer._version

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose tensors count anew."""
        empty = {n: where for n, where in self.unset.items() if self.holds_nothing(where[0], n)}
        return vars(self) | {"unset": empty}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.unset = {n: (owner, buffer, buffer._version) for n, (owner, buffer, _) in self.unset.items()}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def require_set(self, *_: Any) -> None:
        names = [name for name, (owner, _, _) in self.unset.items() if self.holds_nothing(owner, name)]
        if names:
            full = ", ".join(f"'{self.prefix}.{name}'" if self.prefix else f"'{name}'" for name in names)
            raise RuntimeError(
                f"expected the numbers of {full}, which the model was built without (on the meta device) and "
                "no checkpoint holds (persistent=False); set them after to_empty, or give their module a "
                "reset_parameters() that does"
            )


@torch.no_grad()
def _apply(
    owner: nn.Module, later: _Later, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """What `to_empty`, `to` and their like call, in place of the module's own."""
    empty = [
        name
        for name in later.values
        if (buffer := owner._buffers.get(name)) is not None
        and (buffer.is_meta or later.holds_nothing(owner, name))
    ]
    type(owner)._apply(owner, fn, recurse)
    for name in empty:
        buffer = owner._buffers.get(name)
        if buffer is not None and not buffer.is_meta:
            later.fill(owner, name)
    return owner


def _to_empty(
    model: nn.Module, filled: dict[nn.Module, list[str]], *, device: Any, recurse: bool = True
) -> nn.Module:
    """torch's, which would empty buffers, too, that are there already.

    filled: buffers that are not, by module: `_apply` sees to them
    """
    there = [
        (owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and not buffer.is_meta and name not in filled.get(owner, ())
    ]
    type(model).to_empty(model, device=device, recurse=recurse)
    with torch.no_grad():
        for owner, name, buffer in there:
            emptied = owner._buffers[name]
            assert emptied is not None
            emptied.copy_(buffer)
    return model


def _computed(model: nn.Module, prefix: str, owner: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Values on the CPU, of all of these buffers or of none."""
    for computing in _ways(model, prefix, owner):
        empty = _without_values(owner, names)
        before = {name: (empty._buffers[name], _writes(empty, name)) for name in names}
        try:
            with torch.random.fork_rng(), torch.device("cpu"), torch.no_grad():
                made = computing(empty)
        except Exception:  # it needs what is not there; the next way may not
            continue
        found = made if isinstance(made, nn.Module) else empty
        values: dict[str, Tensor] = {}
        for name, (buffer, writes) in before.items():
            value, expected = found._buffers.get(name), owner._buffers[name]
            written = value is not buffer or _writes(found, name) > writes
            if value is not None and expected is not None and written and value.shape == expected.shape:
                values[name] = value
        if len(values) == len(names):
            return values
    return {}


def _ways(model: nn.Module, prefix: str, owner: nn.Module) -> Iterator[Callable[[nn.Module], Any]]:
    """What may write the buffers of a module like `owner`, or return another that has them."""
    steps = prefix.split(".") if prefix else []
    for length in range(len(steps), -1, -1):  # the nearest knows best
        ancestor = model.get_submodule(".".join(steps[:length]))
        if callable(init := getattr(ancestor, "_init_weights", None)):
            yield init
    if callable(getattr(owner, "reset_parameters", None)):
        yield lambda empty: empty.reset_parameters()  # type: ignore[operator]
    if hasattr(owner, "config") and not any(True for _ in owner.parameters()):
        yield lambda empty: type(owner)(empty.config)


def _without_values(owner: nn.Module, names: list[str]) -> nn.Module:
    """A copy whose parameters stay on the meta device, and whose buffers can be written to."""
    memo: dict[int, Any] = {}
    for name in names:
        buffer = owner._buffers[name]
        assert buffer is not None
        memo[id(buffer)] = torch.zeros_like(buffer, device="cpu")
    return deepcopy(owner, memo)


def _writes(module: nn.Module, name: str) -> int:
    buffer = module._buffers.get(name)
    return -1 if buffer is None else buffer._version
