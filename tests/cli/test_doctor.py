"""`python -m tpkernels doctor` on this installation, and on broken ones."""

import json
import os
import subprocess
import sys

import pytest

from tests.warm_python import ran
from tpkernels.cli import doctor, main

REPORT = ["-m", "tpkernels", "doctor", "--json"]


def report(*, path=None, **variables: str) -> tuple[int, dict]:
    """Exit code and findings by name; modules in the folder `path` hide the installed ones."""
    if path is None:
        made = ran(*REPORT, environment=variables)
    else:
        variables["PYTHONPATH"] = os.pathsep.join([str(path), os.getcwd()])
        command, environment = [sys.executable, *REPORT], os.environ | variables
        made = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in made.stderr
    told = json.loads(made.stdout)
    return made.returncode, {finding["name"]: finding for finding in told["findings"]} | {"": told}


def test_doctor_finds_this_installation_healthy():
    code, found = report(TPKERNELS_LOG="choices")
    assert code == 0, found
    assert found[""]["healthy"] is True
    parts = "python torch gpu collectives triton backend transport extension compiler self-test"
    for name in parts.split():
        assert found[name]["health"] in ("ok", "note")
        assert found[name]["text"]
    assert "agreed in" in found["self-test"]["text"]


@pytest.fixture
def look(monkeypatch, capsys):
    """As `report`, but for the self-test, whose ranks take longer than all other findings."""

    def look(*, path=None, **variables: str) -> tuple[int, dict]:
        monkeypatch.setattr(doctor, "_self_test", lambda: doctor.ok("self-test", "left out"))
        if path is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(path), os.getcwd()])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["doctor", "--json"])
        told = json.loads(capsys.readouterr().out)
        return code, {finding["name"]: finding for finding in told["findings"]}

    return look


def broken_module(tmp_path, name: str, body: str):
    (tmp_path / f"{name}.py").write_text(body)
    return tmp_path


BROKEN = {  # what a torch does on import -> what is said of it
    "lacks_a_library": ("raise ImportError('libtorch_cpu.so: cannot open')", "libtorch_cpu.so: cannot open"),
    "kills_the_process": ("import os; os.kill(os.getpid(), 11)", "looking at it ended by SIGSEGV"),
    "old": ("__version__ = '1.13.1'", "1.13.1 is too old: tpkernels needs 2.11 or newer"),
    "prints_words_of_its_own": ("print('{\"a\": 1}'); raise ImportError('broken')", "broken"),
}


@pytest.mark.parametrize(("body", "said"), BROKEN.values(), ids=BROKEN)
def test_doctor_explains_a_torch_that_is_broken(body, said, tmp_path):
    code, found = report(path=broken_module(tmp_path, "torch", body))
    assert code == 1
    assert found[""]["healthy"] is False
    assert found["torch"]["health"] == "problem"
    assert said in found["torch"]["text"]
    assert "self-test" not in found


def test_doctor_explains_a_missing_triton(tmp_path, look):
    code, found = look(path=broken_module(tmp_path, "triton", "raise ImportError('No module named triton')"))
    assert code == 1
    assert "No module named triton" in found["triton"]["text"]
    assert found["torch"]["health"] == "ok"


def test_doctor_explains_a_compiler_that_does_not_work(look, monkeypatch):
    monkeypatch.setattr(doctor, "_probes", list)
    code, found = look(CXX="/bin/false")
    assert code == 0  # the package works without
    assert found["compiler"] == {
        "name": "compiler",
        "health": "note",
        "text": "/bin/false --version fails with exit code 1",
    }


def test_doctor_ends_a_probe_that_hangs(tmp_path, monkeypatch):
    (tmp_path / "hanging_probe.py").write_text("import time; print('before', flush=True); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._run("hanging_probe", 3) == (["before"], "took more than 3 s")


def test_doctor_prints_on_a_terminal_without_the_characters(tmp_path):
    path = broken_module(tmp_path, "torch", "raise ImportError('broken')")
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
        "OMP_X": "\u00e9",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(path), os.getcwd()])
    command = [sys.executable, "-m", "tpkernels", "doctor"]
    ran = subprocess.run(command, capture_output=True, timeout=60, env=environment, check=False)
    assert ran.returncode == 1, ran.stderr
    assert b"OMP_X=" in ran.stdout


def test_doctor_refuses_variables_that_mean_nothing(monkeypatch, capsys):
    """Each with what was probably meant; a healthy word is no excuse for the rest."""
    monkeypatch.setattr(doctor, "_probes", list)
    monkeypatch.setattr(doctor, "_self_test", lambda: doctor.ok("self-test", "left out"))
    monkeypatch.setenv("TPKERNELS_LOG", "choices")
    assert main(["doctor"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("TPKERNELS_TUEN", "0")
    monkeypatch.setenv("TPKERNELS_TRANSPORT", "share")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem  variable   TPKERNELS_TUEN=0: nothing reads it; did you mean TPKERNELS_TUNE?" in printed
    told = (
        "TPKERNELS_TRANSPORT=share: expected one of auto, c10d, shared, symmetric, symmetric-rounds; did you"
    )
    assert f"problem  variable   {told} mean shared?" in printed
    assert "ok       variable   TPKERNELS_LOG=choices" in printed
    assert printed.endswith("2 problems: variable, variable\n")
    assert printed.count("TPKERNELS_TUEN") == 1
