"""How a choice is made, remembered, refused and logged, in eager and in compiled calls."""

import logging
from dataclasses import replace
from functools import wraps
from threading import Thread
from time import sleep

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from tests.dispatch.conftest import CPU, TRITON_WINS, FakeTimer, call, known, timed
from tpkernels.dispatch import autotune as autotune_module
from tpkernels.dispatch import backends, log, primitives, products
from tpkernels.dispatch import candidates as candidates_module
from tpkernels.dispatch.autotune import CHECKING_SECONDS, why_not_now, winner
from tpkernels.dispatch.cache import Choice
from tpkernels.dispatch.candidates import tune_key
from tpkernels.dispatch.checking import poison_freed
from tpkernels.kernels import linear as linear_kernel
from tpkernels.kernels.tiles import MatmulTile

X, W, B = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48)
ARGUMENTS = (X, W, B, "none", False)
LINEAR = (products.linear, *ARGUMENTS)
KEY = "linear float32 16x48x32 none+bias rows,rows,rows"
POINTER = "triton/pointer/32x32x32-w4-s1-p2-g2"


def test_fastest_is_chosen_and_remembered(make_tuner):
    timer = FakeTimer(TRITON_WINS)
    tuner = make_tuner(timer)
    for _ in range(3):
        y, z = call(tuner, *LINEAR)
        torch.testing.assert_close(y, products.linear.by_torch(*ARGUMENTS)[0])
        assert z is None
    assert timer.asked == [["torch", POINTER]]
    assert known(tuner, *LINEAR).name == POINTER


def test_tf32_allowed_later_is_another_choice(make_tuner):
    timer = FakeTimer(TRITON_WINS)
    tuner = make_tuner(timer)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            call(tuner, *LINEAR)
            call(tuner, products.linear, *ARGUMENTS, out=[torch.empty(16, 48)])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(timer.asked) == 2
    assert list(tuner.cache.choices) == [KEY, KEY.replace("float32", "float32/tf32")]


def test_memory_is_bounded_and_forgotten_choices_are_not_timed_again(make_tuner, monkeypatch):
    monkeypatch.setattr(autotune_module, "MOST_REMEMBERED", 3)
    timer = FakeTimer({"": 1.0})
    tuner = make_tuner(timer)
    for rows in (*range(9, 17), *range(9, 17)):
        call(tuner, products.linear, X[:rows], *ARGUMENTS[1:])
        assert len(tuner._ways) <= 3
    assert len(timer.asked) == 4, "by classes of lengths"


def test_next_process_reads_choices_though_it_may_time_nothing(make_tuner, monkeypatch):
    call(make_tuner(), *LINEAR)
    monkeypatch.setenv("TPKERNELS_TUNE", "0")
    timer = FakeTimer(TRITON_WINS)
    later = make_tuner(timer)
    assert known(later, *LINEAR).source == "cached"
    call(later, *LINEAR)
    for _ in range(2):
        call(later, products.linear, X[:1], *ARGUMENTS[1:])  # by torch
    assert not timer.asked
    assert len(later._ways) == 2


def test_after_some_seconds_no_further_candidate_is_tried(make_tuner, monkeypatch, caplog):
    timer, tried, total = FakeTimer({"triton": 1.0, "torch": 3.0}), [], []
    shipped = tuple(MatmulTile(rows, 32, 32, num_warps=4, num_stages=1) for rows in (64, 32, 16))

    def compiled_in_7_seconds(*args, tile, form):
        tried.append(tile)
        total.append(7.0)
        return products.linear.by_torch(*args)

    monkeypatch.setattr(candidates_module, "shipped_tiles", lambda *case: shipped[:2])
    record = replace(products.linear, by_kernel=compiled_in_7_seconds)
    arguments = (torch.randn(64, 32), *LINEAR[2:])
    timed(make_tuner(timer, clock=lambda: sum(total)), record, *arguments)
    assert tried == [*shipped[:2]], "14 seconds"
    assert not caplog.records

    monkeypatch.setattr(candidates_module, "shipped_tiles", lambda *case: (*shipped, *extra))
    extra = (replace(shipped[2], block_cols=64),)
    tried.clear()
    choice = timed(make_tuner(timer, clock=lambda: sum(total)), record, *arguments)
    assert tried == [*shipped], "the third begins after 14 seconds, and is finished"
    assert CHECKING_SECONDS == 15
    names = [f"triton/pointer/{tile.name}" for tile in (*shipped, *extra)]
    assert timer.asked[-1] == ["torch", *names[:3]]
    assert choice.name == names[0]
    (told,) = caplog.records
    key = tune_key(record, *arguments)
    assert told.getMessage() == (
        f"{key}: not tried within 15 seconds: {names[3]}; `python -m tpkernels tune --again` does"
    )

    tried.clear()
    timed(make_tuner(timer, clock=lambda: sum(total)), record, *arguments, seconds=1e9)
    assert tried == [*shipped, *extra]


