"""Describes a plan in words, in the style of Megatron's documentation."""

from __future__ import annotations

from typing import Literal

from tpkernels.topology.groups import Groups, Kind, Ranks

NAMES: dict[Kind, str] = {
    "dp": "data_parallel",
    "tp": "tensor model-parallel",
    "pp": "pipeline model-parallel",
    "cp": "context_parallel",
    "dp_cp": "data_parallel with context",
    "ep": "expert model-parallel",
    "expert_dp": "expert data_parallel",
    "embedding": "embedding",
    "position_embedding": "position embedding",
}
Unit = Literal["GPU", "rank"]  # the word for a position in the world: a rank on a CPU is no GPU
LINE_WIDTH = 96
MAX_MEMBERS = 16  # a longer group is shown by its first ranks and its last


def shown_kinds(plan: Groups) -> list[Kind]:
    """Return the kinds to show: always data, tensor and pipeline, others if their size is above 1."""
    kinds: list[Kind] = ["dp", "tp", "pp"]
    if plan.context > 1:
        kinds += ["cp", "dp_cp"]
    if plan.expert > 1:
        kinds += ["ep", "expert_dp"]
    if plan.pipeline > 1:
        kinds += ["embedding"]
        if plan.split_rank is not None:
            kinds += ["position_embedding"]
    return kinds


def headline(plan: Groups) -> str:
    """Format the world's size and parallel sizes as one line."""
    sizes = [f"tensor {plan.tensor}", f"data {plan.data}", f"pipeline {plan.pipeline}"]
    if plan.context > 1:
        sizes.insert(1, f"context {plan.context}")
    text = f"world size {plan.world_size} = " + " x ".join(sizes)
    if plan.expert > 1:
        text += f", experts over {plan.expert}"
    if plan.virtual_pipeline is not None:
        text += f", {plan.virtual_pipeline} virtual stages on each rank"
    if plan.split_rank is not None:
        text += f", decoder from stage {plan.split_rank}"
    return f"{text}  (order {'-'.join(plan.order)})"


def name_of(rank: int, unit: Unit) -> str:
    """Return the short name of a rank.

    >>> name_of(3, "GPU"), name_of(3, "rank")
    ('g3', 'r3')
    """
    return f"{unit[0].lower()}{rank}"


def group_text(ranks: Ranks, unit: Unit = "GPU") -> str:
    """Format a group's ranks as "[g0, g2]", shortened in the middle if there are many."""
    return "[" + ", ".join(_shortened(ranks, name_of(0, unit)[:-1])) + "]"


def describe(plan: Groups, *, max_groups: int, unit: Unit) -> str:
    """Describe the groups of each shown kind, and the ranks of each replica of the model."""
    lines = [headline(plan), ""]
    for kind in shown_kinds(plan):
        count = plan.count_groups(kind)
        shown = [group_text(ranks, unit) for ranks in plan.first_groups(kind, max_groups)]
        if count > max_groups:
            shown.append(f"... and {count - max_groups} more")
        lines.append(f"{count} {NAMES[kind]} group{'s' * (count != 1)}:")
        lines += _wrap(shown)
    count = plan.count_groups("model")
    lines += [
        "",
        f"{count} full model{'s' * (count != 1)} partitioned over {plan.world_size} {unit}s:",
    ]
    lines += [
        f"    model {i} is partitioned into {unit.lower()}s {','.join(_shortened(ranks))}"
        for i, ranks in enumerate(plan.first_groups("model", max_groups))
    ]
    if count > max_groups:
        lines.append(f"    ... and {count - max_groups} more")
    return "\n".join(lines)


def describe_rank(plan: Groups, rank: int) -> str:
    """Describe the position of one rank in each kind of group."""
    width = max(len(NAMES[kind]) for kind in shown_kinds(plan))
    lines = [f"rank {rank} of {plan.world_size}"]
    for kind in shown_kinds(plan):
        if plan.is_member(rank, kind):
            ranks = plan.group_of(rank, kind)
            place = f"{plan.index_in(rank, kind)} of {len(ranks)} in {group_text(ranks)}"
        else:
            place = "not a member"
        lines.append(f"    {NAMES[kind]:<{width}}  {place}")
    return "\n".join(lines)


def _shortened(ranks: Ranks, prefix: str = "") -> list[str]:
    if len(ranks) <= MAX_MEMBERS:
        return [f"{prefix}{rank}" for rank in ranks]
    return [*_shortened(ranks[: MAX_MEMBERS - 2], prefix), "...", f"{prefix}{ranks[-1]}"]


def _wrap(parts: list[str]) -> list[str]:
    """Join texts by commas into indented lines."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) > LINE_WIDTH:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return [f"    {line}" for line in lines]
