"""`bench streams`: the program of the page with faults, and what the command prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import bench.streams
from bench.__main__ import main
from bench.streams import Machine, MachineError, Report, record, search
from bench.streams.cases import all_programs

PAGE = Path(__file__).parents[3] / "docs" / "streams.md"
FILES = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BARRIER = "        handle.barrier(0, 1000)  # the neighbour has read the rows before\n"
FAULTS = {  # what is left out of ring.py -> what is said
    BARRIER: "writes what rank",
    "        side.wait_stream(torch.cuda.current_stream())\n": "in no order",
    "        torch.cuda.current_stream().wait_stream(side)  # before `rows` is freed\n": "memory is freed",
    "            handle.stream_write_value32(right[:1].view(torch.uint32), 0, step)\n": "waits for 1 flags",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name, text in FILES.findall(PAGE.read_text()):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("ring", "models"):
        sys.modules.pop(name, None)


def searched() -> Report:
    from models import MODELS
    from ring import pass_on

    return search(record(Machine(ranks=4, models=MODELS), pass_on), orders=10)


def test_the_program_of_the_page_is_right(folder):
    found = searched()
    assert found.orders == 10
    assert found.steps > found.tasks > 0


@pytest.mark.parametrize("left_out", FAULTS)
def test_without_a_line_of_it_an_order_fails(folder, left_out):
    source = (folder / "ring.py").read_text()
    assert source.count(left_out) == 1
    (folder / "ring.py").write_text(source.replace(left_out, ""))
    with pytest.raises(MachineError, match=FAULTS[left_out]):
        searched()


@pytest.mark.parametrize("sizes", [{"ranks": 0}, {"ranks": 2, "processors": 0}])
def test_a_machine_that_cannot_be_is_refused(sizes):
    with pytest.raises(ValueError, match="expected ranks and processors of at least 1"):
        Machine(**sizes)


class InProcess:
    """Stands for the pool of processes."""

    def __init__(self, *_):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_the_command_prints_writes_and_exits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.streams.command, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(bench.streams.command, "get_context", lambda _: None)
    name, file = "column/c10d, 1 rounds/eager/2 ranks", tmp_path / "told.json"
    command = ["streams", "--only", name, "--orders", "2", "--json", str(file)]
    assert main(command) == 0
    assert "all well: 1 programs in 2 orders" in capsys.readouterr().out

    def planted():
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(bench.streams.command, "all_programs", lambda: {name: planted})
    assert main(command) == 1
    assert "1 failures in 1 programs" in capsys.readouterr().out
    assert json.loads(file.read_text())[name]["failure"] == "ZeroDivisionError: planted"


def test_no_program_of_that_name_is_bad_use(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["streams", "--only", "ping"])
    assert ended.value.code == 2
    assert next(iter(all_programs())) in capsys.readouterr().err
