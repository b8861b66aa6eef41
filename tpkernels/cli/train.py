"""`python -m tpkernels train`: trains a GPT on ranks of this machine, or under torchrun on many machines."""

from __future__ import annotations

import json
import os
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, Literal, TextIO, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from tpkernels.cli import SAID_EVERY, BadUse, Progress, add_number, bad_use_if, size_of
from tpkernels.errors import cause_of, is_first_to_say
from tpkernels.files import parsed
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.models.config import SMALL, model_config
from tpkernels.training.config import TrainConfig, prepare_folder
from tpkernels.training.launch import exit_in_time, hold_lifeline, run_ranks
from tpkernels.training.measures import Speed, largest_memory, median_step, require_room
from tpkernels.training.session import Session, escape_controls, require_sizes

_DTYPES = ("float32", "bfloat16", "float64")


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
    add_number(parser, "--tp", "tensor-parallel ranks", 1)
    add_number(parser, "--dp", "data-parallel ranks; torchrun has its own count", 1)
    for option in _fields():
        _add(parser, option)
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="checkpoints at the end, and on SIGTERM (default: none)"
    )
    add_number(parser, "--save-every", "and after each N steps; 0: at the end only", 0, least=0)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in the folder, if there is one (default: begin)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="until a rank that is late is given up (default: torch's)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a line for each step (default: none)"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="of a rank's device, for MFU (default: that of a GPU whose data sheet is known)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="write a trace of one step of each rank (default: none)",
    )
    add_number(parser, "--profile-step", "of this one (default: one after warming up)")
    parser.add_argument(
        "--page",
        type=_page_at,
        metavar="FILE",
        help="write an HTML page about the run, and pictures (default: none)",
    )
    add_number(parser, "--sample", "write N more bytes at the end", 0, least=0)
    parser.add_argument(
        "--prompt", default="Alice ", metavar="TEXT", help="what the sample goes on from (default 'Alice ')"
    )
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
    usual = f"{told} (default {default})"
    if option.name == "data":
        parser.add_argument(name, metavar="FILE", help=f"{told} (required)")
    elif option.name == "dtype":  # its default depends on the devices
        parser.add_argument(name, choices=_DTYPES, help=told)
    elif option.name == "fp8":
        parser.add_argument(
            name,
            nargs="?",
            const="rowwise",
            default=default,
            metavar="RECIPE",
            help=f"{told} (default: none)",
        )
    elif kind is bool and default:
        off = name.replace("--", "--no-", 1)
        parser.add_argument(
            off, dest=option.name, action="store_false", help=f"{told} (default: do {name[2:]})"
        )
    elif kind is bool:
        parser.add_argument(name, action="store_true", help=f"{told} (default: do not)")
    elif get_origin(kind) is Literal:
        parser.add_argument(name, choices=get_args(kind), default=default, help=usual)
    else:
        metavar = "N" if kind is int else "X"
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=usual)


def _require_options(options: Namespace) -> None:
    """Refuse options that are invalid for any model."""
    if options.tp < 1 or options.dp < 1:
        raise BadUse(f"--tp and --dp: expected at least one rank each, got {options.tp} and {options.dp}")
    if options.data is None:
        raise BadUse("--data: expected a file to learn from")
    if options.prove and (options.dropout or options.resume):
        raise BadUse("--prove: expected a run from the start without dropout: ranks draw different numbers")
    for name in ("timeout", "peak_tflops"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e9:
            raise BadUse(f"--{name.replace('_', '-')}: expected more than 0 and less than 1e9, got {value}")
    if options.profile is None and options.profile_step is not None:
        raise BadUse("--profile-step: expected a folder, --profile FOLDER")
    if options.save is None and (options.resume or options.save_every):
        raise BadUse("--resume and --save-every: expected a folder, --save FOLDER")


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
    """Return options of a file as words of a command line, so that they are checked in the same way."""
    known = {name: action for action in parser._actions for name in action.option_strings}
    typed = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if option not in known or option in ("--config", "--help"):
            raise BadUse(f"--config: {name}: there is no such option")
        if not _is_value_of(known[option], value):
            wanted = "true or false" if known[option].nargs == 0 else "a value"
            raise BadUse(f"--config: {name}: expected {wanted}, got {json.dumps(value)}")
        if isinstance(value, bool):
            typed += [option] * value
        else:
            typed += [f"{option}={one}" for one in (value if isinstance(value, list) else [value])]
    return typed


def _is_value_of(action: Action, value: Any) -> bool:
    """Whether an option takes the value: a flag takes a boolean, a repeatable option also a list."""
    if action.nargs == 0 or (action.nargs == "?" and isinstance(value, bool)):
        return isinstance(value, bool)
    values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
    return all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values)


def _page_at(text: str) -> Path:
    """Return the path of a file whose folder may be missing; refuse it before the run if not writable."""
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"cannot write to {text!r}")
    return Path(text)


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
    config = session.config
    speed = Speed.of_run(config, session.device, options.peak_tflops)
    profile = session.profile(options.profile, options.profile_step) if options.profile is not None else None
    reports = []
    is_profiled = profile is not None and profile.step == config.steps  # a step has one profiler at most
    record_last = options.page is not None and not is_profiled
    with Progress("training", config.steps, seconds=SAID_EVERY) as progress:
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
    proof = session.prove([report.loss for report in reports[: options.prove]]) if options.prove else None
    sample = session.sample(options.prompt, options.sample) if options.sample else ""
    if sample:
        session.say(f"\n{sample}")
    if options.page and session.rank == 0:
        pictures = session.write_page(options.page, reports, proof, sample)
        session.say(f"\n  run       {session.summary(reports)}")
        if proof:
            session.say(f"  proof     {proof}")
        session.say(f"  page      {options.page}\n  pictures  {pictures}")