SLOW_TO_LAUNCH = {"torch": 1.0, "triton": 2.0}, {"torch": 1.0, "triton": 0.5}  # eagerly, on the GPU alone


def test_captured_graphs_use_the_fastest_candidate_without_the_host(make_tuner, monkeypatch):
    by = []

    @wraps(products.linear.by_torch)
    def by_torch(*args):
        by.append("torch")
        return products.linear.by_torch(*args)

    def by_kernel(*args, tile, form):
        by.append("kernel")
        return products.linear.by_torch(*args)

    record = replace(products.linear, by_torch=by_torch, by_kernel=by_kernel)
    eager, on_gpu = SLOW_TO_LAUNCH
    tuner = make_tuner(FakeTimer(eager, on_gpu=on_gpu))
    call(tuner, record, *ARGUMENTS)
    assert tuner.cache.get(KEY) == Choice("torch", {"torch": 1.0, POINTER: 2.0}, POINTER)
    for process in (tuner, make_tuner(FakeTimer({}))):  # the next one reads it
        how = "timed" if process is tuner else "cached"
        assert str(known(process, record, *ARGUMENTS)) == (
            f"torch, in captured graphs {POINTER} ({how}: torch 1 ms, {POINTER} 2 ms)"
        )
        by.clear()
        call(process, record, *ARGUMENTS)
        assert by == ([] if process is tuner else ["kernel"]) + ["torch"], "loaded before any capture"
        by.clear()
        for captures in (False, True, False):
            monkeypatch.setattr(autotune_module, "capturing", lambda device, captures=captures: captures)
            call(process, record, *ARGUMENTS)
        assert by == ["torch", "kernel", "torch"]
    one_for_both = timed(make_tuner(FakeTimer(TRITON_WINS)), products.linear, *ARGUMENTS)
    assert one_for_both.names == (POINTER,)


def test_a_candidate_that_fails_when_loaded_is_dropped_with_warning(make_tuner, caplog):
    def by_kernel(*args, out, tile, form):
        raise RuntimeError("out of memory")

    record = replace(products.linear, by_kernel=by_kernel)
    tuner = make_tuner()
    tuner.cache.put(KEY, Choice("torch", {"torch": 1.0}, POINTER))
    x, weight, *_ = ARGUMENTS
    out = torch.zeros(x.shape[0], weight.shape[0])
    call(tuner, record, *ARGUMENTS, out=(out,))
    assert torch.equal(out, products.linear.by_torch(*ARGUMENTS)[0])
    assert [told.getMessage() for told in caplog.records if told.levelno == logging.WARNING] == [
        f"{POINTER} dropped for {KEY} in captured graphs: out of memory"
    ]


def test_a_candidate_that_is_gone_is_chosen_anew(make_tuner):
    tuner = make_tuner()
    for gone in (Choice("triton/pointer/8x8x8-w1-s1", {}), Choice("torch", {}, "triton/pointer/8x8x8-w1-s1")):
        tuner.cache.put(KEY, gone)
        assert known(tuner, *LINEAR) is None


def test_winner_must_beat_torch_by_a_margin():
    assert winner({"torch": 1.0, "a": 0.975, "b": 1.5}) == "torch"
    assert winner({"torch": 1.0, "a": 0.97, "b": 0.96}) == "b"
    assert winner({"usual": 1.0, "a": 0.96}, "usual", margin=0.05) == "usual"
    assert winner({"torch": 1.0}) == "torch"


