"""Checks of sizes and ranks, with an error for each mistake."""

from __future__ import annotations

import operator

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class InvalidSizes(ValueError, RuntimeError, AssertionError):
    """The world cannot be split by the given sizes.

    It is a `ValueError`, and also the `RuntimeError` and the `AssertionError` that Megatron's two
    initializers raise for the same mistake, so that existing `except` clauses still work.
    """


def positive(value: int, name: str) -> int:
    """Return `value` as an int of at least 1; raise an error with its name otherwise."""
    return _at_least(1, "a positive integer", value, name)


def not_negative(value: int, name: str) -> int:
    """Return `value` as an int of at least 0, such as a rank; raise an error with its name otherwise."""
    return _at_least(0, "an integer of 0 or more", value, name)


def _at_least(least: int, wanted: str, value: int, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {wanted}, got {value!r}") from None
    if number < least:
        raise InvalidSizes(f"{name} must be {wanted}, got {number}")
    return number


def data_parallel_size(world_size: int, *, tensor: int, pipeline: int, context: int) -> int:
    """Return the data-parallel size: world_size / (tensor x pipeline x context)."""
    parts = f"tensor_model_parallel_size ({tensor}) x pipeline_model_parallel_size ({pipeline})"
    if context > 1:
        parts += f" x context_parallel_size ({context})"
    model = tensor * pipeline * context
    if world_size % model:
        raise InvalidSizes(
            f"world_size ({world_size}) is not divisible by {parts} = {model}; "
            f"choose sizes whose product divides {world_size}"
        )
    return world_size // model


def check_expert(world_size: int, *, tensor: int, pipeline: int, expert: int) -> None:
    model = tensor * pipeline * expert
    if world_size % model:
        raise InvalidSizes(
            f"world_size ({world_size}) is not divisible by tensor_model_parallel_size ({tensor}) x "
            f"pipeline_model_parallel_size ({pipeline}) x expert_model_parallel_size ({expert}) = {model}; "
            f"experts are spread over the data ranks, so {expert} must divide "
            f"{world_size // (tensor * pipeline)}"
        )


def check_virtual(virtual_pipeline: int | None, pipeline: int) -> int | None:
    if virtual_pipeline is None:
        return None
    if pipeline < 2:
        raise InvalidSizes(
            "pipeline-model-parallel size should be greater than 1 with interleaved schedule: "
            f"got pipeline {pipeline} with virtual_pipeline {virtual_pipeline}; "
            "use 2 or more stages, or leave virtual_pipeline out"
        )
    return positive(virtual_pipeline, "virtual_pipeline")


def check_split(split_rank: int | None, pipeline: int) -> int | None:
    if split_rank is None:
        return None
    if isinstance(split_rank, bool) or not hasattr(split_rank, "__index__"):
        raise TypeError(
            f"split_rank must be an integer, got {split_rank!r}: the fourth argument of "
            "initialize_model_parallel is pipeline_model_parallel_split_rank, the decoder's first stage; "
            "in today's Megatron it is pipeline_model_parallel_comm_backend; pass backend=... instead, for "
            "every group"
        )
    if not 0 <= split_rank < pipeline:
        raise InvalidSizes(
            f"split_rank ({split_rank}) is not a pipeline stage: expected 0 to {pipeline - 1} "
            f"with pipeline_model_parallel_size {pipeline}"
        )
    return operator.index(split_rank)


def parse_order(order: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """Parse "tp-cp-ep-dp-pp" into axes, the fastest first; an axis of size 1 may be left out."""
    if not isinstance(order, str):
        raise TypeError(f"order must be a string such as {DEFAULT_ORDER!r}, got {order!r}")
    axes = order.lower().split("-")
    for axis in axes:
        if axis not in AXES:
            raise InvalidSizes(
                f"order {order!r} names an unknown axis {axis!r}; known are {', '.join(AXES)}, "
                f"joined by '-' as in {DEFAULT_ORDER!r}"
            )
        if axes.count(axis) > 1:
            raise InvalidSizes(f"order {order!r} names the axis {axis!r} twice")
    missing = [axis for axis in AXES if axis not in axes]
    for axis in missing:
        if sizes[axis] > 1:
            raise InvalidSizes(
                f"order {order!r} leaves out the axis {axis!r}, whose size is {sizes[axis]}; "
                f"only an axis of size 1 may be left out"
            )
    return (*axes, *missing)
