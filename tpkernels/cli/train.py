"""`python -m tpkernels train`: trains a GPT on ranks of this machine, or under torchrun on many machines."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, Literal, TextIO, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from tpkernels.cli import SAID_EVERY, BadUse, Progress, add_number, bad_use_if, size_of, written_to
from tpkernels.errors import cause_of, is_first_to_say
from tpkernels.files import parsed
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.models.config import SMALL, model_config
from tpkernels.training.config import TrainConfig, prepare_folder
from tpkernels.training.launch import exit_in_time, hold_lifeline, run_ranks
from tpkernels.training.measures import Speed, median_step, peak_memory, require_room
from tpkernels.training.session import Session, escape_controls, require_sizes
from tpkernels.training.trainer import StepReport

_DTYPES = ("float32", "bfloat16", "float64")

LOGGED = 20  # lines of losses in a log, evenly over the steps, and one every SAID_EVERY seconds


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="JSON of these options, by name (default: none)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="such as gpt2-small or llama3-8b (default: a small one)"
    )
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a size of the model, such as num_layers=2 (default: its own)",
    )
    add_number(parser, "--tp", "tensor-parallel ranks", 1, least=1)
    add_number(parser, "--dp", "data-parallel ranks; torchrun has its own count", 1, least=1)
    for option in _fields():
        _add(parser, option)
    checkpoints = "checkpoints at the end, and on SIGTERM (default: none)"
    parser.add_argument("--save", type=Path, metavar="FOLDER", help=checkpoints)
    add_number(parser, "--save-every", "and after each N steps; 0: at the end only", 0, least=0)
    last = "go on from the last checkpoint in the folder, if there is one (default: begin)"
    parser.add_argument("--resume", action="store_true", help=last)
    late = "until a rank that is late is given up (default: torch's)"
    parser.add_argument("--timeout", type=_positive, metavar="SECONDS", help=late)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a line for each step (default: none)"
    )
    peak = "of a rank's device, for MFU (default: that of a GPU whose data sheet is known)"
    parser.add_argument("--peak-tflops", type=_positive, metavar="X", help=peak)
    trace = "write a trace of one step of each rank, after warming up (default: none)"
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help=trace)
    page = "write an HTML page about the run, and its curve of losses (default: none)"
    parser.add_argument("--page", type=_page_at, metavar="FILE", help=page)
    add_number(parser, "--sample", "write N more bytes at the end", 0, least=0)
    prompt = "what the sample goes on from (default 'Alice ')"
    parser.add_argument("--prompt", default="Alice ", metavar="TEXT", help=prompt)
    layouts = "run the first N steps overlapped, sequential and unsharded, and compare losses"
    add_number(parser, "--prove", layouts, 0, least=0)
    only = type(parser)(prog=parser.prog, add_help=False)
    only.add_argument("--config", type=Path)
    if (path := only.parse_known_args(words)[0].config) is not None:
        parser.set_defaults(**vars(parser.parse_args(_as_typed(parser, _options_in(path)))))


def main(options: Namespace) -> int:
    _require_options(options)
    if "RANK" in os.environ:  # under torchrun, or as one of our own ranks
        return _as_rank(options)
    with bad_use_if(ValueError, TypeError, ArithmeticError):  # a rank may be ended before it reports
        config = _config(options)
        require_sizes(config, options.tp)
        if not torch.cuda.is_available():  # ranks check GPUs' memory, which this process does not touch
            local = options.tp * options.dp
            require_room(config, options.tp, options.dp, local=local, device=torch.device("cpu"))
    return run_ranks([sys.executable, "-m", "tpkernels", "train", *options.words], options.tp * options.dp)


def _fields() -> list[Field[Any]]:
    """Return the fields of TrainConfig that are options; a model has its own options."""
    return [option for option in fields(TrainConfig) if option.name != "model"]


def _add(parser: ArgumentParser, option: Field[Any]) -> None:
    """Add the option of a field, with its name, type, default and help."""
    kind, default, told = get_type_hints(TrainConfig)[option.name], option.default, option.metadata["help"]
    name = f"--{option.name.replace('_', '-')}"
    given: dict[str, Any] = {"default": default, "help": f"{told} (default {default})"}
    if option.name == "data":
        given = {"metavar": "FILE", "help": f"{told} (required)"}
    elif option.name == "dtype":  # its default depends on the devices
        given = {"choices": _DTYPES, "help": told}
    elif option.name == "fp8":
        given |= {"nargs": "?", "const": "rowwise", "metavar": "RECIPE", "help": f"{told} (default: none)"}
    elif kind is bool and default:
        off = name.replace("--", "--no-", 1)
        given = {"dest": option.name, "action": "store_false", "help": f"{told} (default: do {name[2:]})"}
        name = off
    elif kind is bool:
        given = {"action": "store_true", "help": f"{told} (default: do not)"}
    elif get_origin(kind) is Literal:
        given["choices"] = get_args(kind)
    else:
        given |= {"type": kind, "metavar": "N" if kind is int else "X"}
    parser.add_argument(name, **given)


def _require_options(options: Namespace) -> None:
    """Refuse options that are invalid for any model."""
    if options.data is None:
        raise BadUse("--data: expected a file to learn from")
    if options.prove and (options.dropout or options.resume):
        raise BadUse("--prove: expected a run from the start without dropout: ranks draw different numbers")
    if options.save is None and (options.resume or options.save_every):
        raise BadUse("--resume and --save-every: expected a folder, --save FOLDER")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f"expected more than 0 and less than 1e9, got {text}")
    return value


def _options_in(path: Path) -> dict[str, Any]:
    """Return the options in a file, by name."""
    try:
        given = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadUse(f"--config: {error}") from error
    if not isinstance(given, dict):
        raise BadUse(f"--config: expected an object of options, got {type(given).__name__}")
    return given


def _as_typed(parser: ArgumentParser, given: dict[str, Any]) -> list[str]:
    """Return options of a file as argv, so that they are checked in the same way."""
    known = {name: action for action in parser._actions for name in action.option_strings}
    typed = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if option not in known or option in ("--config", "--help"):
            raise BadUse(f"--config: {name}: there is no such option")
        action = known[option]
        values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
        if isinstance(value, bool):
            is_valid = action.nargs in (0, "?")
        else:
            is_valid = action.nargs != 0 and all(type(one) in (str, int, float) for one in values)
        if not is_valid:
            wanted = "true or false" if action.nargs == 0 else "a value"
            raise BadUse(f"--config: {name}: expected {wanted}, got {json.dumps(value)}")
        typed += [option] * value if isinstance(value, bool) else [f"{option}={one}" for one in values]
    return typed


def _page_at(text: str) -> Path:
    """Return the path of a page, and make its folder; refuse it before the run if not writable."""
    try:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"cannot write to {text!r}") from error
    return written_to(text)


def _as_rank(options: Namespace) -> int:
    hold_lifeline()
    exit_in_time()
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
        text = escape_controls(f"{type(error).__name__}: {cause_of(error)}")
        if is_first_to_say(text):  # often all ranks have the same error
            sys.stderr.write(f"python -m tpkernels train: rank {os.environ['RANK']}: {text}\n")
        ours = isinstance(error, RuntimeError | MemoryError) and not isinstance(error, InvalidSizes)
        return 1 if is_prepared or ours else 2
    finally:
        if session is not None:
            session.close()
        elif dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _config(options: Namespace) -> TrainConfig:
    sizes = dict(size_of(text) for text in options.size)
    model = model_config(options.model, **sizes) if options.model else SMALL.with_sizes(**sizes)
    given = {option.name: getattr(options, option.name) for option in _fields()}
    usual = "bfloat16" if torch.cuda.is_available() else "float32"
    return TrainConfig(model=model, **{**given, "dtype": getattr(torch, options.dtype or usual)})


def _prepare(session: Session, options: Namespace) -> TextIO | None:
    """Check the run before the first step; return the first rank's file for lines, if any."""
    if options.prove:
        session.require_proof()
    if options.sample:
        session.require_sample(options.prompt, options.sample)
    if options.save is not None:
        prepare_folder(options.save, resume=options.resume)
    session.say(session.describe())
    if options.resume:
        session.resume(options.save)
    return session.lines(options.json) if options.json else None


