"""`check --streams`: the program of the page, with faults, and mistakes in its table."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.blocks import write_files
from tpkernels.cli import BadUse, check_streams
from tpkernels.cli.check_streams import Searched, UserProgram, programs_of
from tpkernels.gate.user_kernels.record import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
BARRIER = "        handle.barrier(0, 1000)  # the neighbour has read the rows before\n"
FAULTS = {  # what is left out of ring.py -> what is said
    BARRIER: "writes what rank",
    "        side.wait_stream(torch.cuda.current_stream())\n": "in no order",
    "        torch.cuda.current_stream().wait_stream(side)  # before `rows` is freed\n": "memory is freed",
    "            handle.stream_write_value32(right[:1].view(torch.uint32), 0, step)\n": "waits for 1 flags",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    write_files(PAGE, tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("ring", "models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("ring", "models"):
        sys.modules.pop(name, None)


def searched(folder: Path) -> Searched:
    (program,) = programs_of(folder / "gate.toml")
    return check_streams._users(program, 10)


def test_the_program_of_the_page_is_right(folder):
    found = searched(folder)
    assert (found.failure, found.orders) == ("", 10)
    assert found.steps > found.tasks > 0


@pytest.mark.parametrize("left_out", FAULTS)
def test_without_a_line_of_it_an_order_fails(folder, left_out):
    source = (folder / "ring.py").read_text()
    assert source.count(left_out) == 1
    (folder / "ring.py").write_text(source.replace(left_out, ""))
    assert FAULTS[left_out] in searched(folder).failure


def test_an_error_of_the_host_code_is_a_failure(folder):
    (folder / "ring.py").write_text("def pass_on(group):\n    raise ZeroDivisionError('planted')\n")
    assert searched(folder).failure == "ZeroDivisionError: planted"


def test_the_command_prints_writes_and_exits(folder, monkeypatch, capsys):
    in_process = lambda work, items, *_: [work(item) for item in items]  # noqa: E731
    monkeypatch.setattr(check_streams, "results_of", in_process)
    run = partial(check_streams.main, "", folder / "gate.toml", 5, folder / "told.json")
    assert run() == 0
    assert "all well: 1 programs in 5 orders" in capsys.readouterr().out
    (folder / "ring.py").write_text("def pass_on(group):\n    return group.no_such_thing\n")
    del sys.modules["ring"]
    assert run() == 1
    assert "1 failures in 1 programs" in capsys.readouterr().out
    assert "no_such_thing" in json.loads((folder / "told.json").read_text())["ring"]["failure"]
    with pytest.raises(BadUse, match="no program of streams has 'ping' in its name"):
        check_streams.main("ping", folder / "gate.toml", None, None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rank = 2", "streams.ring.rank: unknown; known are program, ranks"),
        ("program = 'ring'", "streams.ring.program: expected module:name, got 'ring'"),
        ("ranks = 0", "streams.ring.ranks: expected a whole number of at least 1, got 0"),
        ("ranks = true", "streams.ring.ranks: expected a whole number of at least 1, got True"),
        ("waves = 1", "streams.ring.waves: expected true or false, got 1"),
        ("machines = 3", "streams.ring.machines: expected a divisor of 4 ranks"),
    ],
)
def test_mistakes_in_the_table_are_told(tmp_path, line, said):
    lines = {"program": "program = 'ring:pass_on'", "ranks": "ranks = 4"}
    lines[line.split()[0]] = line
    (tmp_path / "gate.toml").write_text("\n".join(["[streams.ring]", *lines.values()]))
    with pytest.raises(ConfigError) as error:
        programs_of(tmp_path / "gate.toml")
    assert said in str(error.value)


def test_no_table_and_no_file_are_told(tmp_path):
    (tmp_path / "gate.toml").write_text("[kernels.one]")
    for name, said in (("gate.toml", "streams: expected tables"), ("none.toml", "No such file")):
        with pytest.raises(ConfigError, match=said):
            programs_of(tmp_path / name)


def test_defaults_are_those_of_the_page():
    assert UserProgram("ring", "", "a:b", 4) == UserProgram("ring", "", "a:b", 4, 1, 8, "", 200, False)