@pytest.mark.parametrize("failing", ["wrong", "nan", "raises"])
def test_candidate_that_fails_is_dropped_with_a_warning(failing, make_tuner, monkeypatch, caplog):
    real = linear_kernel.linear_fwd

    def broken(*args, **kwargs):
        if failing == "raises":
            raise RuntimeError("out of registers")
        y, z = real(*args, **kwargs)
        return (y * 1.1 if failing == "wrong" else y * float("nan")), z

    monkeypatch.setattr(linear_kernel, "linear_fwd", broken)
    timer = FakeTimer(TRITON_WINS)
    y, _ = call(make_tuner(timer), *LINEAR)
    assert timer.asked == [["torch"]]
    torch.testing.assert_close(y, products.linear.by_torch(*ARGUMENTS)[0])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{POINTER} dropped for {KEY}: " in record.getMessage()


def test_timer_that_fails_leaves_torch_and_writes_nothing(make_tuner, caplog):
    def out_of_memory(runs):
        raise torch.OutOfMemoryError("no room")

    tuner = make_tuner(out_of_memory)
    call(tuner, *LINEAR)
    call(tuner, *LINEAR)
    assert "no room" in caplog.text
    assert caplog.text.count("torch computes it") == 1
    assert known(make_tuner(), *LINEAR) is None


def test_nothing_is_timed_before_a_capture_ends(make_tuner):
    standing = ["a CUDA graph is being captured"]
    timer = FakeTimer(TRITON_WINS)
    tuner = make_tuner(timer, not_now=lambda device: standing[0] if standing else "")
    call(tuner, *LINEAR)
    assert not timer.asked
    standing.clear()
    call(tuner, *LINEAR)
    assert len(timer.asked) == 1


def test_capture_and_tracing_stand_in_the_way(monkeypatch):
    assert why_not_now(CPU) == ""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not_now(cuda) == "a CUDA graph is being captured"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert why_not_now(cuda) == ""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert why_not_now(cuda) == "torch.compile is tracing"


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulation_is_timed_on_scratch(main_dtype, make_tuner):
    """The user's main_grad is added to once, however often candidates ran."""

    class RunningTimer(FakeTimer):
        def __call__(self, runs):
            for run in runs.values():
                for _ in range(3):
                    run()
            return super().__call__(runs)

    dy, x = torch.randn(16, 48).bfloat16(), torch.randn(16, 32).bfloat16()
    main_grad = torch.ones(48, 32, dtype=main_dtype)
    call(make_tuner(RunningTimer(TRITON_WINS)), products.wgrad_accumulate_, main_grad, dy, x)
    exact = 1 + dy.double().T @ x.double()
    assert (main_grad - exact).norm() < 3e-3 * exact.norm()


def test_timing_looks_at_no_values_and_draws_no_numbers(make_tuner):
    # Operands that are all NaN or zero neither drop a candidate nor prove one.
    for value in (float("nan"), 0.0):
        timer = FakeTimer(TRITON_WINS)
        timed(make_tuner(timer), products.linear, torch.full_like(X, value), W, B, "none", False)
        assert timer.asked == [["torch", POINTER]]
    before = torch.get_rng_state()
    call(make_tuner(), *LINEAR)
    assert torch.equal(before, torch.get_rng_state())


def test_each_choice_is_told_with_its_reason_once(make_tuner, caplog):
    caplog.set_level(logging.INFO, "tpkernels.choices")
    tuner = make_tuner()
    for _ in range(3):
        call(tuner, *LINEAR)
    call(make_tuner(), *LINEAR)
    call(make_tuner(not_now="a CUDA graph is being captured"), products.dgrad, X, torch.ones(32, 16))
    call(make_tuner(), products.wgrad, X[:0], X[:0])
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        f"choosing who computes {KEY}, among 2 candidates: at most about 30 s",
        f"{KEY}: {POINTER} (timed: {POINTER} 2 ms, torch 3 ms)",
        f"{KEY}: {POINTER} (cached: {POINTER} 2 ms, torch 3 ms)",
        "dgrad float32 16x32x16 rows,rows,rows: torch (not timed now: a CUDA graph is being captured)",
        "wgrad float32 0x32x32 ragged,ragged,rows: torch (only candidate)",
    ]