def _run(session: Session, options: Namespace, lines: TextIO | None) -> None:
    reports = _steps(session, options, lines)
    if not reports:
        session.say(f"all {session.config.steps} steps were done before")
        return
    session.say(session.summary(reports))
    if session.was_asked_to_stop:
        return
    proof = session.prove([report.loss for report in reports[: options.prove]]) if options.prove else None
    sample = session.sample(options.prompt, options.sample) if options.sample else ""
    if sample:
        session.say(f"\n{sample}")
    if options.page and session.rank == 0:
        picture = session.write_page(options.page, reports, proof, sample)
        if proof:
            session.say(f"\n  proof     {proof}")
        session.say(f"  page      {options.page}\n  picture   {picture}")


def _steps(session: Session, options: Namespace, lines: TextIO | None) -> list[StepReport]:
    """Run the steps, with a line of JSON for each; print speed and memory, without a terminal losses, too."""
    config, speed = session.config, Speed.of_run(session.config, session.device, options.peak_tflops)
    profile = session.profile(options.profile) if options.profile else None
    reports: list[StepReport] = []
    is_log, told = not sys.stdout.isatty(), time.monotonic()
    with Progress("training", config.steps) as progress, lines or nullcontext():
        for report in session.steps(options.save, options.save_every):
            reports.append(report)
            if session.rank == 0:
                left = (config.steps - report.step) * report.seconds
                tokens = report.tokens / report.seconds
                said = f"loss {report.loss:.3f}, {tokens:,.0f} tokens/s, {left:.0f} s left"
                progress(said)
                due = report.step % max(1, config.steps // LOGGED) == 0 or len(reports) == 1
                if is_log and (due or time.monotonic() - told >= SAID_EVERY):
                    told = time.monotonic()
                    session.say(f"step {report.step}/{config.steps}: {said}")
            if lines is not None:
                line: dict[str, Any] = {**asdict(report), **speed.of(report)}
                if report.step == config.steps:
                    line["peak_memory"] = peak_memory(session.device)
                lines.write(json.dumps(line) + "\n")
                lines.flush()
    if reports:
        session.say(speed.line(median_step(reports)))
        session.say(f"peak memory of a rank: {peak_memory(session.device) / 2**20:,.0f} MiB")
        if profile is not None:
            session.say(profile.outcome())
    return reports
