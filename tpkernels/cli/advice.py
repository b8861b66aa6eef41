"""`python -m tpkernels plan --model NAME`: which layout of ranks suits a model, as a table."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from tpkernels.cli import OneLineParser, require_ranks, size_of
from tpkernels.gpus import gpu_named
from tpkernels.models.config import model_config
from tpkernels.planning.advice import Advice, Prediction, advise
from tpkernels.planning.job import Job, Layout
from tpkernels.planning.machine import Machine
from tpkernels.planning.parameters import parameters_of_stage

_USUAL_TOKENS = 8192  # where the model has no fewer positions
_USUAL_SEQUENCES = 8  # of a step, for each GPU: every number of data-parallel ranks divides them
_ASSUMED = {
    "efficiency": "of the peak rate, that products reach",
    "link_efficiency": "of links, that transfers reach",
    "reserve": "of memory, that is left for what is not counted",
}
_USUAL = {field.name: field.default for field in fields(Machine)}
_GB = 1e9


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        require_ranks("--gpus", options.gpus)
        job, machine = _job(options), _machine(options)
        most = machine.gpus_per_node if options.max_tp is None else options.max_tp
        advice = advise(job, machine, options.gpus, most)
        text = "\n\n".join(
            [
                _heading(options, job, machine),
                _table(_listed(options, advice)),
                _others(options, advice),
                _assumptions(machine) + _without_stages(advice),
            ]
        )
        if options.json is not None:
            options.json.write_text(_as_json(options, job, machine, advice), encoding="utf-8")
        print(text)
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        parser.error(str(error))
    return 0 if advice.fitting else 1


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m tpkernels plan",
        description="Predict memory and time of each layout of ranks for a model. Needs no GPU.",
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="such as gpt2-small or llama3-8b")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=VALUE", help="a size of it, as in `train`"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (default), h200 or a100")
    nodes = _USUAL["gpus_per_node"]
    parser.add_argument("--gpus-per-node", type=int, default=nodes, metavar="N", help=f"default {nodes}")
    parser.add_argument(
        "--max-tp", type=int, metavar="N", help="most tensor-parallel ranks (default: those of a node)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help=f"in a sequence (default {_USUAL_TOKENS})")
    parser.add_argument(
        "--batch", type=int, metavar="N", help=f"sequences a step (default {_USUAL_SEQUENCES} for each GPU)"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=1, metavar="N", help="sequences that a rank computes at once"
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--no-sequence-parallel", dest="sequence_parallel", action="store_false")
    for name, meaning in _ASSUMED.items():
        usual = _USUAL[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=usual,
            metavar="X",
            help=f"{meaning} (default {usual})",
        )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many to list (default 10)")
    parser.add_argument("--all", action="store_true", help="list all, those that do not fit as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of them into FILE")
    return parser


def _job(options: Namespace) -> Job:
    model = model_config(options.model).with_sizes(**dict(size_of(text) for text in options.size))
    if options.top < 1:
        raise ValueError(f"--top: expected at least 1, got {options.top}")
    usual_tokens = min(_USUAL_TOKENS, model.max_positions or _USUAL_TOKENS)
    return Job(
        model=model,
        tokens=usual_tokens if options.tokens is None else options.tokens,
        batch=max(1, _USUAL_SEQUENCES * options.gpus) if options.batch is None else options.batch,
        micro_batch=options.micro_batch,
        recompute=options.recompute,
        sequence_parallel=options.sequence_parallel,
    )


def _machine(options: Namespace) -> Machine:
    names = ["gpus_per_node", *_ASSUMED]
    return Machine(gpu_named(options.gpu), **{name: getattr(options, name) for name in names})


def _heading(options: Namespace, job: Job, machine: Machine) -> str:
    parameters = parameters_of_stage(job, Layout(1, 1, 1), 0).total
    split = "with" if job.sequence_parallel else "without"
    return (
        f"{options.model}: {parameters / 1e9:.2f} billion parameters in bfloat16 on {options.gpus} x "
        f"{machine.gpu.name}, {machine.gpus_per_node} in a node\n"
        f"a step: {job.batch} sequences of {job.tokens} tokens, {job.micro_batch} at once on a rank, "
        f"{split} sequence parallelism, recompute {job.recompute}"
    )


def _listed(options: Namespace, advice: Advice) -> list[Prediction]:
    return advice.fitting + advice.too_large if options.all else advice.fitting[: options.top]


def _table(predictions: Sequence[Prediction]) -> str:
    if not predictions:
        return "no layout fits"
    lines = [
        f"{'':17}{'GB on the fullest GPU':<60}  seconds of a step",
        f"{'tp':>4}{'pp':>5}{'dp':>5}"
        f"{'weights':>10}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'update':>8}{'peak':>7}   "
        f"{'compute':>9}{'exposed':>9}{'bubble':>9}{'step':>9}",
    ]
    for found in predictions:
        layout, memory, time = found.layout, found.memory, found.time
        line = f"{layout.tensor:4}{layout.pipeline:5}{layout.data:5}"
        held = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.update)
        for size, width in zip((*held, memory.peak), (10, 11, 11, 13, 8, 7), strict=True):
            line += f"{size / _GB:{width}.1f}"
        line += "   " + "".join(
            f"{seconds:9.3f}" for seconds in (time.compute, time.exposed, time.bubble, time.total)
        )
        lines.append(line if found.fits else f"{line}   lacks {found.excess / _GB:.1f} GB")
    return "\n".join(lines)


def _others(options: Namespace, advice: Advice) -> str:
    said = []
    hidden = 0 if options.all else max(0, len(advice.fitting) - options.top)
    if hidden:
        said.append(f"{hidden} more fit (--top {len(advice.fitting)})")
    if advice.too_large:
        nearest = advice.too_large[0]
        said.append(
            f"{len(advice.too_large)} do not fit, of which {nearest.layout} lacks least: "
            f"{nearest.excess / _GB:.1f} GB"
        )
    if advice.impossible:
        layout, reason = advice.impossible[0]
        said.append(f"{len(advice.impossible)} cannot be, such as {layout}: {reason}")
    return "\n".join(said) or "all layouts fit"


def _assumptions(machine: Machine) -> str:
    gpu = machine.gpu
    return (
        "Predicted from sizes; nothing was measured. Assumed:\n"
        f"  products reach {machine.efficiency:.2f} of {gpu.flops / 1e12:.0f} TFLOPS (--efficiency)\n"
        f"  transfers reach {machine.link_efficiency:.2f} of {gpu.nvlink / _GB:.0f} GB/s in a node and of "
        f"{gpu.network / _GB:.0f} GB/s for each GPU between nodes (--link-efficiency)\n"
        f"  {machine.reserve:.2f} of {gpu.memory / _GB:.0f} GB is left for what is not counted (--reserve)\n"
        "peak: weights, gradients, optimizer, and the larger of activations and what the update needs\n"
        "pp: groups are planned, the trainer does not run it"
    )


def _without_stages(advice: Advice) -> str:
    """The best that the trainer can run, where the best of all has stages."""
    if advice.fitting and advice.fitting[0].layout.pipeline == 1:
        return ""
    flat = [found for found in advice.fitting + advice.too_large if found.layout.pipeline == 1]
    if not flat:
        return ""
    best = flat[0]
    how = f"{best.time.total:.3f} s" if best.fits else f"which lacks {best.excess / _GB:.1f} GB"
    return f"; best without: {best.layout}, {how}"


def _as_json(options: Namespace, job: Job, machine: Machine, advice: Advice) -> str:
    report = {
        "model": options.model,
        "gpus": options.gpus,
        "job": asdict(job),
        "machine": asdict(machine),
        "layouts": [found.as_dict() for found in advice.fitting + advice.too_large],
        "impossible": [{"layout": asdict(layout), "reason": reason} for layout, reason in advice.impossible],
    }
    return json.dumps(report, indent=1) + "\n"
