# mypy: ignore-errors
"""Until the records of primitives land."""

from __future__ import annotations

from tpkernels.dispatch.steps import steps_on


def linear(x, *a):
    return steps_on(x.device).linear(x, *a)


def linear_into(y, *a):
    return steps_on(y.device).linear_into(y, *a)


def glu(x, *a):
    return steps_on(x.device).glu(x, *a)


def dgrad(x, *a):
    return steps_on(x.device).dgrad(x, *a)


def dgrad_act(x, *a):
    return steps_on(x.device).dgrad_act(x, *a)


def dglu(x, *a):
    return steps_on(x.device).dglu(x, *a)


def wgrad(x, *a):
    return steps_on(x.device).wgrad(x, *a)


def wgrad_accumulate_(x, *a):
    return steps_on(x.device).wgrad_accumulate_(x, *a)


def bias_grad(x, *a):
    return steps_on(x.device).bias_grad(x, *a)