@pytest.mark.parametrize(("asked", "shown"), [("choices", True), ("choice", False), ("", False)])
def test_variable_shows_choices(asked, shown, make_tuner, monkeypatch, capsys, caplog):
    monkeypatch.setenv("TPKERNELS_LOG", asked)
    for name, value in (("handlers", []), ("level", logging.NOTSET), ("propagate", True)):
        monkeypatch.setattr(log.choices, name, value)
    log.choices.manager._clear_cache()
    for _ in range(2):
        log.show_if_asked()
    call(make_tuner(), *LINEAR)
    log.choices.manager._clear_cache()
    assert capsys.readouterr().err.count(f"{KEY}: {POINTER} (timed") == shown
    assert ("TPKERNELS_LOG is 'choice'; expected choices" in caplog.text) == (asked == "choice")


def test_threads_time_a_shape_once_and_in_turn(make_tuner):
    timing, together = [], []

    class SlowTimer(FakeTimer):
        def __call__(self, runs):
            timing.append(runs)
            sleep(0.05)
            together.append(len(timing))
            timing.pop()
            return super().__call__(runs)

    timer = SlowTimer({"": 1.0})  # torch wins: the interpreter is not for threads
    tuner = make_tuner(timer)
    calls = 2 * [LINEAR, (products.dgrad, X, torch.ones(32, 16))]
    threads = [Thread(target=call, args=(tuner, *given)) for given in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1, 1]


def test_freed_memory_is_poisoned_before_each_candidate_writes(make_tuner, monkeypatch):
    """It may hold the right result, torch's or another candidate's: what is not written would not show."""
    events = []

    def poison(results):
        events.append([None if one is None else tuple(one.shape) for one in results])
        poison_freed(results)

    def by_kernel(x, w, *of, tile, form):
        events.append("runs")
        return products.linear.by_torch(x, w, *of)

    monkeypatch.setattr(autotune_module, "poison_freed", poison)
    timed(make_tuner(), replace(products.linear, by_kernel=by_kernel), *ARGUMENTS)
    assert events == [[(16, 48), None], [(16, 48), None], "runs"]  # torch, then our kernel


TORCH_WINS = {"torch": 1.0, "": 3.0}
IN_COMPANY = "work that did not end within 2 s"


def test_a_choice_made_in_company_is_marked_and_made_again(make_tuner, monkeypatch, caplog):
    """After some calls of this process, and by the next one."""
    caplog.set_level(logging.INFO, "tpkernels.choices")
    monkeypatch.setattr(autotune_module, "CALLS_IN_COMPANY", 4)
    timer = FakeTimer(TRITON_WINS, company=IN_COMPANY)
    tuner = make_tuner(timer)
    for number in range(1, 5):
        call(tuner, *LINEAR)
        assert len(timer.asked) == 1, number
    assert tuner.cache.get(KEY).company == IN_COMPANY
    assert caplog.messages[-1].endswith(f"torch 3 ms; beside {IN_COMPANY})")
    for timer_of_next in (FakeTimer(TRITON_WINS, company=IN_COMPANY), FakeTimer(TORCH_WINS)):
        call(make_tuner(timer_of_next), *LINEAR)
        assert len(timer_of_next.asked) == 1
    assert make_tuner().cache.get(KEY) == Choice("torch", {"torch": 1.0, POINTER: 3.0})
    timer.company, timer.milliseconds = "", TORCH_WINS
    for _ in range(9):
        call(tuner, *LINEAR)
    assert len(timer.asked) == 2
    assert tuner.cache.get(KEY).names == ("torch",)


def test_a_gpu_that_is_never_quiet_is_timed_a_few_times(make_tuner, monkeypatch):
    monkeypatch.setattr(autotune_module, "CALLS_IN_COMPANY", 2)
    timer = FakeTimer(TRITON_WINS, company=IN_COMPANY)
    tuner = make_tuner(timer)
    for rows in [16, 15] * 20:  # of one class of lengths
        call(tuner, products.linear, X[:rows], *ARGUMENTS[1:])
    assert len(timer.asked) == autotune_module.MOST_ATTEMPTS


