"""`python -m tpkernels train`: a GPT over the ranks of this machine, or under torchrun over those of many."""

from __future__ import annotations

import json
import os
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO, cast

from tpkernels.cli import OneLineParser
from tpkernels.cli.progress import Progress
from tpkernels.cli.sizes import size_of
from tpkernels.files import parsed

_DTYPES = ("float32", "bfloat16", "float64")
# Learns English in a minute on two cores.
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "activation": "swiglu",
    "norm": "rms_norm",
    "bias": False,
    "tied": False,
}


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = _with_config(parser, argv)
    if options.tp < 1 or options.dp < 1:
        parser.error(f"--tp and --dp: expected at least one rank each, got {options.tp} and {options.dp}")
    if "RANK" in os.environ:  # under torchrun, or as one of our own ranks
        return _as_rank(parser, options)
    try:
        _require_room(_config(options), options)
    except (ValueError, TypeError, ArithmeticError) as error:  # a rank may be ended before it has said so
        parser.error(str(error))
    from tpkernels.training.launch import run_ranks

    return run_ranks([sys.executable, "-m", "tpkernels", "train", *argv], options.tp * options.dp)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m tpkernels train",
        description="Train a GPT. Starts its ranks itself, unless it runs under torchrun.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON of these options, by name")
    parser.add_argument("--data", metavar="FILE", help="any text, or ids: .bin (16 bits), .bin32")
    parser.add_argument(
        "--model", metavar="NAME", help="such as gpt2-small or llama3-8b; default: a small one"
    )
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a size of the model, such as num_layers=2",
    )
    sizes = {"steps": 200, "batch": 16, "tokens": 128, "accumulate": 1, "warmup": 10, "seed": 1234}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    rates = {"peak-rate": 2e-3, "floor-rate": 2e-4, "weight-decay": 0.1, "max-norm": 1.0, "dropout": 0.0}
    for name, rate in rates.items():
        parser.add_argument(f"--{name}", type=float, default=rate, metavar="X")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument(
        "--dp", type=int, default=1, metavar="N", help="data-parallel ranks; torchrun's own count"
    )
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--no-overlap", dest="overlap", action="store_false")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: bfloat16 on GPUs, float32 on the CPU")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="checkpoints: at the end, and on SIGTERM")
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="and after each N steps")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in the folder, if there is one"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="until a rank that is late is given up; default: torch's",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a line for each step")
    parser.add_argument(
        "--peak-tflops", type=float, metavar="X", help="of a rank's device, for MFU; known of some GPUs"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="write a trace of one step of each rank"
    )
    parser.add_argument(
        "--profile-step", type=int, metavar="N", help="of this one; default: one after warming up"
    )
    parser.add_argument(
        "--page", type=_page_at, metavar="FILE", help="write an HTML page about the run, and pictures"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="write N more bytes at the end")
    parser.add_argument("--prompt", default="Alice ", metavar="TEXT", help="what the sample goes on from")
    parser.add_argument(
        "--prove",
        type=int,
        default=0,
        metavar="N",
        help="run N steps unsharded and blocking, too, and compare losses",
    )
    return parser


