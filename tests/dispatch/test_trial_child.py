"""What a child process does in a trial, on the CPU: kernels in the interpreter, right and wrong ones."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from io import StringIO
from math import gcd

import pytest
import torch

from tests import forks
from tests.dispatch.conftest import CPU, need_interpreter
from tpkernels.dispatch import trial_child as module
from tpkernels.dispatch.candidates import TARGET_GPUS, candidates
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer
from tpkernels.dispatch.trial import trial
from tpkernels.dispatch.trial_child import fault, opened
from tpkernels.dispatch.variant import Variant, sizes_for
from tpkernels.kernels import dgrad as dgrad_kernel
from tpkernels.kernels import linear as linear_kernel
from tpkernels.kernels.target import B200, H100
from tpkernels.kernels.tiles import MatmulTile

TILE = "32x32x32-w4-s1-p2-g2"
DGRAD = Variant("dgrad", "bfloat16", (), "descriptor", TILE)
EPILOGUES = [
    ("linear", ("gelu_tanh", "bias", "z")),
    ("linear", ("none", "z")),
    ("glu", ("swiglu", "gu")),
    ("dgrad", ()),
    ("dgrad_act", ("gelu", "db")),
    ("dglu", ("geglu",)),
    ("dgrad_pairs", ()),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    need_interpreter()
    monkeypatch.setattr(module, "RUNS", 2)


@pytest.mark.parametrize(("step", "options"), EPILOGUES, ids=str)
def test_kernels_that_are_right_have_no_fault(step, options, monkeypatch):
    monkeypatch.setattr(module, "RUNS", 1)
    stages = []
    assert fault(Variant(step, "bfloat16", options, "descriptor", TILE), CPU, stages.append) is None
    assert stages == ["compiling", *["compiling", "running"] * 3]


BIG = Layer(8192, 4096, 4096, activation="gelu_tanh")
LAYERS = [
    replace(BIG, activation=activation, glu=glu, bias=bias, training=training, dtype=dtype)
    for activation, glu in (("none", "swiglu"), ("silu", "geglu"), ("gelu_tanh", "geglu_tanh"))
    for bias in (True, False)
    for training in (True, False)
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("step", [name for name in PRODUCTS if name != "wgrad_accumulate_"])
def test_samples_pose_the_problem_that_a_variant_is_of(step):
    """Of every epilogue: what is tried is compiled as what will run."""
    record = PRODUCTS[step]
    tile = MatmulTile(128, 256, 64, num_warps=8, num_stages=3, parts=4, consumers=1)
    for layer in LAYERS:
        problem = record.problem(*record.sample(layer))
        ours = next(c for c in candidates(record, problem, TARGET_GPUS["h100"]) if c.form == "descriptor")
        variant = Variant.of(problem, replace(ours, tile=tile))
        assert Variant.from_json(json.loads(json.dumps(variant.as_json()))) == variant
        assert variant.candidate.tile == tile
        samples = variant.samples(H100)
        assert len(samples) == 3
        for arguments in samples.values():
            posed = record.problem(*arguments)
            assert (posed.step, posed.dtype, posed.options) == (step, layer.dtype, problem.options)
            assert [layout.tma_obstacle() for layout in posed.layouts] == [None] * len(posed.layouts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_add_to_gradients_of_the_dtype_that_a_variant_is_of(dtype):
    record = PRODUCTS["wgrad_accumulate_"]
    main_grad, dy, x = record.sample(LAYERS[0])
    problem = record.problem(main_grad.to(dtype), dy, x)
    ours = next(c for c in candidates(record, problem, TARGET_GPUS["b200"]) if c.form == "descriptor")
    for arguments in Variant.of(problem, ours).samples(B200).values():
        assert record.problem(*arguments).options == problem.options


def test_two_pairs_differ_in_depth():
    samples = Variant("dgrad_pairs", "bfloat16", (), "descriptor", "128x128x64-w4-s4-p4-c2").samples(H100)
    depths = {name: (dy.shape[1], dy2.shape[1]) for name, (dy, _, dy2, _) in samples.items()}
    assert depths == {"a single tile": (64, 64), "full tiles": (576, 512), "ragged tiles": (568, 504)}
    for dy, weight, dy2, weight2 in samples.values():
        assert (dy.shape[1], dy2.shape[1]) == (weight.shape[0], weight2.shape[0])
        assert (dy.shape[0], weight.shape[1]) == (dy2.shape[0], weight2.shape[1])


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("per_processor", [1, 2])
def test_sizes_take_a_kernel_through_all_that_it_can_meet(consumers, per_processor):
    cols = 256 // consumers
    tile = MatmulTile(128, cols, 64, 8, 4, per_processor=per_processor, consumers=consumers)
    sizes = sizes_for(tile, H100, unit=8)
    single = sizes.pop("a single tile")
    assert tile.tiles(*single[:2]) == 1
    assert single[2] // tile.block_depth < tile.num_stages
    for rows, columns, depth in sizes.values():
        of_a_program, more = divmod(tile.tiles(rows, columns), H100.processors * per_processor)
        assert of_a_program >= 3
        assert of_a_program // consumers >= 2
        assert more, "some program gets another one"
        steps = -(-depth // tile.block_depth)
        assert steps > 2 * tile.num_stages
        assert gcd(steps, tile.num_stages) == 1, "tiles begin with each of the buffers"
        assert rows * columns * 2 <= 60e6  # bytes of a result: a child is to be small
    rows, columns, depth = sizes["ragged tiles"]
    assert (rows % 128, columns % cols, depth % 64) == (120, cols - 8, 56)
    assert {size % 16 for size in sizes["full tiles"]} == {0}


def breaking(monkeypatch, module, name, spoil):
    """Has a launcher spoil what it has written: its results, and how they were before."""
    real = getattr(module, name)

    def broken(*given, out, **named):
        before = [one.clone() for one in out]
        real(*given, out=out, **named)
        spoil(out, before)
        return out

    monkeypatch.setattr(module, name, broken)


def fault_of(variant=DGRAD):
    return fault(variant, CPU, lambda stage: None)


def test_a_tile_that_is_never_written_is_seen(monkeypatch):
    """Though the memory may hold what an earlier run has left there, which is right."""
    runs = []

    def leave_out(out, before):
        if runs:
            out[0][:16, :16] = before[0][:16, :16]
        runs.append(out)

    breaking(monkeypatch, dgrad_kernel, "dgrad", leave_out)
    assert fault_of().startswith("a single tile: result 0 is off by nan of itself")


def test_an_error_in_one_run_of_the_largest_is_seen(monkeypatch):
    runs = []

    def spoil(out, before):
        runs.append(out)
        if len(runs) == 4:
            out[0][-16:, -16:] = 0

    breaking(monkeypatch, dgrad_kernel, "dgrad", spoil)
    assert fault_of().startswith("full tiles: result 0 is off")
    assert len(runs) == 4


def test_each_result_is_looked_at(monkeypatch):
    breaking(monkeypatch, linear_kernel, "linear_fwd", lambda out, before: out[1].zero_())
    variant = Variant("linear", "bfloat16", ("gelu", "bias", "z"), "descriptor", TILE)
    assert fault_of(variant).startswith("a single tile: result 1 is off")


def told(monkeypatch, asked, capfd):
    """The lines of a child with this stdin, in this process."""
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps(asked)))
    monkeypatch.setattr(module.signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(module.os, "dup2", lambda source, target: None)
    module.main()
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def asked_for(*variants, device="cpu", uuid=None):
    variants = [variant.as_json() for variant in variants]
    return {"device": device, "uuid": uuid, "seconds": 9, "variants": variants}


ERRORS = {  # raised by a kernel, and by the next synchronization: the outcome, and whether the child goes on
    "compile": (RuntimeError("out of resource: shared memory"), None, "wrong", True),
    "memory": (torch.OutOfMemoryError("CUDA out of memory"), None, "untried", False),
    "memory of Triton": (RuntimeError("Triton Error [CUDA]: out of memory"), None, "untried", False),
    "memory of cuBLAS": (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), None, "untried", False),
    "disk": (OSError("No space left on device"), None, "untried", False),
    "context": (RuntimeError("CUDA error: an illegal access\nmore"), RuntimeError("still"), "crashed", False),
}


@pytest.mark.parametrize(("raised", "afterwards", "outcome", "goes_on"), ERRORS.values(), ids=ERRORS.keys())
def test_what_raises_is_told_and_ends_a_child_whose_context_is_lost(
    raised, afterwards, outcome, goes_on, monkeypatch, capfd
):
    lost = []

    def fails(*given, **named):
        lost.append(afterwards)
        raise raised

    def wait(device):
        if lost and lost[-1]:
            raise lost[-1]

    monkeypatch.setattr(dgrad_kernel, "dgrad", fails)
    monkeypatch.setattr(module, "_wait", wait)
    lines = told(monkeypatch, asked_for(DGRAD, DGRAD), capfd)
    outcomes = [line for line in lines if "outcome" in line]
    said = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    assert outcomes[0] == {"number": 0, "outcome": outcome, "said": said}
    assert [line["number"] for line in outcomes] == [0, 1][: 1 + goes_on]


def test_a_device_that_is_not_there_is_told(monkeypatch, capfd):
    (line,) = told(monkeypatch, asked_for(DGRAD, device="cuda:0", uuid="abc"), capfd)
    assert "it sees no GPU abc, only none" in line["cannot"]


def test_the_device_is_found_by_its_uuid(monkeypatch):
    """The parent may have set CUDA_VISIBLE_DEVICES after it looked at it."""
    uuids = ["a", "b", "b"]

    class Properties:
        def __init__(self, i):
            self.uuid = uuids[i]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda size, device: None)
    found = [opened(name, uuid).index for name, uuid in (("cuda:0", "a"), ("cuda:2", "b"), ("cuda:9", "a"))]
    assert found == [0, 2, 0]
    assert opened("cuda:0", "b").index == 1
    with pytest.raises(RuntimeError, match="it sees no GPU c, only a, b, b"):
        opened("cuda:1", "c")


def test_a_real_child_tries_and_tells(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["whatever"])
    other = replace(DGRAD, tile="32x32x32-w4-s1-p2-g4")
    report = trial([DGRAD, replace(DGRAD, step="dgrad_none"), other], CPU)
    assert report.verdicts[DGRAD].outcome == "passed"
    assert report.verdicts[other].outcome == "passed"
    assert report.verdicts[replace(DGRAD, step="dgrad_none")].said == "KeyError: 'dgrad_none'"
    assert report.obstacle == ""


def test_a_child_whose_parent_is_gone_ends_itself(monkeypatch):
    """By a signal that its parent's thread had blocked, while it waits for a device."""
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps({**asked_for(), "seconds": 1})))
    monkeypatch.setattr(module, "SLACK_SECONDS", 0)
    monkeypatch.setattr(module, "opened", lambda *given: time.sleep(600))

    def child():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        module.main()

    process, reader = forks._begun(child)
    _, status = os.waitpid(process, 0)
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGALRM
