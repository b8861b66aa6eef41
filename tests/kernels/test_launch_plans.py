"""Plans of launchers: a later call does what the first has done, and a key lacks nothing."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels.checks import LAYOUTS, normal
from tests.segments import in_op
from tpkernels.dispatch import gates, norms, products, scaled, vocabulary  # noqa: F401  # fill RECORDS
from tpkernels.dispatch.primitives import RECORDS
from tpkernels.dispatch.record import Layer
from tpkernels.kernels import invariance, launch, launch_plans
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.flags import advance
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.scatter_linear import scatter_linear
from tpkernels.kernels.target import A100, B200, H100, Target
from tpkernels.kernels.tiles import ORDERED_SUM
from tpkernels.kernels.waits import Arrivals, Departures

Call = Callable[[], object]  # of a launcher, with operands that are made anew
BF16 = Layer(512, 256, 128)
LAYERS = (
    BF16,
    replace(BF16, activation="gelu"),
    replace(BF16, activation="gelu", training=False),
    replace(BF16, bias=False, glu="geglu"),
    replace(BF16, tokens=2048),
    replace(BF16, tokens=1),
    replace(BF16, dtype=torch.float32),
    replace(BF16, scaling="blocks", format="e5m2"),
)
AWKWARD = ("transposed", "padded_rows", "odd_pitch", "misaligned")
LAID: dict[str, Callable[[Tensor], Tensor]] = {"contiguous": lambda matrix: matrix}
LAID |= {name: LAYOUTS[name] for name in AWKWARD}


def calls() -> dict[str, Call]:
    """All primitives, on layers that have their options, in each layout; and what moves between ranks."""
    found: dict[str, Call] = {}
    for (name, record), (number, layer) in product(RECORDS.items(), enumerate(LAYERS)):
        for way in LAID if layer is BF16 else ["contiguous"]:
            found[f"{name} {number} {way}"] = partial(_call, record, layer, LAID[way])
    words, table = partial(_meta, dtype=torch.int32), partial(_meta, dtype=torch.int64)

    def gather(chunks: int, first_row: int, margin: int, turned: bool) -> object:
        here = Arrivals(words(chunks), words(1), words(1), margin)
        wait = {"arrivals": here, "first_row": first_row, "margin": margin}
        x = _meta(512, 128)
        return dgrad(x, _meta(128, 256), **wait) if turned else linear_fwd(x, _meta(256, 128), **wait)

    def scatter(rank: int, pairs: int, splits: int) -> object:
        given = tuple((_meta(512, 128), _meta(256, 128)) for _ in range(pairs))
        there = Departures(table(4), table(4), words(4 * splits), words(1))
        return scatter_linear(given, departures=there, ranks=4, rank=rank, splits=splits)

    def reduce(bias: bool, margin: int, tree: bool) -> object:
        return reduce_slots(_meta(4, 128, 256), _meta(256) if bias else None, margin=margin, tree=tree)

    def count(step: int) -> object:
        return advance(words(1), words(1), step, 3)

    of_both = (False, True)
    moving = {gather: ((4, 8), (0, 256), (0, 16), of_both), scatter: ((0, 1), (1, 2), (1, 2))}
    moving |= {reduce: (of_both, (0, 16), of_both), count: ((1, 2),)}
    for call, options in moving.items():
        for given in product(*options):
            found[f"{call.__name__} {given}"] = partial(call, *given)
    return found


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _call(record: Any, layer: Layer, laid: Callable[[Tensor], Tensor]) -> object:
    given = [
        laid(each) if isinstance(each, Tensor) and each.ndim == 2 else each for each in record.sample(layer)
    ]
    return record.by_kernel(*given)


@contextmanager
def set_to(target: Target, left=0, tf32=False, batch=False, tp=0) -> Iterator[None]:
    """On this GPU, with these settings."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision, torch._C._get_sm_carveout_experimental()
    with pytest.MonkeyPatch.context() as patch, in_op(tp):
        patch.setattr(invariance, "batch_invariant", batch)
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
        torch._C._set_sm_carveout_experimental(left)
        try:
            yield
        finally:
            matmul.fp32_precision = before[0]
            torch._C._set_sm_carveout_experimental(before[1])


def all_plans() -> list[Any]:
    return [found for plans in launch_plans._plans for found in plans.values()]


SETTINGS: list[dict[str, Any]] = [
    {"target": H100},
    {"target": A100},
    {"target": B200},
    {"target": H100, "left": 16},
    {"target": H100, "tf32": True},
    {"target": H100, "batch": True},
    {"target": H100, "tp": 8},
]


def outcome(call: Call, target: Target) -> tuple[list[Any], object]:
    """What it launches and returns, or why it does not."""
    with launch.recording(target) as launches:
        try:
            result = _described(call())
        except (ValueError, TypeError) as error:
            return [], str(error)
    return [
        (each.kernel, each.grid, {name: _described(one) for name, one in each.named.items()})
        for each in launches
    ], result


def _described(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr()
    if isinstance(value, tuple):
        return [_described(each) for each in value]
    if isinstance(base := getattr(value, "base", None), Tensor):
        return _described(base), value.shape, value.strides, value.block_shape
    return value


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_later_call_does_what_the_first_has_done(settings):
    with set_to(**settings):
        for name, call in calls().items():
            anew, observed, repeated = (outcome(call, settings["target"]) for _ in range(3))
            assert anew == observed == repeated, name


def test_no_key_lacks_what_a_launcher_looks_at(monkeypatch):
    """Every call under every setting, in a random order: were two of one key not alike, that would raise."""
    monkeypatch.setattr(launch_plans, "debug", True)
    mixed = [(settings, name) for settings in SETTINGS for name in calls()]
    random.Random(20261126).shuffle(mixed)
    made = calls()
    for settings, name in mixed:
        with set_to(**settings):
            outcome(made[name], settings["target"])


def test_each_primitive_has_a_plan():
    """Beside one that sorts."""
    without = set()
    for name, record in RECORDS.items():
        launch_plans.forget()
        with launch.recording(H100):
            for _ in range(2):
                record.by_kernel(*record.sample(BF16))
        found = all_plans()  # of launchers that it calls, too
        if not any(isinstance(each, tuple) for each in found) or launch_plans._NEVER in found:
            without.add(name)
    assert without == {"lookup_grad"}


def test_no_plan_has_an_address(monkeypatch):
    """On the meta device all are 0: here operands have memory, each time other."""
    monkeypatch.setattr(launch_plans, "debug", True)
    started: list[object] = []
    memory = partial(torch.zeros_like, device="cpu")
    with launch.emulation(H100, lambda kernel, grid: lambda *arguments, **_: started.append(kernel)):
        for record in RECORDS.values():
            made = [tree_map_only(Tensor, memory, record.sample(BF16)) for _ in range(3)]
            for given in made:
                record.by_kernel(*given)
    assert len(started) >= 3 * len(RECORDS)


hidden = 1


@planned
def _reads_what_no_key_has(x: Tensor) -> Tensor:
    return launch.empty((hidden,), x.dtype, x.device)


def test_a_key_that_lacks_something_is_an_error_when_debugging(monkeypatch):
    monkeypatch.setattr(launch_plans, "debug", True)
    _reads_what_no_key_has(torch.empty(1))
    monkeypatch.setitem(globals(), "hidden", 2)
    with pytest.raises(AssertionError, match="_reads_what_no_key_has: the key of its plan lacks something"):
        _reads_what_no_key_has(torch.empty(1))


@planned
def _adds(x: Tensor) -> Tensor:
    return x + 1


@planned
def _reads_a_number(x: Tensor) -> Tensor:
    return launch.empty((int(x[0]),), x.dtype, x.device)


class Held(NamedTuple):
    tensor: Tensor


@dataclass(frozen=True)
class Hidden:
    tensor: Tensor


@planned
def _wrapped(x: Tensor, kind: type[Any]) -> Any:
    return kind(x)


@planned
def _first_of(x: Tensor, y: Tensor) -> Tensor:
    return x


def test_what_no_plan_can_repeat_is_done_each_time():
    for number in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((1,), number)
        assert torch.equal(_adds(x), x + 1)
        assert _reads_a_number(x).shape == (number,)
        assert _wrapped(x, Hidden).tensor is x
        assert _unwrapped(Hidden(x)) is x
        assert _of_nobody(x) is TABLE
    assert set(all_plans()) == {launch_plans._NEVER}


@planned
def _unwrapped(hidden: Hidden) -> Tensor:
    return hidden.tensor


TABLE = torch.zeros(1)


@planned
def _of_nobody(x: Tensor) -> Tensor:
    return TABLE


@planned
def _named(x: Tensor, *, rows: int = 1, cols: int = 1) -> Tensor:
    return launch.empty((rows, cols), x.dtype, x.device)


def test_equal_values_of_other_options_are_another_kind():
    for _ in range(3):
        assert _named(TABLE, rows=2).shape == (2, 1)
        assert _named(TABLE, cols=2).shape == (1, 2)


def test_the_first_call_of_a_kind_is_not_observed():
    """Where lengths vary, most kinds come once."""
    _named(TABLE)
    assert all_plans() == [launch_plans._ONCE]


@pytest.mark.parametrize("debug", [False, True])
def test_a_tensor_that_is_given_twice_is_another_kind(debug, monkeypatch):
    monkeypatch.setattr(launch_plans, "debug", debug)
    x, y, z = torch.zeros(3, 1).unbind()
    for _ in range(3):
        assert _first_of(x, x) is x
        assert _first_of(y, z) is y


def test_launchers_refuse_what_no_key_can_describe():
    """By the errors of the launcher itself."""
    x, weight = _meta(512, 128), _meta(256, 128)
    endless: list[Any] = []
    endless.append(endless)
    hostile: list[dict[str, Any]] = [
        {"activation": "\ud800"},
        {"out": endless},
        {"out": [[[weakref.proxy(x)]]]},
        {"tile": 2**70},
    ]
    with launch.recording(H100):
        for options in hostile:
            refusals = []
            for call in (linear_fwd, linear_fwd.__wrapped__):
                try:
                    call(x, weight, **options)
                except (ValueError, TypeError, AttributeError) as error:
                    refusals.append((type(error), str(error)))
            assert len(refusals) == 2, options
            assert refusals[0] == refusals[1], options


def test_a_call_with_a_tile_of_its_own_has_a_plan():
    with launch.recording(H100):
        for _ in range(2):
            bias_grad(_meta(512, 128), tile=ORDERED_SUM)
            linear_fwd(_meta(512, 128), _meta(256, 128), tile=MatmulTile(64, 64, 64, 4, 2))
    assert [type(found) for found in all_plans()] == [tuple, tuple]


def test_too_many_kinds_are_dropped_and_learned_again(monkeypatch):
    monkeypatch.setattr(launch_plans, "MOST_PLANS", 4)
    for size in range(9):
        for _ in range(3):
            _first_of(torch.zeros(size), torch.zeros(size))
        assert len(all_plans()) <= 4
        assert isinstance(all_plans()[-1], tuple)


def test_a_plan_holds_no_tensors():
    x, weight = _meta(512, 128), _meta(256, 128)
    with launch.recording(H100) as launches:
        for _ in range(3):
            dead = ref(linear_fwd(x, weight).y), ref(x), ref(weight)
        launches.clear()
    del x, weight
    gc.collect()
    assert [each() for each in dead] == [None] * 3


def test_results_in_memory_of_operands_are_refused_every_time(device):
    x, weight = normal(32, 32, torch.float32, device), normal(32, 32, torch.float32, device)
    apart = torch.empty_like(x)
    for _ in range(3):
        linear_fwd(x, weight, out=apart)
        for out in (x, x[:], weight[:]):  # all of one kind, but for where they lie
            with pytest.raises(ValueError, match="linear_fwd: expected y of out with memory of its own"):
                linear_fwd(x, weight, out=out)


def test_operands_with_lazy_negation_are_read_as_numbers(device):
    """Their memory holds others, of the kind of operands that a plan is there for; each call has its own."""
    for _ in range(3):
        x, weight, bias = (normal(*shape, torch.float32, device) for shape in ((48, 32), (40, 32), (1, 40)))
        wanted = linear_fwd(x, weight, bias[0]).y
        torch.testing.assert_close(wanted, x @ weight.t() + bias, rtol=1e-5, atol=1e-5)
        x, weight, bias = (torch._neg_view(-each) for each in (x, weight, bias))
        assert torch.equal(linear_fwd(x, weight, bias=bias[0]).y, wanted)
        assert torch.equal(reduce_slots(x[None]), x)


@planned
def _weight_of(pairs: tuple[Held, ...]) -> Tensor:
    return pairs[0].tensor


def test_lazy_negation_is_resolved_in_tuples():
    x = torch.ones(2)
    for _ in range(3):
        assert not _weight_of((Held(x),)).is_neg()
        found = _weight_of((Held(torch._neg_view(x)),))
        assert torch.equal(found, -x)
        assert not found.is_neg()


Started = tuple[tuple[int, int, int], int, object, tuple[Any, ...]]  # grid, stream, function, arguments


class _Driver:
    """An H100's: loads what Triton compiles, and notes what it would launch."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.utils = self

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def start(x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
            self.started.append(((x, y, z), stream, function, rest[4:]))  # behind metadata and hooks

        return start

    def load_binary(self, name: str, *_: object) -> tuple[object, str, int, int, int]:
        return object(), name, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": H100.shared_memory}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(H100.backend, H100.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


_driver = _Driver()  # one: what Triton has compiled stays bound to its launcher


@contextmanager
def starting() -> Iterator[list[Started]]:
    """Launchers on the CPU start kernels as on an H100; lists what reaches Triton's launcher."""
    before = driver._active  # `reset_active` would look for a GPU
    driver.set_active(_driver)
    _driver.started.clear()
    launch_plans.forget()  # none of another driver's
    try:
        with launch.emulation(H100, lambda kernel, grid: kernel[grid]):
            yield _driver.started
    finally:
        driver.set_active(before)
        launch_plans.forget()


def _started(cache: str) -> list[tuple[Any, ...]]:
    """What reaches Triton's launcher in three calls, where kernels are compiled; operands by name."""
    found = []
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        looks = Mock(wraps=triton.runtime.jit.JITFunction.run)  # of Triton at the arguments
        patch.setattr(
            triton.runtime.jit.JITFunction, "run", lambda *given, **options: looks(*given, **options)
        )
        stack.enter_context(triton.knobs.cache.scope())
        started = stack.enter_context(starting())
        triton.knobs.cache.dir = cache
        tile = MatmulTile(64, 64, 64, num_warps=4, num_stages=2)
        for _ in range(3):
            x, weight = torch.empty(128, 64, dtype=torch.bfloat16), torch.empty(256, 64, dtype=torch.bfloat16)
            y = linear_fwd(x, weight, activation="relu", tile=tile, form="descriptor").y
            named = {each.data_ptr(): name for each, name in ((x, "x"), (weight, "weight"), (y, "y"))}
            (launched,) = started
            started.clear()
            found.append((*launched[:3], [_all_of(each, named) for each in launched[3]]))
    assert looks.call_count == 2, "the third call starts what was compiled"
    return found


def _all_of(argument: Any, named: dict[int, str]) -> object:
    if isinstance(argument, Tensor):
        return named[argument.data_ptr()]
    if hasattr(argument, "base"):
        return {**vars(argument), "base": named[argument.base.data_ptr()]}
    return repr(argument)


def test_a_plan_starts_what_triton_has_compiled_with_the_same_arguments(compiler):
    anew, observed, repeated = compiler.run(_started, str(compiler.cache / "triton"))
    assert anew == observed == repeated
    assert anew[1] == 7
    assert "x" in str(anew[3])