def _with_config(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Options; those on the command line go before those in the file."""
    options = parser.parse_args(argv)
    if options.config is not None:
        try:
            given = parsed(options.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            parser.error(f"--config: {error}")
        if not isinstance(given, dict):
            parser.error(f"--config: expected an object of options, got {type(given).__name__}")
        options = parser.parse_args([*_as_typed(parser, given), *argv])
    if options.data is None:
        parser.error("--data: expected a file to learn from")
    if options.prove and (options.dropout or options.resume):
        parser.error("--prove: expected a run from the start without dropout, which ranks draw apart")
    for name in ("save_every", "sample", "prove"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')}: expected 0 or more, got {getattr(options, name)}")
    for name in ("timeout", "peak_tflops"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e9:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0 and less than 1e9, got {value}")
    if options.profile is None and options.profile_step is not None:
        parser.error("--profile-step: expected a folder, --profile FOLDER")
    if options.save is None and (options.resume or options.save_every):
        parser.error("--resume and --save-every: expected a folder, --save FOLDER")
    return options


def _as_typed(parser: ArgumentParser, given: dict[str, Any]) -> list[str]:
    """Options of a file as somebody would have typed them, so that they are looked at alike."""
    known = {name: action for action in parser._actions for name in action.option_strings}
    typed = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if option not in known or option in ("--config", "--help"):
            parser.error(f"--config: {name}: there is no such option")
        if not _is_value_of(known[option], value):
            wanted = "true or false" if known[option].nargs == 0 else "a value"
            parser.error(f"--config: {name}: expected {wanted}, got {json.dumps(value)}")
        if isinstance(value, bool):
            typed += [option] * value
        else:
            typed += [f"{option}={one}" for one in (value if isinstance(value, list) else [value])]
    return typed


def _is_value_of(action: Action, value: Any) -> bool:
    """A flag is true or false; only an option that may be typed several times takes a list."""
    if action.nargs == 0:
        return isinstance(value, bool)
    values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
    return all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values)


def _page_at(text: str) -> Path:
    """A file to write, whose folder may have to be made: refused before the run, not after it."""
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"cannot write to {text!r}")
    return Path(text)


def _as_rank(parser: OneLineParser, options: Namespace) -> int:
    import torch.distributed as dist

    from tpkernels.training.launch import hold_lifeline
    from tpkernels.training.session import Session, is_first_to_say, shown

    hold_lifeline()
    session = None
    is_prepared = False
    try:
        session = Session(
            _config(options), options.tp, saves=options.save is not None, timeout=options.timeout
        )
        lines = _prepare(session, options)
        is_prepared = True
        _run(session, options, lines)
    except (ValueError, TypeError, ArithmeticError, OSError, RuntimeError, MemoryError) as error:
        text = shown(f"{type(error).__name__}: {error}")
        if is_first_to_say(text):  # often all ranks find the same
            sys.stderr.write(f"{parser.prog}: rank {os.environ['RANK']}: {text}\n")
        of_user = not is_prepared and not isinstance(error, RuntimeError | MemoryError)
        return 2 if of_user else 1
    finally:
        if session is not None:
            session.close()
        elif dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _config(options: Namespace) -> Any:
    import torch

    from tpkernels.models.config import GPTConfig, model_config
    from tpkernels.training.trainer import TrainConfig

    sizes = dict(size_of(text) for text in options.size)
    model = model_config(options.model, **sizes) if options.model else GPTConfig(**SMALL).with_sizes(**sizes)
    usual = "bfloat16" if torch.cuda.is_available() else "float32"
    names = (
        "data steps batch tokens accumulate peak_rate floor_rate warmup weight_decay max_norm dropout seed "
        "recompute sequence_parallel overlap"
    )
    return TrainConfig(
        model=model,
        dtype=getattr(torch, options.dtype or usual),
        **{name: getattr(options, name) for name in names.split()},
    )


def _require_room(config: Any, options: Namespace) -> None:
    """On a CPU; ranks look at GPUs, which this process leaves alone."""
    import torch

    from tpkernels.training.capacity import require_room

    if not torch.cuda.is_available():
        local = options.tp * options.dp
        require_room(config, options.tp, options.dp, local=local, device=torch.device("cpu"))


def _prepare(session: Any, options: Namespace) -> TextIO | None:
    """All that can be refused before the first step; where the first rank writes lines."""
    from tpkernels.training.folder import prepare

    if options.prove:
        session.require_proof()
    if options.sample:
        session.require_sample(options.prompt, options.sample)
    if options.save is not None:
        prepare(options.save, resume=options.resume)
    session.say(session.describe())
    if options.resume:
        session.resume(options.save)
    return cast("TextIO | None", session.lines(options.json)) if options.json else None


def _run(session: Any, options: Namespace, lines: TextIO | None) -> None:
    from tpkernels.training.flops import Speed, median_step
    from tpkernels.training.memory import largest_memory

    config = session.config
    speed = Speed.of_run(config, session.device, options.peak_tflops)
    profile = _profile(session, options) if options.profile is not None else None
    reports = []
    is_profiled = profile is not None and profile.step == config.steps  # a step has one profiler at most
    record_last = options.page is not None and not is_profiled
    with Progress("training", config.steps) as progress:
        for report in session.steps(options.save, options.save_every, record_last=record_last):
            reports.append(report)
            memory = largest_memory(session.trainer) if report.step == config.steps else None
            if session.rank == 0:
                tokens = report.tokens / report.seconds
                left = (config.steps - report.step) * report.seconds
                progress(f"loss {report.loss:.3f}, {tokens:,.0f} tokens/s, {left:.0f} s left")
                if lines is not None:
                    line = {**asdict(report), **speed.of(report)}
                    if memory is not None:
                        line["memory"] = memory.as_dict()
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
    if lines is not None:
        lines.close()
    if not reports:
        session.say(f"all {config.steps} steps were done before")
        return
    session.say(session.summary(reports))
    session.say(speed.line(median_step(reports)))
    session.say(largest_memory(session.trainer).line())
    if profile is not None and profile.comes:
        session.say(profile.outcome())
    if session.was_asked_to_stop:
        return
    proof = _prove(session, [report.loss for report in reports[: options.prove]]) if options.prove else ""
    sample = session.sample(options.prompt, options.sample) if options.sample else ""
    if sample:
        session.say(f"\n{sample}")
    if options.page and session.rank == 0:
        pictures = session.write_page(options.page, reports, sample)
        session.say(f"\n  run       {session.summary(reports)}")
        if proof:
            session.say(f"  proof     {proof}")
        session.say(f"  page      {options.page}\n  pictures  {pictures}")


def _profile(session: Any, options: Namespace) -> Any:
    """Of one of the steps that are to come, or a word that it is none of these."""
    from tpkernels.training.profile import StepProfile

    trainer = session.trainer
    profile = trainer.around = StepProfile(
        options.profile,
        session.rank,
        done=trainer.done,
        steps=session.config.steps,
        step=options.profile_step,
    )
    if not profile.comes:
        session.say(profile.outcome())
    return profile


def _prove(session: Any, losses: Sequence[float]) -> str:
    """Print losses side by side; an error if they differ by more than rounding, else a line that says so."""
    count = len(losses)
    blocking = session.losses(
        count, replace(session.config, overlap=not session.config.overlap), session.tensor
    )
    alone = session.losses(count, replace(session.config, sequence_parallel=False), 1)
    session.say(f"\n  step  {session.tensor} ranks      the other overlap  unsharded")
    worst = 0.0
    for step, row in enumerate(zip(losses, blocking, alone, strict=True), start=1):
        session.say(f"  {step:<4}  " + "  ".join(f"{loss:<15.7f}" for loss in row))
        worst = max(worst, *(abs(other - row[0]) / abs(row[0]) for other in row[1:]))
    session.say(f"  largest difference {worst:.1e} of the loss; allowed {session.tolerance:.0e}")
    if not worst <= session.tolerance:
        raise RuntimeError(
            f"sharded and unsharded losses differ by {worst:.1e}, expected {session.tolerance:.0e}"
        )
    return f"losses of {count} steps agree with an unsharded run's within {worst:.0e}"
