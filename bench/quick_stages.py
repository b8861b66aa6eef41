"""`python -m bench.quick_stages STAGE ...`: a part of a stage of `make gpu`, in a process of its own.

Each result is written as soon as it is there. With --rehearse a CPU stands in for the GPU: few cases of tiny
sizes take the same way through this file.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from bench.device import Cuda, Device, StandIn, revision
from bench.stages import RESULTS, Result, Status, results_in
from tpkernels.gate.ahead_of_time import nvidia_facts
from tpkernels.gate.child import one_line_error
from tpkernels.gate.workers import results_of
from tpkernels.kernels.target import H100, Target

if TYPE_CHECKING:
    import pytest

    from bench.case import Case
    from bench.shapes import Shape
    from tpkernels.cli.tune import PrimitiveCall
    from tpkernels.gate.numerics import NumericCase
    from tpkernels.kernels.operands import Form
    from tpkernels.reserved_sms import ProductLibrary

MODEL, TOKENS, TENSOR_SIZES = "llama3-8b", 4096, (8, 1)
# several tiles of a kernel and some rows; on a CPU the interpreter's tiles are small
GPU_SIZES: Mapping[Form, tuple[int, int, int]] = {"descriptor": (520, 776, 584), "pointer": (519, 773, 581)}
# tokens, width, features, parts; the transfer in parts of the product's time
LINKS = [((8192, 4096, 8192, parts), ratio) for parts in (4, 8, 2) for ratio in (1.0, 0.3)]
REHEARSED_LINKS = [((64, 32, 32, 2), 1.0)]
REHEARSED_LAUNCHERS = ("advance", "linear_fwd")
REHEARSED_CASES = 2  # of a launcher, and of a model
REHEARSED_CALL = "segment_sum/descriptor/bf16/none/one"  # launches a kernel twice
CALLS, ROUNDS = 200, 15  # of a host's time: fewer calls than a GPU's queue takes
OP_ROUNDS = 11
NCU_KERNELS = "_linear_fwd_kernel|_glu_fwd_kernel|_wgrad_kernel"
NCU_SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy")
RESOURCES = ("registers", "spills", "stack", "shared", "in_flight", "threads", "blocks")
DIED = "the compiler died"


@dataclass(frozen=True)
class Found:
    """What is said of a case."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    skipped: str = ""  # why there is nothing

    def write(self, stage: str, began: float, out: Path) -> None:
        """Write the line. began: a time of the monotonic clock"""
        status: Status = "failed" if self.error else "skipped" if self.skipped else "passed"
        seconds, said = round(time.monotonic() - began, 4), self.error or self.skipped
        Result(stage, self.name, status, seconds, _finite(self.values), said).write(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("stage")
    parser.add_argument("words", nargs=REMAINDER)
    options = parser.parse_args(argv)
    if options.stage not in STAGES:
        return run_tests(options.stage, options.words, options.out)
    os.environ.pop("TRITON_INTERPRET", None)
    if options.rehearse and options.stage not in COMPILING:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    device, failed, began = StandIn() if options.rehearse else Cuda(), False, time.monotonic()
    for found in STAGES[options.stage](device, options.out, *options.words):
        found.write(options.stage, began, options.out)
        failed, began = failed or bool(found.error), time.monotonic()
    return 1 if failed else 0


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def attempted(name: str, measure: Callable[[], Mapping[str, Any]]) -> Found:
    """What was measured, or why it could not be."""
    try:
        return Found(name, measure())
    except Exception as error:  # any error is a result
        return Found(name, error=one_line_error(error))


def run_tests(stage: str, words: Sequence[str], out: Path) -> int:
    """Tests, with a line of each."""
    import pytest

    class Reporting:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when != "call" and report.passed:
                return
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            name = report.nodeid if report.when != "teardown" else f"{report.nodeid} (teardown)"
            status: Status = "failed" if report.failed else "skipped" if report.skipped else "passed"
            Result(stage, name, status, round(report.duration, 4), {}, text[-2000:]).write(out)

    return pytest.main(["-q", "-p", "no:cacheprovider", *words], plugins=[Reporting()])


def build(device: Device, out: Path, command: str) -> Iterator[Found]:
    """The machine; then a line of each call whose kernels are compiled, into Triton's own cache."""
    # in a process of its own: this one forks, which a process that has used the GPU cannot
    (facts,) = results_of(_facts, [device], 1, lambda _: None, None)
    if facts is None:
        raise RuntimeError("the process that asked for the machine died")
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    yield Found("machine", facts | {"command": command, "date": date, "revision": revision()})
    target = Target(**facts["target"])
    names = list(compiled_calls(target, device.name))
    yield from in_processes("build", partial(_keys, target, device.name), names, out)


def in_processes(
    stage: str, work: Callable[[str], Mapping[str, Any]], names: Sequence[str], out: Path
) -> Iterator[Found]:
    """A process for each core writes the lines of what it does; then there is one of how many failed."""
    written = partial(_written, stage, work, out)
    errors = results_of(written, names, os.cpu_count() or 1, lambda _: None, DIED)
    yield from (Found(name, error=error) for name, error in zip(names, errors, strict=True) if error == DIED)
    failed = sum(map(bool, errors))
    yield Found("all", {"count": len(names)}, f"{failed} of {len(names)} failed" * bool(failed))


def _written(stage: str, work: Callable[[str], Mapping[str, Any]], out: Path, name: str) -> str:
    began = time.monotonic()
    found = attempted(name, partial(work, name))
    found.write(stage, began, out)
    return found.error


def _facts(device: Device) -> dict[str, Any]:
    return device.facts() | {"stands_in": device.name == "cpu", "target": asdict(device.compiled_for)}


def numeric_cases(device: str, target: Target) -> list[NumericCase]:
    """The gate's cases, of sizes for the device, that the target can run."""
    from tpkernels.cli.qualify_ranks import runs_on
    from tpkernels.registered.numeric_cases import SIZES, cases

    sizes = SIZES if device == "cpu" else GPU_SIZES
    return [case for case in cases(sizes) if runs_on(case, target)]


def launcher_names() -> list[str]:
    return sorted({case.name.partition("/")[0] for case in numeric_cases("cuda", H100)})


def model_calls(device: str, tensor: int) -> list[PrimitiveCall]:
    """The products of a model's step on one of so many ranks."""
    from tpkernels.cli.tune import SplitModel
    from tpkernels.cli.tune import model_calls as calls_of
    from tpkernels.dispatch.products import PRODUCTS
    from tpkernels.dispatch.record import Layer

    if device == "cpu":
        records = islice(PRODUCTS.values(), REHEARSED_CASES)
        return [(record, record.sample(Layer(64, 32, 32))) for record in records]
    return list(calls_of(SplitModel(MODEL, tensor, TOKENS), torch.bfloat16, True))


@cache
def compiled_calls(target: Target, device: str) -> Mapping[str, Callable[[], object]]:
    """Calls on the meta device by name: the numeric cases, and candidates of what is timed."""
    from tpkernels.dispatch.candidates import candidates, tune_key
    from tpkernels.dispatch.products import PRODUCTS
    from tpkernels.dispatch.record import Layer

    calls: dict[str, Callable[[], object]] = {case.name: case.run for case in numeric_cases("cuda", target)}
    timed = [call for tensor in TENSOR_SIZES for call in model_calls("cuda", tensor)]
    tiny = Layer(4, 16, 16, torch.float32)  # as in `host_time`
    timed += [(PRODUCTS[name], PRODUCTS[name].sample(tiny)) for name in ("linear", "dgrad", "wgrad")]
    for record, arguments in timed:
        key = tune_key(record, *arguments)
        for one in candidates(record, key, target):
            if one.tile is not None:  # of other shapes it is the same kernel
                name = "/".join((record.name, *key.options, one.name))
                calls.setdefault(name, partial(one.run, *arguments))
    return {name: calls[name] for name in (REHEARSED_CALL, list(calls)[-1])} if device == "cpu" else calls


class _CompilingDriver:
    """Of a GPU that is asked for nothing: Triton compiles for it."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(target: Target, device: str, name: str) -> list[Any]:
    """What Triton makes of the launches of a call, under the keys of the launches themselves."""
    from triton.runtime import driver

    from tpkernels.kernels import launch
    from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS

    driver.set_active(_CompilingDriver(target))
    with launch.recording(target) as launches, torch.device("meta"):
        compiled_calls(target, device)[name]()
    return [
        one.kernel.warmup(*one.arguments, grid=one.grid, **one.constants, **LAUNCH_OPTIONS)
        for one in launches
    ]


def _keys(target: Target, device: str, name: str) -> Mapping[str, Any]:
    return {"kernels": [one.hash for one in compiled(target, device, name)]}


def registers(device: Device, out: Path, what: str) -> Iterator[Found]:
    """What each kernel that was compiled takes of an SM; or what ncu says of three."""
    if what == "ncu":
        yield from _ncu(out, device.name == "cpu")
    else:
        yield from _resources_of_all(out, device.name)


def _resources_of_all(out: Path, device: str) -> Iterator[Found]:
    lines = {one.name: one.values for one in results_in(out / RESULTS) if one.stage == "build"}
    if "machine" not in lines:
        yield Found("all", skipped="stage build has compiled nothing")
        return
    first: dict[str, str] = {}  # of a kernel that several calls launch
    for name, values in lines.items():
        for kernel in values.get("kernels", ()):
            first.setdefault(kernel, name)
    target = Target(**lines["machine"]["target"])
    compiled_calls(target, device)  # made once, before processes are forked
    names = [f"{name} {kernel}" for kernel, name in first.items()]
    yield from in_processes("registers", partial(_resources, target, device), names, out)


def _resources(target: Target, device: str, name: str) -> Mapping[str, Any]:
    call, _, kernel = name.partition(" ")
    one = next(one for one in compiled(target, device, call) if one.hash == kernel)
    facts = nvidia_facts(one, 0.0, f"sm_{target.capability}").as_json()
    return {"kernel": one.name} | {field: facts[field] for field in RESOURCES}


def _ncu(out: Path, rehearse: bool) -> Iterator[Found]:
    tool = shutil.which("ncu")
    if tool is None:
        yield Found("ncu", skipped="ncu is not on the PATH; it comes with the CUDA toolkit")
        return
    sections = [word for section in NCU_SECTIONS for word in ("--section", section)]
    asked = ["--csv", "--page", "details", *sections, "--kernel-name", f"regex:{NCU_KERNELS}"]
    program = [sys.executable, "-m", "bench.quick_stages", *["--rehearse"] * rehearse, "--out", str(out)]
    command = [tool, *asked, "--launch-count", "3", *program, "launches"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    kernels: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(line for line in ran.stdout.splitlines() if line.startswith('"')):
        said = kernels.setdefault(row["Kernel Name"], {})
        said[f"{row['Metric Name']} {row['Metric Unit']}".strip()] = row["Metric Value"]
    for name, said in kernels.items():
        yield Found(f"ncu {name}", said)
    if not kernels:
        yield Found("ncu", error=f"exit code {ran.returncode}: {ran.stdout[-500:].strip()}")


def launches(device: Device, out: Path) -> Iterator[Found]:
    """Launches of the kernels that ncu looks at; of them there is nothing to say."""
    from tpkernels.kernels.glu import glu_fwd
    from tpkernels.kernels.linear import linear_fwd
    from tpkernels.kernels.wgrad import wgrad

    tokens, out_features, in_features = (64, 32, 32) if device.name == "cpu" else (TOKENS, 1792, 4096)
    make = partial(torch.randn, device=device.name, dtype=torch.bfloat16)
    x, gate, up = make(tokens, in_features), make(out_features, in_features), make(out_features, in_features)
    y = linear_fwd(x, up).y
    glu_fwd(x, gate, up)
    wgrad(y, x)
    device.synchronize()
    yield from ()


def launchers(device: Device, out: Path, launcher: str) -> Iterator[Found]:
    """The cases of a launcher, against float64, in frames of NaN."""
    from tpkernels.gate.numerics import Frames, examine
    from tpkernels.registered.numeric_cases import prepare

    chosen = [one for one in numeric_cases(device.name, device.target) if one.name.split("/")[0] == launcher]
    frames = Frames()
    prepare(frames)
    torch.manual_seed(0)
    with torch.device(device.name):
        for case in chosen[: REHEARSED_CASES if device.name == "cpu" else None]:
            done = examine(case, frames)
            yield Found(case.name, {"of_bound": done.error}, done.failure)
    if not chosen:
        yield Found(launcher, skipped="this GPU can run none of its cases")


def reserved_sms(device: Device, out: Path) -> Iterator[Found]:
    """Of each library: whether its products leave reserved SMs to others. The answers are kept."""
    from tpkernels import reserved_sms as kept
    from tpkernels.cli.sm_probe import answer_of

    gpu = device.probed()
    obeys: dict[ProductLibrary, bool] = {}
    for library in gpu.libraries:
        answer = answer_of(gpu, library)
        obeys[library] = answer.obeys
        yield Found(library, asdict(answer))
    if device.name == "cuda":
        kept.keep(torch.cuda.get_device_name(), obeys)


def products(device: Device, out: Path, what: str) -> Iterator[Found]:
    """what: a tensor-parallel size, whose products are timed, torch's and ours; or "ops" """
    if what == "ops":
        yield from _ops(device)
        return
    from tpkernels.dispatch.autotune import Autotuner
    from tpkernels.dispatch.cache import Cache, versions_for
    from tpkernels.dispatch.candidates import tune_key
    from tpkernels.dispatch.timing import Timeable, Times, time_on
    from tpkernels.files import cache_folder

    kept: list[Times] = []

    def timer(runs: Mapping[str, Timeable]) -> Times:
        kept.append(time_on(device.stream, runs))
        return kept[-1]

    on_gpu = device.name == "cuda"
    where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    versions = versions_for(torch.cuda.get_device_name(where) if on_gpu else "cpu")
    tuner = Autotuner(where, device.target, timer, Cache(cache_folder() if on_gpu else None, versions))

    def timed(*call: Any) -> Mapping[str, Any]:
        kept.clear()
        request = tuner.request(*call)
        choice, key = tuner.timed(request), request.key
        if not kept or not kept[0].captured:
            raise RuntimeError(choice.source)
        flops = 2 * key.tokens * key.out_features * key.in_features * (2 if key.kernel == "glu" else 1)
        times = kept[0]
        return {
            "step": key.step,
            "dtype": str(key.dtype).removeprefix("torch."),
            "tensor": int(what),
            "flops": flops,
            "ms": times.captured,
            "ms_eager": times.eager,
            "tflops": {name: flops / ms * 1e-9 for name, ms in times.captured.items()},
            "chosen": choice.captured or choice.name,
            "dropped": [name for name in request.candidates if name not in times.captured],
            "company": times.company,
        }

    for name, call in {
        str(tune_key(one[0], *one[1])): one for one in model_calls(device.name, int(what))
    }.items():
        yield attempted(f"tp{what} {name}", partial(timed, *call))


def _ops(device: Device) -> Iterator[Found]:
    """MLPs with all gradients, in bf16; then linear layers in fp8, whose operands are quantized each time."""
    from bench.cases import linear, scaled
    from bench.shapes import MODELS, SMOKE, shapes_of

    layers = [one for tensor in TENSOR_SIZES for one in shapes_of(MODELS[0], tensor, TOKENS)]
    if device.name == "cpu":
        layers = shapes_of(SMOKE, 1, 64)[2:3]
    for shape in layers:
        if shape.layer == "fc_up":
            yield attempted(f"{shape} mlp", partial(_op, device, linear.case_of, shape, "mlp"))
    for shape in layers:
        yield attempted(f"{shape} fp8", partial(_op, device, scaled.case_of, shape, "forward"))


def _op(device: Device, case_of: Callable[..., Case], shape: Shape, pass_: str) -> Mapping[str, Any]:
    case = case_of(shape, pass_, torch.bfloat16, device.name)
    ways = {name: way for name, way in case.ways.items() if name != "compiled"}  # which takes too long
    seconds = replace(case, ways=ways).time(OP_ROUNDS if device.name == "cuda" else 2)
    ms, flops = {name: 1e3 * median(taken) for name, taken in seconds.items()}, case.work.flops
    assert flops is not None
    return {
        "step": case.work.op,
        "dtype": "bfloat16" if pass_ == "mlp" else "fp8",
        "tensor": shape.tensor,
        "flops": flops,
        "ms": ms,
        "tflops": {name: flops / one * 1e-9 for name, one in ms.items()},
    }


def overlap(device: Device, out: Path) -> Iterator[Found]:
    """What hides of a transfer over the emulated link."""
    from bench.cases.overlap import measure, problem

    for sizes, ratio in REHEARSED_LINKS if device.name == "cpu" else LINKS:
        name = f"{'x'.join(map(str, sizes[:3]))} in {sizes[3]} parts, transfer {ratio:g} of the product"
        found = attempted(name, partial(measure, device, *sizes, ratio))
        if device.name == "cuda" and not found.error:  # a CPU hides nothing, and says nothing
            found = replace(found, error=problem(dict(found.values)))
        yield found


def host_time(device: Device, out: Path) -> Iterator[Found]:
    """Microseconds of the host for a call on tiny operands, eager and replayed."""
    from bench.cases.host_cost import PASSES, ways

    calls, rounds = (CALLS, ROUNDS) if device.name == "cuda" else (2, 2)

    def microseconds(way: Callable[[], object]) -> float:
        taken = []
        for _ in range(rounds):
            device.synchronize()  # a queue that is full would be waited for
            began = time.perf_counter()
            for _ in range(calls):
                way()
            taken.append(1e6 * (time.perf_counter() - began) / calls)
        return median(taken)

    def measured(way: Callable[[], object], captured: bool) -> Mapping[str, Any]:
        for _ in range(3):
            way()
        device.synchronize()
        return {"us": microseconds(device.capture(way) if captured else way), "calls": calls * rounds}

    for pass_, captured in product(PASSES, (False, True)):
        with torch.set_grad_enabled(pass_ != "inference"):
            for whose, way in ways(pass_, device.name).items():
                name = f"{pass_} {whose} {'captured' if captured else 'eager'}"
                yield attempted(name, partial(measured, way, captured))


STAGES: Mapping[str, Callable[..., Iterator[Found]]] = {
    one.__name__: one
    for one in (build, launchers, reserved_sms, products, overlap, host_time, registers, launches)
}
COMPILING = ("build", "registers")


if __name__ == "__main__":
    sys.exit(main())
