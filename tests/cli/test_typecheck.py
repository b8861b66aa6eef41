"""`typecheck` runs a script up to its first step, and names the line that is wrong."""

from __future__ import annotations

import pytest

from tpkernels.cli import main

pytest.importorskip("spmd_types", reason="the checker of types is not installed")

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import tpkernels

if "mesh" in sys.argv:
    torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
else:
    dist.init_process_group("nccl")
tpkernels.initialize_model_parallel(tensor_model_parallel_size=2)
tpkernels.manual_seed(1)
sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 16}
model = tpkernels.GPT(tpkernels.GPTConfig(**sizes), sequence_parallel=True)
state = tpkernels.current()
if "buckets" in sys.argv:
    groups = {"group": state.process_group("dp"), "tensor_parallel_group": state.process_group("tp")}
    buckets = tpkernels.GradientBuckets(model, **groups)
if "unmarked" in sys.argv:
    next(p for p in model.parameters() if p.sequence_parallel).sequence_parallel = False
if "other" in sys.argv:
    other = tpkernels.ColumnParallelLinear(4, 4, state=dist.new_group([0, 1]))
    model.register_forward_hook(lambda *_: other(torch.ones(1, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
marked = [parameter for parameter in model.parameters() if parameter.sequence_parallel]
others = [parameter for parameter in model.parameters() if not parameter.sequence_parallel]
first = torch.optim.SGD(others, 0.1) if "two" in sys.argv else None
for step in range(2):
    optimizer.zero_grad()
    ids = torch.randint(0, 64, (2, 16))
    try:
        loss = 0 if "nothing" in sys.argv else model(ids, ids)
    except RuntimeError:
        if "caught" not in sys.argv:
            raise
        break
    if "nothing" not in sys.argv:
        loss.backward()
    for _ in range(sys.argv.count("summed")):
        tpkernels.finalize_gradients(model)
    if "clip" in sys.argv:
        assert all(parameter.grad is not None for parameter in marked)
        tpkernels.clip_grad_norm_(model.parameters(), 1.0)
    if "late" in sys.argv:
        model(ids, ids).backward()
    if "own" in sys.argv:
        for parameter in marked:
            dist.all_reduce(parameter.grad)
    if "by_hand" in sys.argv:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        continue
    if "two" in sys.argv:
        first.step()
        optimizer = torch.optim.SGD(marked, 0.1)
    if "buckets" in sys.argv:
        buckets.finish()
    optimizer.step()
print("the script went on")
"""


@pytest.fixture
def checked(tmp_path, capsys):
    """Check the script with these arguments; return the exit code and what was printed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*arguments):
        code = main(["typecheck", str(script), *arguments])
        return code, capsys.readouterr().out.replace(str(script), "train.py")

    return run


@pytest.mark.parametrize(
    "how",
    [("summed",), ("buckets",), ("summed", "mesh"), ("summed", "two"), ("summed", "clip"), ("own",)],
    ids="_".join,
)
def test_a_right_script_is_run_until_its_second_step(checked, how):
    assert checked(*how) == (0, "train.py: no fault found in types over 2 tensor-parallel ranks\n")


@pytest.mark.parametrize(
    ("arguments", "line", "count"),
    [
        ((), "optimizer.step()", 0),
        (("summed", "summed"), "tpkernels.finalize_gradients(model)", 2),
        (("summed", "late"), "optimizer.step()", 0),
        (("two",), "optimizer.step()", 0),
    ],
    ids=["not_summed", "twice", "too_early", "of_two_optimizers"],
)
def test_partial_gradients_must_be_summed_once_before_the_step(checked, arguments, line, count):
    code, said = checked(*arguments)
    assert code == 1
    number = [text.strip() for text in SCRIPT.splitlines()].index(line) + 1
    assert said.startswith(f"train.py:{number}, in <module>\n    {line}\n")
    assert f"since the last backward it was summed {count} times;" in said


def test_parameters_that_no_optimizer_steps_are_half_checked(checked):
    code, said = checked("own", "by_hand")
    assert code == 1
    assert "so only what was called is checked: no fault found in it" in said


@pytest.mark.parametrize("what", [("unmarked",), ("unmarked", "caught")], ids="_".join)
def test_a_lost_mark_is_told_with_its_line(checked, what):
    code, said = checked("summed", *what)
    assert code == 1
    assert ", in <module>\n    loss = 0 if" in said
    assert "I replicated, with the full gradient" in said


def test_a_script_that_calls_no_model_is_told_so(checked):
    code, said = checked("nothing")
    assert code == 1
    assert said.endswith("no model with tensor-parallel layers was called, so nothing was checked\n")


def test_layers_of_a_second_group_are_refused(checked, capsys):
    with pytest.raises(SystemExit, match="2"):
        checked("other")
    assert "expected layers of one tensor-parallel group, got those of another" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["nowhere.py"], ["--ranks", "1", __file__]])
def test_bad_use_is_one_line(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["typecheck", *words])
    assert capsys.readouterr().err.count("\n") == 1


BY_HAND = """
import sys
import torch
import torch.distributed as dist
import tpkernels
from torch.nn.functional import linear, rms_norm

dist.init_process_group("gloo")
if "no_state" not in sys.argv:
    tpkernels.initialize_model_parallel(tensor_model_parallel_size=2)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (4, 8)))
        for weight, dim in ((self.up, 0), (self.down, 1)):
            if "unmarked" not in sys.argv:
                weight.tensor_model_parallel, weight.partition_dim = True, dim

    def forward(self, x):
        if "no_state" in sys.argv:
            return x @ self.up.t()
        h = linear(tpkernels.copy_to_tensor_model_parallel_region(x), self.up).relu()
        if "norm" in sys.argv:
            h = rms_norm(h, (8,))
        y = linear(h, self.down)
        if "residual" in sys.argv:
            y = y + x
        return tpkernels.reduce_from_tensor_model_parallel_region(y)


model = MLP()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(3, 4)).square().mean().backward()
optimizer.step()
"""
OF_MODELS_BY_HAND = {
    "right": (0, "no fault found in types over 2 tensor-parallel ranks"),
    "residual": (1, "in forward\n    y = y + x\n"),
    "norm": (1, "in forward\n    h = rms_norm(h, (8,))\n"),
    "unmarked": (1, "regions were called, but by no module with layers of tpkernels or marked parameters"),
    "no_state": (
        1,
        "a model with marked shards was called, but no tensor-parallel state tells over",
    ),
}


@pytest.mark.parametrize("what", OF_MODELS_BY_HAND)
def test_a_model_by_hand_is_checked_or_told_what_it_lacks(tmp_path, capsys, what):
    script, (code, words) = tmp_path / "by_hand.py", OF_MODELS_BY_HAND[what]
    script.write_text(BY_HAND)
    assert main(["typecheck", str(script), what]) == code
    assert words in capsys.readouterr().out
