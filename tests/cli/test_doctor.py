"""`python -m tpkernels doctor` on this installation, on broken ones, and on GPUs that are not here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient
from tests.programs import ran
from tpkernels.cli import doctor, main
from tpkernels.cli.doctor import VARIABLES, probe_triton, variables
from tpkernels.comm.transports.select import TRANSPORTS
from tpkernels.dispatch.backends import BACKENDS

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "tpkernels").rglob("*.py"), *(ROOT / "csrc").glob("*.cpp"), ROOT / "setup.py"]


def report(*options, path=None, **environment: str) -> subprocess.CompletedProcess:
    """Run the command; modules in the folder `path` hide the installed ones."""
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), str(ROOT)])
    return ran("-m", "tpkernels", "doctor", *options, environment=environment)


def findings(run: subprocess.CompletedProcess) -> dict[str, tuple[str, str]]:
    """Health and text by name."""
    told = json.loads(run.stdout)
    assert told["healthy"] == (run.returncode == 0)
    return {one["name"]: (one["health"], one["text"]) for one in told["findings"]}


def test_this_installation_is_healthy():
    run = report("--json")
    assert run.returncode == 0, run.stdout
    found = findings(run)
    for name in ("python", "torch", "gpu", "triton", "ptxas", "extension", "self-test", "compiler"):
        assert found[name][0] in ("ok", "note")
    assert found["self-test"] == ("ok", "2 gloo processes formed a group and agreed")


def test_ranks_that_fail_are_a_problem_with_their_last_words():
    found = findings(report("--json", TPKERNELS_CHECK_REPLICAS="many"))
    health, text = found["self-test"]
    assert health == "problem"
    assert "TPKERNELS_CHECK_REPLICAS is 'many'; expected a number of optimizer steps" in text
    assert re.search("rank [01] ended with exit code 1; the other ranks were ended", text)


BROKEN = {  # statements of a torch -> what is found
    "lacks_a_library": ("raise ImportError('libtorch_cpu.so: cannot open')", "libtorch_cpu.so: cannot open"),
    "kills_the_process": ("import os; os.kill(os.getpid(), 11)", "looking at it ended by Segmentation fault"),
    "old": ("__version__ = '1.13.1'", "1.13.1 is too old: tpkernels needs 2.11 or newer"),
    "prints_words_of_its_own": ("print('{\"a\": 1}'); raise ImportError('broken')", "broken"),
}


@pytest.mark.parametrize(("statements", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_torch_is_explained_and_nothing_else_probed(statements, said, tmp_path):
    (tmp_path / "torch.py").write_text(statements)
    found = findings(report("--json", path=tmp_path))
    assert found["torch"][0] == "problem"
    assert said in found["torch"][1]
    assert "self-test" not in found


def test_a_terminal_that_lacks_a_character_is_written_to_all_the_same(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "OMP_X": "\u00e9"}
    run = report(path=tmp_path, **plain)
    assert run.returncode == 1, run.stderr
    assert "OMP_X=" in run.stdout


def test_a_probe_that_hangs_is_ended():
    program = f"echo '{doctor.PREFIX}\"gpu\"'; exec sleep 600"
    found = doctor.probed(["sh", "-c", program], seconds := round(patient(1)))
    assert found == [("problem", "gpu", f"looking at it took more than {seconds} s")]


@pytest.fixture
def alone(monkeypatch, capsys):
    """The command without its probes; what it prints."""
    monkeypatch.setattr(doctor, "probed", lambda command: [])

    def run(**environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return main(["doctor"]), capsys.readouterr().out

    return run


def test_a_missing_compiler_is_a_note(alone):
    code, printed = alone(CXX="/nowhere/c++")
    assert code == 0  # the package works without
    assert "note     compiler  /nowhere/c++ not found: the C++ extension cannot be built here" in printed


def test_variables_are_listed_and_mistakes_are_problems(alone):
    assert alone(TPKERNELS_LOG="choices")[0] == 0
    code, printed = alone(TPKERNELS_TUEN="0", TPKERNELS_TRANSPORT="share")
    assert code == 1
    assert "ok       variable  TPKERNELS_LOG=choices" in printed
    assert "problem  variable  TPKERNELS_TUEN=0: nothing reads it; did you mean TPKERNELS_TUNE?" in printed
    assert printed.endswith("2 problems: variable, variable\n")


def test_every_variable_that_is_read_is_known_with_its_values():
    # A name in quotes is one that code asks for.
    read = {name for path in SOURCES for name in re.findall(r'"(TPKERNELS_[A-Z_]*[A-Z])"', path.read_text())}
    assert read == VARIABLES.keys()
    assert set(VARIABLES["TPKERNELS_BACKEND"]) == set(BACKENDS)
    assert set(VARIABLES["TPKERNELS_TRANSPORT"]) == set(TRANSPORTS)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TPKERNELS_TUEN", "0", "nothing reads it; did you mean TPKERNELS_TUNE?"),
        ("TPKERNELS_BACK_END", "torch", "nothing reads it; did you mean TPKERNELS_BACKEND?"),
        ("TPKERNEL_TRANSPORT", "c10d", "nothing reads it; did you mean TPKERNELS_TRANSPORT?"),
        ("TP_KERNELS_DEBUG", "1", "nothing reads it; did you mean TPKERNELS_DEBUG?"),
        ("tpkernels_debug", "1", "nothing reads it; did you mean TPKERNELS_DEBUG?"),
        ("TPKERNELS_BACKEND", "Torch", "expected one of auto, torch, triton; did you mean torch?"),
        ("TPKERNELS_BACKEND", "", "expected one of auto, torch, triton"),
        ("TPKERNELS_TUNE", "01", "expected one of 0, 1; did you mean 1?"),
        (
            "TPKERNELS_LOG",
            "choice",
            "expected one of choices, calls, choices,calls, calls,choices; did you mean choices?",
        ),
    ],
)
def test_a_mistake_is_a_problem_with_what_was_meant(name, value, said):
    assert list(variables({name: value})) == [("problem", "variable", f"{name}={value}: {said}")]


def test_variables_of_others_are_no_mistakes():
    others = {"KERNELS": "", "NCCL_DEBUG": "INFO", "TPKERNELS_TUNE": "", "TRITON_INTERPRET": "1"}
    assert [(found.health, found.text) for found in variables(others)] == [
        ("ok", "NCCL_DEBUG=INFO"),
        ("ok", "TPKERNELS_TUNE="),
        ("ok", "TRITON_INTERPRET=1"),
    ]


SLURM = {"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
CURE = "srun --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none without --gpus-per-task"


@pytest.mark.parametrize(
    ("environment", "visible", "cause", "cure"),
    [
        (SLURM, 1, "each of 8 ranks here sees one GPU (SLURM_GPUS_PER_TASK=1)", CURE),
        (SLURM, 8, "(SLURM_GPUS_PER_TASK=1)", CURE),  # in the batch script, whose steps will see one
        (SLURM | {"SLURM_GPUS_PER_TASK": "h100:1"}, 1, "(SLURM_GPUS_PER_TASK=h100:1)", CURE),
        (SLURM | {"SLURM_GPUS_PER_TASK": "8"}, 8, "", ""),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1"}, 1, "", ""),  # the step has one task
        (
            {"SLURM_NTASKS_PER_NODE": "8", "SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"},
            1,
            "(SLURM_TRES_PER_TASK=cpu:4,gres/gpu:1)",
            CURE,
        ),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_GPU_BIND": "single:1"}, 1, "(SLURM_GPU_BIND=single:1)", CURE),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_GPU_BIND": "none"}, 8, "", ""),
        (
            {"LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "3"},
            1,
            "each of 4 ranks here sees one GPU (CUDA_VISIBLE_DEVICES=3)",
            "leave CUDA_VISIBLE_DEVICES alike on all ranks",
        ),
        ({"LOCAL_WORLD_SIZE": "4"}, 4, "", ""),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1, "", ""),  # one process
    ],
)
def test_a_launcher_that_hides_other_ranks_gpus_is_told(environment, visible, cause, cure):
    said = doctor.hidden_peers(environment, visible)
    assert (cause in said, cure in said, bool(said)) == (True, True, bool(cause))


APART = "cannot access each other's memory"
UNWRITTEN = "the driver writes no words from a stream (planted); use c10d"


@pytest.mark.parametrize(
    ("linked", "writes", "found"),
    [
        ([(0, 1), (0, 2), (1, 2)], "", [("ok", "3 GPUs, which streams write to, and which access each")]),
        ([(0, 2), (1, 2)], "", [("note", f"GPUs 0 and 1 {APART}: NCCL sends through memory of the host")]),
        ([(0, 1)], "", [("note", f"GPUs 0 and 2 {APART} (2 such pairs): NCCL")]),
        (
            [(0, 1), (0, 2), (1, 2)],
            UNWRITTEN,
            [("note", f"GPU {gpu}: {UNWRITTEN}; symmetric does not open") for gpu in range(3)],
        ),
    ],
)
def test_gpus_that_do_not_reach_each_other_are_told(linked, writes, found, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda *pair: pair in linked)
    monkeypatch.setattr("torch.zeros", lambda *_, **options: options["device"])
    monkeypatch.setattr("tpkernels.comm.transports.rendezvous.why_no_stream_writes", lambda memory: writes)
    seen = list(doctor.probe_peers())
    assert [
        (health, text[: len(said)]) for (health, text), (_, said) in zip(seen, found, strict=True)
    ] == found


def test_a_switch_of_nccl_is_told(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    test_gpus_that_do_not_reach_each_other_are_told(
        [(0, 1), (0, 2), (1, 2)], "", [("note", "NCCL_P2P_DISABLE is set: NCCL sends through")], monkeypatch
    )


def test_without_a_gpu_nothing_is_said_of_peers(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert list(doctor.probe_peers()) == []


NEWEST = doctor.TESTED_TRITON[1]
NEWER = f"is newer than the newest tested, {NEWEST}: pip install 'triton<3.{int(NEWEST[2:]) + 1}'"


@pytest.mark.parametrize(
    ("version", "numpy", "found"),
    [
        ("3.5.1", "2.0", [("problem", "3.5.1 is too old: tpkernels needs 3.6 or newer")]),
        ("3.6.0", "2.3.1", [("ok", "3.6.0")]),
        (
            "3.6.0",
            "2.4.0",
            [
                ("ok", "3.6.0"),
                ("note", "numpy 2.4.0 breaks the interpreter of Triton 3.6.0: use numpy < 2.4 or Triton 3.7"),
            ],
        ),
        ("3.20.0", "2.4.0", [("note", f"3.20.0 {NEWER}")]),
        ("4.0", "2.4.0", [("note", f"4.0 {NEWER}")]),
    ],
)
def test_versions_of_triton_that_were_not_tried_are_told(version, numpy, found, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr("numpy.__version__", numpy)
    monkeypatch.setattr("torch.__version__", "2.99.0")  # which nobody has paired
    assert list(probe_triton()) == found


@pytest.mark.parametrize(
    ("torch", "triton", "is_paired"),
    [
        ("2.13.0+cpu", "3.7.1", True),
        ("2.13.0", "3.9.0", False),
        ("2.12.1", "3.7.1", True),
        ("2.15.0", "3.8.0", False),
    ],
)
def test_a_triton_of_another_torch_is_noted(torch, triton, is_paired, monkeypatch):
    monkeypatch.setattr("torch.__version__", torch)
    monkeypatch.setattr("triton.__version__", triton)
    found = [text for health, text in probe_triton() if health == "note"]
    assert bool(found) != is_paired
    assert all(text.startswith(f"torch {torch} was tried with Triton 3.") for text in found)


def test_a_missing_triton_is_a_problem_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    ((health, text),) = probe_triton()
    assert health == "problem"
    assert text.endswith(f"no fused kernels; pip install 'triton<3.{int(NEWEST[2:]) + 1}' numpy")
