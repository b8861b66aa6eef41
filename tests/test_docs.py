"""What README and docs say can be typed, works."""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from _pytest.mark import ParameterSet

from tests.patience import patient
from tests.products import SWEEP
from tests.programs import ran
from tests.ranks import FORKED
from tpkernels.training.launch import loopback_store

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.-]+\.\w+)\n")
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.language}-{self.number}"


def blocks_of(page: str, text: str) -> list[Block]:
    return [Block(page, i, *match) for i, match in enumerate(FENCE.findall(text))]


def write_files(page: Path, folder: Path) -> None:
    """Write what a page shows as files: blocks that begin with "# NAME.EXTENSION"."""
    for block in blocks_of(page.name, page.read_text()):
        if named := FILE.match(block.text):
            (folder / named[1]).write_text(block.text)


BLOCKS = [block for page in PAGES for block in blocks_of(page.name, page.read_text())]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [
    line.split(" # ")[0].strip()
    for block in BLOCKS
    if block.language == "console"
    for line in block.text.splitlines()
]


# What `make test` adds to a long command, to have less of it; `make sweep` runs all as they are printed.
LESS = {
    "bench bits": None,  # tests/bench/test_bits.py
    "tpkernels doctor": None,  # tests/cli/test_doctor.py
    "tpkernels qualify": None,  # tests/cli/test_qualify.py runs this very command
    "tpkernels check --config": None,  # tests/cli/test_check_config.py does
    "tpkernels check --init": None,  # tests/cli/test_check_init.py does
    "tpkernels train": [
        "--size",
        "hidden_size=16",
        "--size",
        "num_layers=1",
        "--tokens",
        "16",
        "--steps",
        "2",
        "--sample",
        "5",
    ],
}
FORKED_COMMANDS = {"train", "tune", "typecheck"}  # which import torch
RUN = sorted({command for command in COMMANDS if command.startswith("python")})


def in_test_and_sweep(command: str) -> list[ParameterSet]:
    less = next((less for start, less in LESS.items() if f"-m {start}" in command), [])
    marks = pytest.mark.sweep if less != [] else ()
    as_printed = pytest.param(command, [], id=command, marks=marks)
    return [as_printed] if not less else [pytest.param(command, less, id=f"less of {command}"), as_printed]


