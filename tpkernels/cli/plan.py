"""`python -m tpkernels plan`: describes and draws the groups of ranks.

With --model it prints a table of layouts of ranks for the model, the best first; with --reshard it predicts
the traffic to move the model between two layouts.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from tpkernels.cli import USUAL_TOKENS, BadUse, add_number, bad_use_if, size_of, write_json, written_to
from tpkernels.groups.draw import describe_rank
from tpkernels.groups.plan import plan_groups
from tpkernels.groups.sizes import DEFAULT_ORDER
from tpkernels.models.config import GPTConfig, model_config
from tpkernels.planning.gpus import gpu_named
from tpkernels.planning.job import Hardware, Job, RankLayout
from tpkernels.planning.memory import parameters_of_stage, symmetric_memory
from tpkernels.planning.reshard import Holders, traffic
from tpkernels.planning.step_time import Advice, Prediction, advise

if TYPE_CHECKING:
    from argparse import _ActionsContainer


_GB = 1e9
MOST_RANKS = 10_000_000  # more than any machine has; still described in seconds


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.usage = (
        "%(prog)s --world-size N [options of groups]\n"
        "       %(prog)s --world-size N --model NAME [options of layouts]\n"
        "       %(prog)s --world-size N --model NAME --reshard FROM TO [options of moves]"
    )
    add_number(parser, "--world-size", "how many ranks (GPUs)", least=1, required=True)
    add_number(parser, "--gpus-per-node", "GPUs of a node", 8, least=1)
    if "--reshard" in words:
        _add_options_of_moves(parser)
        return
    is_for_model = any(word.partition("=")[0] == "--model" for word in words)
    if not is_for_model:
        _add_options_of_groups(parser)
    if is_for_model or {"-h", "--help"} & {*words}:
        _add_options_of_layouts(parser)


def main(options: Namespace) -> int:
    if options.world_size > MOST_RANKS:
        raise BadUse(f"--world-size: expected at most {MOST_RANKS}, got {options.world_size}")
    with bad_use_if(ValueError, TypeError, ArithmeticError):
        if "reshard" in options:
            return _plan_move(options)
        return _advise(options) if "model" in options else _plan(options)


def _add_options_of_groups(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of groups")
    for axis, name in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        add_number(group, f"--{axis}", f"{name}-parallel size", 1)
    add_number(group, "--virtual-pipeline", "interleaved stages on each rank")
    add_number(group, "--split-rank", "first stage of the decoder", metavar="STAGE")
    axes = f"axes, fastest first (default {DEFAULT_ORDER})"
    group.add_argument("--order", default=DEFAULT_ORDER, help=axes)
    add_number(group, "--rank", "show one rank's place only", metavar="R")
    group.add_argument("--svg", type=written_to, metavar="FILE", help="also draw the groups into FILE")


def _plan(options: Namespace) -> int:
    plan = plan_groups(
        world_size=options.world_size,
        tensor=options.tp,
        pipeline=options.pp,
        context=options.cp,
        expert=options.ep,
        virtual_pipeline=options.virtual_pipeline,
        split_rank=options.split_rank,
        order=options.order,
    )
    text = plan.describe() if options.rank is None else describe_rank(plan, options.rank)
    if options.svg is not None:
        options.svg.write_text(plan.to_svg(gpus_per_node=options.gpus_per_node), encoding="utf-8")
        text += f"\n\ndrawn into {options.svg}"
    print(text)
    return 0


def _add_options_of_moves(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of moves between layouts")
    such = "such as tp=8 tp=4, or tp=8,ranks=0-511 tp=4,ranks=512-1023"
    group.add_argument("--reshard", nargs=2, required=True, metavar=("FROM", "TO"), help=such)
    _add_model(group)


def _plan_move(options: Namespace) -> int:
    """Print the bytes of a move between two layouts."""
    world, nodes = options.world_size, options.gpus_per_node
    source, target = (_holders(text, world) for text in options.reshard)
    found = traffic(_model_of(options), world, source, target, gpus_per_node=nodes)
    print(
        f"""{options.model}: {found.held / _GB:.2f} GB of weights in bfloat16