def test_a_choice_made_in_company_serves_where_nothing_may_be_timed(make_tuner, monkeypatch):
    call(make_tuner(FakeTimer(TRITON_WINS, company=IN_COMPANY)), *LINEAR)
    monkeypatch.setenv("TPKERNELS_TUNE", "0")
    assert chosen_by_name(make_tuner(), *LINEAR) == POINTER


def chosen_by_name(tuner, record, *arguments):
    return tuner._own(tuner.request(record, arguments)).name


def test_log_says_what_is_chosen_among_how_many_before(make_tuner, caplog):
    """Before it takes its time; the first of a process also says so where nobody asked for a log."""
    said_before = []

    class Timer(FakeTimer):
        def __call__(self, runs):
            said_before.append([*caplog.messages])
            return super().__call__(runs)

    tuner = make_tuner(Timer({"": 1.0}), announces=True)
    for rows in (16, 8):
        call(tuner, products.linear, X[:rows], *ARGUMENTS[1:])
    first, second = said_before
    assert first == second
    assert first == [
        f"choosing who computes {KEY}, among 2 candidates: at most about 30 s for each new shape; "
        "TPKERNELS_LOG=choices shows all"
    ]


def test_a_shape_first_met_in_a_capture_is_a_warning_once(make_tuner, caplog):
    tuner = make_tuner(not_now="a CUDA graph is being captured")
    for _ in range(3):
        call(tuner, *LINEAR)
    (said,) = caplog.messages
    assert said.startswith(
        f"torch computes {KEY}, which was never timed, as a CUDA graph is being captured: "
    )


@pytest.fixture
def compiled_on(make_tuner, monkeypatch):
    """A device whose products are chosen by an autotuner, for compiled and eager calls."""

    def install(timer, **options):
        tuner = make_tuner(timer, **options)
        monkeypatch.setattr(backends, "backend", "elsewhere")
        monkeypatch.setattr(backends, "resolve_backend", lambda device: "fastest")
        monkeypatch.setattr(primitives, "autotuner_on", lambda device: tuner)
        return tuner

    return install


def traced(function, timer):
    """Compile a function; return how often a timer was asked until its graph was there, and the function."""
    asked = []

    def backend(graph, inputs):
        asked.append(len(timer.asked))
        return graph

    return asked, torch.compile(function, backend=aot_autograd(fw_compiler=backend), fullgraph=True)


def test_compiled_code_takes_the_choices_of_eager_code(compiled_on):
    """Nothing is timed while tracing; the call that follows times, as an eager one does."""
    dy, w = torch.randn(16, 48), torch.randn(48, 32)
    timer = FakeTimer(TRITON_WINS)
    tuner = compiled_on(timer)
    asked, compiled = traced(lambda dy, w: primitives.dgrad(dy, w) + 1, timer)
    with torch.no_grad():
        y = compiled(dy, w)
        assert asked == [0]
        assert len(timer.asked) == 1
        torch.testing.assert_close(y, dy @ w + 1)
        primitives.dgrad(dy, w)
    assert len(timer.asked) == 1, "the eager call is of the same choice"
    (key,) = tuner.cache.choices
    assert tuner.cache.get(key).name == POINTER


@pytest.mark.parametrize("known_before", [True, False])
def test_compiled_code_that_may_not_time_takes_what_is_known(known_before, compiled_on, make_tuner, caplog):
    dy, w = torch.randn(16, 48), torch.randn(48, 32)
    if known_before:
        call(make_tuner(), products.dgrad, dy, w)
    timer = FakeTimer(TRITON_WINS)
    tuner = compiled_on(timer, not_now="a CUDA graph is being captured")
    _, compiled = traced(primitives.dgrad, timer)
    caplog.clear()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(dy, w), dy @ w)
    assert not timer.asked
    warned = [record.name for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ([] if known_before else ["tpkernels.dispatch"])
    assert chosen_by_name(tuner, products.dgrad, dy, w) == (POINTER if known_before else "torch")