def run_block(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program, on two ranks if it forms a process group, in forks that have imported torch."""
    for page in PAGES:
        if page.name == block.page:
            write_files(page, folder)
    program = folder / "block.py"
    program.write_text(block.text)
    return run_on_ranks(2 if "init_process_group" in block.text else 1, program)


def run_on_ranks(ranks: int, program: Path) -> subprocess.CompletedProcess[str]:
    output = program.with_name("output.txt")
    store = loopback_store()
    context = multiprocessing.get_context(FORKED)
    processes = [
        context.Process(target=_run_program, args=(program, output, rank, ranks, store.port))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patient(120))
        process.kill()
    codes = [process.exitcode for process in processes]
    return subprocess.CompletedProcess(program, max(codes, key=bool), output.read_text(), output.read_text())


def _run_program(program: Path, output: Path, rank: int, ranks: int, port: int) -> None:
    """Run a program in this process, with torchrun's variables."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.chdir(program.parent)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in {**place, **meeting}.items()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = [str(program)]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_code_block_runs(block, tmp_path):
    for package in ("transformers", "megatron"):
        if f"from {package}" in block.text and find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make check-{package} installs it)")
    if 'device="cuda"' in block.text:
        pytest.skip("it asks for a GPU (tests/cli/test_check_init.py has it run on one that is pretended)")
    run = run_block(block, tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("start", ["", "import os  # init_process_group\nassert os.environ['RANK'] == '0'\n"])
def test_failing_code_block_is_noticed(start, tmp_path):
    end = "" if start else "assert 1 + 1 == 3\n"
    (block,) = blocks_of("page.md", f"text\n```python\n{start}{end}```\n")
    assert run_block(block, tmp_path).returncode != 0


@pytest.mark.parametrize(("command", "less"), [one for command in RUN for one in in_test_and_sweep(command)])
def test_command_runs(command, less, tmp_path, monkeypatch):
    monkeypatch.delenv("TPKERNELS_SWEEP", raising=False)  # which no user has, as doctor says
    (tmp_path / "data").symlink_to(ROOT / "data")
    for page in PAGES:
        if command in page.read_text():
            write_files(page, tmp_path)
    words = [*command.split()[1:], *less]
    is_forked = words[1] == "tpkernels" and words[2] in FORKED_COMMANDS and not SWEEP
    run = in_forks(words[2:], tmp_path) if is_forked else ran(*words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def in_forks(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command, on the ranks that it would start; tests/cli/test_train_faults.py has it start some."""
    program = folder / "program.py"
    program.write_text(f"import sys\nfrom tpkernels.cli import main\nsys.exit(main({words}))\n")
    return run_on_ranks(int(words[words.index("--tp") + 1]) if "--tp" in words else 1, program)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9.-]+):.*?## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_targets_that_are_named_exist():
    named = {word for command in COMMANDS if command.startswith("make ") for word in command.split()[1:]}
    for page in PAGES:
        named |= {
            word for words in re.findall(r"`make ([\w .=-]+)`", page.read_text()) for word in words.split()
        }
    named = {word for word in named if "=" not in word}  # VERSION=3.9.0
    assert {"demo", "test", "check"} <= named
    assert named <= make_targets(), named - make_targets()


def test_every_command_is_one_that_some_test_runs():
    for command in COMMANDS:
        assert command.split()[0] in ("make", "python"), f"nothing runs {command!r}"


def test_make_help_lists_every_target():
    make = ["make", "-C", str(ROOT), "--no-print-directory", "help"]
    shown = subprocess.run(make, capture_output=True, text=True, timeout=patient(60), check=True).stdout
    for target in make_targets():
        assert f"make {target} " in shown


@pytest.mark.parametrize("target", ["check-torch", "check-triton"])
def test_make_asks_for_the_version_to_try(target):
    make = ["make", "-C", str(ROOT), "--dry-run", target]
    # tests run under `make check-torch VERSION=...`, too, which hands its variables on
    named = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "VERSION")}
    told = subprocess.run(make, capture_output=True, text=True, timeout=patient(60), check=False, env=named)
    assert told.returncode == 2
    assert f"{target}: expected the version to try, as in VERSION=" in told.stderr


def test_ci_runs_the_readmes_test_command_and_builds_the_site():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make site"} <= {line.split(" # ")[0].strip() for line in script}
    assert "make test" in COMMANDS


def test_index_lists_every_page_once_and_the_readme_is_short():
    index = (ROOT / "docs" / "README.md").read_text()
    assert re.findall("^## (.*)$", index, re.MULTILINE) == [
        "Quick start",
        "How-to",
        "Reference",
        "Explanations",
        "Measured",
    ]
    listed = re.findall(r"^- \[.*?\]\((.*?)\): .*\.$", index, re.MULTILINE)
    assert sorted(listed) == sorted(
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"
    )
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_says_for_whom_it_is(page):
    if page.parent.name == "adr" or page == ROOT / "README.md":
        return
    _, blank, first = page.read_text().splitlines()[:3]
    assert not blank
    assert first.startswith("For ")


def test_links_lead_somewhere():
    links = [(page, *link) for page in PAGES for link in LINK.findall(page.read_text())]
    leading_nowhere = [
        f"{page.name}: {target}#{anchor}"
        for page, target, anchor in links
        if not (page.parent / target).exists()
        or (anchor and anchor not in anchors_of(page.parent / target if target else page))
    ]
    assert leading_nowhere == []


@cache
def anchors_of(page: Path) -> set[str]:
    """Of headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


SAID_BY = {  # what an example prints last or most
    "groups.py": "three times over",
    "grpo.py": "on 2 ranks as on one",
    "shards.py": "A15 (64, 512)",
}


@cache
def run_example(name: str) -> subprocess.CompletedProcess[str]:
    """On two ranks, if it forms a process group."""
    with TemporaryDirectory() as folder:
        text = (ROOT / "examples" / name).read_text()
        return run_block(Block(name, 0, "python", text), Path(folder))


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(example):
    ran = run_example(example.name)
    assert ran.returncode == 0, ran.stderr
    assert SAID_BY[example.name] in ran.stdout


def test_shards_are_the_lessons():
    """Sixteen pieces of [1024, 32], then sixteen of [64, 512]."""
    shapes = re.findall(r"A(\d+) (\(.*?\))", run_example("shards.py").stdout)
    assert shapes == [(str(i % 16), "(1024, 32)" if i < 16 else "(64, 512)") for i in range(32)]