from   {source}
to     {target}
sent   {found.sent / _GB:.2f} GB, no less can be: what ranks need and do not hold
       {found.between_nodes / _GB:.2f} GB of it between nodes of {nodes} GPUs
rank   sends {found.most_sent / _GB:.2f} GB and receives {found.most_received / _GB:.2f} GB at most"""
    )
    return 0


def _holders(text: str, world: int) -> Holders:
    parsed = re.fullmatch(r"tp=(\d+)(?:,ranks=(\d+)-(\d+))?", text)
    if not parsed:
        raise ValueError(f"--reshard: expected tp=N or tp=N,ranks=FIRST-LAST, got {text!r}")
    tensor, first, last = (int(number) for number in parsed.groups(str(world - 1)))
    return Holders(tensor, range(first if parsed[2] else 0, last + 1))


_USUAL_SEQUENCES = 8  # of a step, for each GPU, so that any data-parallel size divides them
_ASSUMED = {
    "efficiency": "of the peak rate, that products reach",
    "link_efficiency": "of links, that transfers reach",
    "reserve": "of memory, that is left for what is not counted",
}
_USUAL = {field.name: field.default for field in fields(Hardware)}
_STAGES = "not for `train`: stages"


def _add_options_of_layouts(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("options of layouts")
    _add_model(group)
    group.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (default), h200 or a100")
    add_number(group, "--max-tp", "most tensor-parallel ranks (default: those of a node)")
    add_number(group, "--tokens", f"in a sequence (default {USUAL_TOKENS})")
    add_number(group, "--batch", f"sequences a step (default {_USUAL_SEQUENCES} for each GPU)")
    add_number(group, "--micro-batch", "sequences that a rank computes at once", 1)
    again = "what of a block backward computes again (default none)"
    group.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help=again)
    full = "each tensor-parallel rank holds all tokens (default: its own)"
    group.add_argument("--no-sequence-parallel", dest="sequence_parallel", action="store_false", help=full)
    for name, meaning in _ASSUMED.items():
        option, usual = f"--{name.replace('_', '-')}", _USUAL[name]
        told = f"{meaning} (default {usual})"
        group.add_argument(option, type=float, default=usual, metavar="X", help=told)
    add_number(group, "--top", "how many to list", 10, least=1)
    group.add_argument("--all", action="store_true", help="list all, those that do not fit as well")
    group.add_argument("--json", type=written_to, metavar="FILE", help="also write all of them into FILE")


def _add_model(group: _ActionsContainer) -> None:
    group.add_argument("--model", required=True, metavar="NAME", help="such as gpt2-small or llama3-8b")
    size = "a size of it, as in `train`"
    group.add_argument("--size", action="append", default=[], metavar="NAME=VALUE", help=size)


def _model_of(options: Namespace) -> GPTConfig:
    return model_config(options.model).with_sizes(**dict(map(size_of, options.size)))


def _advise(options: Namespace) -> int:
    """Print the layouts for a model; return 1 if none fits."""
    assumed = {name: getattr(options, name) for name in ("gpus_per_node", *_ASSUMED)}
    job, machine = _job(options), Hardware(gpu_named(options.gpu), **assumed)
    most = machine.gpus_per_node if options.max_tp is None else options.max_tp
    advice = advise(job, machine, options.world_size, most)
    listed = advice.fitting + advice.too_large if options.all else advice.fitting[: options.top]
    table = "\n".join([_table(listed), _best(advice, job)])
    text = "\n\n".join([_heading(options, job, machine), table, _others(advice), _assumptions(machine)])
    write_json(options.json, {"job": asdict(job), "machine": asdict(machine), **asdict(advice)})
    print(text)
    return 0 if advice.fitting else 1


def _job(options: Namespace) -> Job:
    model = _model_of(options)
    usual_tokens = min(USUAL_TOKENS, model.max_positions or USUAL_TOKENS)
    return Job(
        model=model,
        tokens=usual_tokens if options.tokens is None else options.tokens,
        batch=max(1, _USUAL_SEQUENCES * options.world_size) if options.batch is None else options.batch,
        micro_batch=options.micro_batch,
        recompute=options.recompute,
        sequence_parallel=options.sequence_parallel,
    )


def _heading(options: Namespace, job: Job, machine: Hardware) -> str:
    parameters = parameters_of_stage(job, RankLayout(1, 1, 1), 0).total
    split = "with" if job.sequence_parallel else "without"
    return (
        f"{options.model}: {parameters / 1e9:.2f} billion parameters in bfloat16 on {options.world_size} x "
        f"{machine.gpu.name}, {machine.gpus_per_node} in a node\n"
        f"a step: {job.batch} sequences of {job.tokens} tokens, {job.micro_batch} at once on a rank, "
        f"{split} sequence parallelism, recompute {job.recompute}"
    )


def _table(predictions: Sequence[Prediction]) -> str:
    if not predictions:
        return "no layout fits"
    names = ["tp", "pp", "dp", "weights", "gradients", "optimizer", "activations", "update", "peak"]
    names += ["compute", "exposed", "bubble", "step"]
    lines = [f"{'':17}{'GB on the fullest GPU':64}seconds of a step"]
    lines.append("".join(f"{name:>{_width(name)}}" for name in names))
    for found in predictions:
        layout, memory, time = found.layout, found.memory, found.time
        cells = [str(size) for size in (layout.tensor, layout.pipeline, layout.data)]
        cells += [f"{size / _GB:.1f}" for size in (*asdict(memory).values(), memory.peak)]
        cells += [f"{seconds:.3f}" for seconds in (*asdict(time).values(), time.total)]
        line = "".join(f"{cell:>{_width(name)}}" for name, cell in zip(names, cells, strict=True))
        remarks = [] if found.fits else [f"lacks {found.excess / _GB:.1f} GB"]
        remarks += [_STAGES] if layout.pipeline > 1 else []
        lines.append("   ".join([line, ", ".join(remarks)]).rstrip())
    return "\n".join(lines)


def _width(name: str) -> int:
    return 5 if len(name) == 2 else max(10, len(name) + 2)


def _best(advice: Advice, job: Job) -> str:
    """Return the best layout that `train` can run; the table has layouts that beat it."""
    flat = [found for found in advice.fitting + advice.too_large if found.layout.pipeline == 1]
    if not flat:
        return "best for `train`: none, because no layout without pipeline stages is possible"
    first = flat[0]
    if first.fits:
        shared = symmetric_memory(job, first.layout.tensor) / _GB
        more = f"\nbeyond its peak: {shared:.1f} GB of symmetric memory, where ranks use it" if shared else ""
        return f"best for `train`: {first.layout}, {first.time.total:.3f} s{more}"
    return (
        f"best for `train`: none, because no layout without pipeline stages fits; {first.layout} lacks "
        f"{first.excess / _GB:.1f} GB"
    )


def _others(advice: Advice) -> str:
    said = [f"fit: {len(advice.fitting)}"]
    if advice.too_large:
        nearest = advice.too_large[0]
        lacks = f"{nearest.layout} lacks {nearest.excess / _GB:.1f} GB, the least"
        said.append(f"do not fit: {len(advice.too_large)}; {lacks}")
    if advice.impossible:
        layout, reason = advice.impossible[0]
        said.append(f"cannot be: {len(advice.impossible)}, such as {layout}: {reason}")
    return "\n".join(said)


def _assumptions(machine: Hardware) -> str:
    gpu = machine.gpu
    return (
        "Predicted from sizes; nothing was measured. Assumed:\n"
        f"  products reach {machine.efficiency:.2f} of {gpu.flops / 1e12:.0f} TFLOPS (--efficiency)\n"
        f"  transfers reach {machine.link_efficiency:.2f} of {gpu.nvlink / _GB:.0f} GB/s in a node and of "
        f"{gpu.network / _GB:.0f} GB/s for each GPU between nodes (--link-efficiency)\n"
        f"  {machine.reserve:.2f} of {gpu.memory / _GB:.0f} GB is left for what is not counted (--reserve)\n"
        "peak: weights, gradients, optimizer, and the larger of activations and what the update needs\n"
        "pp: more than one stage is planned only, `train` does not run it"
    )
