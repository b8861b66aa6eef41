"""Products of options: a few of their combinations in `make test`, all the others in `make sweep`.

    @pairwise(shape=SHAPES, activation=ACTIVATIONS, dtype=DTYPES)
    def test_linear_is_accurate(shape, activation, dtype): ...

    @combined  # of a product in the body, where a test for each combination would cost more than it does
    def test_layer_is_accurate(combined):
        for dtype, sequence_parallel, bias in combined(DTYPES, (False, True), (False, True)): ...

`once` takes each value at least once, `pairwise` each pair of values of two arguments: a fault that needs one
value, or two together, shows. `pytest.mark.sweep` on a test or a parameter leaves it to `make sweep` alone.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

SWEEP = os.environ.get("TPKERNELS_SWEEP") == "1"  # run what `make test` leaves out, and nothing else

Values = Sequence[Any] | Mapping[str, Any]  # a mapping's keys become ids
Combination = tuple[int, ...]  # which value of each axis


Test = Callable[..., Any]


def once(**axes: Values) -> Callable[[Test], Test]:
    return partial(_parametrized, axes, 1)


def pairwise(**axes: Values) -> Callable[[Test], Test]:
    return partial(_parametrized, axes, 2)


def paired(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations that hold each pair of values of two axes."""
    cover = covering([len(values) for values in axes], strength=2)
    return [tuple(values[i] for values, i in zip(axes, each, strict=True)) for each in sorted(cover)]


# of a test's arguments: `paired`, and in `make sweep` the product
combined = pytest.mark.parametrize(
    "combined",
    [
        pytest.param(itertools.product, id="all", marks=pytest.mark.sweep)
        if SWEEP
        else pytest.param(paired, id="pairs")
    ],
)


def covering(sizes: Sequence[int], strength: int) -> set[Combination]:
    """Combinations that hold all values of any `strength` axes: the one that adds most, then the next."""
    strength = min(strength, len(sizes))
    everything = list(itertools.product(*map(range, sizes)))
    missing = set().union(*(_held(combination, strength) for combination in everything))
    chosen = set()
    while missing:
        best = max(everything, key=lambda combination: len(_held(combination, strength) & missing))
        chosen.add(best)
        missing -= _held(best, strength)
    return chosen


def _held(combination: Combination, strength: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), strength))


def _parametrized(axes: Mapping[str, Values], strength: int, test: Test) -> Test:
    listed = [_listed(values) for values in axes.values()]
    cover = covering([len(values) for values in listed], strength)
    all_in_sweep = "combined" in inspect.signature(test).parameters  # in `make test` it is `paired`
    params = []
    for combination in itertools.product(*(range(len(values)) for values in listed)):
        # collecting what is not run would take longer than much that is
        if (combination in cover) != SWEEP or (SWEEP and all_in_sweep):
            ids, values = zip(*(axis[i] for axis, i in zip(listed, combination, strict=True)), strict=True)
            params.append(pytest.param(*values, id="-".join(ids), marks=pytest.mark.sweep if SWEEP else ()))
    parametrized: Test = pytest.mark.parametrize(list(axes), params)(test)
    return parametrized


def _listed(values: Values) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return [(str(name), value) for name, value in values.items()]
    return [(_named(value), value) for value in values]


def _named(value: Any) -> str:
    """Of functions and records their name; the same in every process, as workers compare ids."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
    assert " at 0x" not in str(name), f"{name} has another address in each process: expected a mapping of ids"
    return str(name).removeprefix("torch.")
