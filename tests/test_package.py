"""What is installed, and what importing it costs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.patience import patient
from tests.programs import ran
from tpkernels.cli.doctor import TESTED_TORCH, TESTED_TRITON

ROOT = Path(__file__).parents[1]


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=patient(300),
        env=os.environ | variables,
        check=False,
    )


def test_importing_the_package_loads_neither_torch_nor_triton():
    found = run("-c", "import sys, tpkernels; print({'torch', 'triton', 'numpy'} & set(sys.modules))")
    assert found.stdout == "set()\n", found.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The sources as version control knows them, unpacked elsewhere: builds leave no trace here."""
    copy = tmp_path_factory.mktemp("source") / "tpkernels"
    ignored = shutil.ignore_patterns(".*", "*.so", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory) -> str:
    """A search path on which torch cannot be imported, as in an isolated build."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise ImportError('No module named torch')")
    return str(folder)


@pytest.fixture(scope="module")
def built(source, no_torch) -> subprocess.CompletedProcess[str]:
    """A source distribution, and the wheel of it, made without torch."""
    variables = {"PYTHONPATH": no_torch, "TPKERNELS_REQUIRE_EXT": "0"}
    return run("-m", "build", "--no-isolation", "--outdir", "dist", cwd=source, **variables)


def test_sdist_holds_sources_and_type_marker(source, built):
    assert built.returncode == 0, built.stderr
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[-1] for name in files.getnames()}
    wanted = {
        str(path.relative_to(source))
        for path in (source / "csrc").rglob("*")
        if path.suffix in (".cpp", ".h", ".py") or path.name == "cxx_flags"
    }
    assert len(wanted) > 6
    wanted |= {"tpkernels/py.typed", "tpkernels/__init__.py", "tpkernels/interop/__init__.pyi"}
    wanted |= {"setup.py", "LICENSE", "README.md", "constraints.txt"}
    assert wanted <= names, wanted - names


@pytest.mark.sweep
def test_wheel_beside_an_installed_torch_downloads_nothing(source, built):
    """Its bounds take the torch and Triton of set-up: the CPU build with its local version, too."""
    (wheel,) = (source / "dist").glob("*.whl")
    told = ran("-m", "pip", "install", "--dry-run", "--no-index", wheel)
    assert told.returncode == 0, told.stderr
    assert re.search(r"already satisfied: torch<[\d.]+,>=[\d.]+ in ", told.stdout)


FIRST_USE = """
import torch
import torch.distributed as dist
import tpkernels

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = torch.nn.Linear(2, 1, bias=False)
buckets = tpkernels.GradientBuckets(module, dist.group.WORLD)
module(torch.tensor([[1.0, 2.0]])).sum().backward()
buckets.finish()
print(tpkernels.__file__, module.weight.grad.tolist())
dist.destroy_process_group()
"""


@pytest.mark.sweep
def test_build_without_torch_leaves_the_extension_to_its_first_use(source, built, tmp_path):
    printed = built.stdout + built.stderr
    assert "the C++ extension is left out (torch cannot be imported" in printed
    assert "The first GradientBuckets builds it" in printed
    assert "pip install --no-build-isolation" in printed
    installed = tmp_path / "installed"
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert {"tpkernels/py.typed", "tpkernels/interop/__init__.pyi"} <= set(files.namelist())
        assert not [name for name in files.namelist() if name.endswith(".so")]
        files.extractall(installed)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # in half the time
    compiler.chmod(0o755)
    folders = {"PYTHONPATH": str(installed), "TPKERNELS_CACHE_DIR": str(tmp_path / "cache")}
    used = run("-c", FIRST_USE, cwd=installed, **folders, CXX="/nowhere/c++")
    assert used.returncode != 0
    assert "there is no C++ compiler: '/nowhere/c++'" in used.stderr
    for built_now in (1, 0):
        used = run("-c", FIRST_USE, cwd=installed, **folders, CXX=str(compiler))
        assert used.stdout == f"{installed / 'tpkernels/__init__.py'} [[1.0, 2.0]]\n", used.stderr
        assert used.stderr.count("tpkernels: building the C++ extension once, into ") == built_now, (
            used.stderr
        )


WHEEL = ("-m", "build", "--wheel", "--no-isolation", "--outdir")


def without_compiler(source: Path, folder: str, required: str) -> subprocess.CompletedProcess[str]:
    variables = {"CXX": "/bin/false", "CC": "/bin/false", "TPKERNELS_REQUIRE_EXT": required}
    return ran(*WHEEL, folder, cwd=source, environment=variables)


@pytest.mark.sweep
def test_build_without_compiler_is_pure_python(source):
    build = without_compiler(source, "uncompiled", "0")
    assert build.returncode == 0, build.stderr
    assert "the C++ extension is left out" in build.stdout + build.stderr
    (wheel,) = (source / "uncompiled").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert "tpkernels/__init__.py" in files.namelist()
        assert not [name for name in files.namelist() if name.endswith(".so")]


@pytest.mark.sweep
def test_build_fails_without_the_extension_where_it_is_required(source, no_torch):
    build = run(*WHEEL, "required", cwd=source, PYTHONPATH=no_torch, TPKERNELS_REQUIRE_EXT="1")
    assert build.returncode != 0
    assert "TPKERNELS_REQUIRE_EXT=1, but the C++ extension cannot be built" in build.stdout + build.stderr
    assert without_compiler(source, "required", "1").returncode != 0
    assert not list(source.glob("required/*.whl"))


USER_PROGRAM = """
import tpkernels
from tpkernels.interop import mpu

mpu.initialize_model_parallel(tensor_model_parallel_size_=2)
mpu.get_tensor_model_parallel_rank() + 1
state: tpkernels.ParallelState = tpkernels.initialize_model_parallel(2, 1)
tpkernels.interop.mpu.is_unitialized()
"""
MISTAKES = {
    "misspelt": "tpkernels.initialise_model_parallel(2)",
    "underscore_missing": "mpu.initialize_model_parallel(tensor_model_parallel_size=2)",
    "wrong_type": "rank: str = mpu.get_tensor_model_parallel_rank()",
}


def mypy(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,triton.*]\nfollow_imports = skip\n")
    arguments = ("-m", "mypy", "--strict", "--follow-imports=silent", "program.py")
    return run(*arguments, cwd=folder, MYPYPATH=str(ROOT), MYPY_CACHE_DIR=str(folder / "cache"))


@pytest.mark.sweep
def test_users_type_checker_accepts_right_programs_and_finds_mistakes(tmp_path):
    program = USER_PROGRAM + "".join(f"{line}  # {name}\n" for name, line in MISTAKES.items())
    told = mypy(program, tmp_path).stdout
    wrong = {int(line.split(":")[1]) for line in told.splitlines() if line.startswith("program.py:")}
    lines = program.splitlines()
    assert {lines[number - 1].split("# ")[-1] for number in wrong} == set(MISTAKES), told


def test_versions_that_are_allowed_are_those_that_were_tried():
    """The same bounds in pyproject.toml, in `doctor` and on docs/ci.md; the pins lie within."""
    requirements = pytest.importorskip("packaging.requirements")
    project = (ROOT / "pyproject.toml").read_text()
    page = (ROOT / "docs" / "ci.md").read_text()
    pins = dict(re.findall(r"^(torch|triton)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, (oldest, newest) in {"torch": TESTED_TORCH, "triton": TESTED_TRITON}.items():
        (line,) = re.findall(rf'^    "({name}[<>=][^";]*)', project, re.MULTILINE)
        allowed = requirements.Requirement(line).specifier
        major, minor = map(int, newest.split("."))
        assert allowed == requirements.Requirement(f"x>={oldest},<{major}.{minor + 1}").specifier
        assert pins[name] in allowed
        assert f"| {pins['torch']} (CPU) | {pins['triton']} |" in page
        assert f"before {major}.{minor + 1}" in page


def test_no_text_installs_from_an_index_what_is_on_none():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.yml")]
    files += [*ROOT.glob("tpkernels/**/*.py"), ROOT / "setup.py", ROOT / "Makefile"]
    by_name = re.compile(r"""pip install[^`\n]*?[ '"]tpkernels(?! @)['"\[\s`]""")
    assert by_name.search("- run: pip install triton==3.7.1 numpy tpkernels # the Triton")
    assert by_name.search("pip install 'tpkernels[pictures]'")
    found = {path.name for path in files if by_name.search(path.read_text())}
    assert not found


def test_folders_that_commands_write_into_are_in_every_clone():
    """pytest-benchmark makes none for its --benchmark-json."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    folders = {name for page in pages for name in re.findall(r"--benchmark-json (\w+)/", page.read_text())}
    assert folders == {"out"}
    assert (ROOT / "out" / ".gitignore").read_text().endswith("\n*\n!.gitignore\n")
    assert "out/" not in (ROOT / ".gitignore").read_text().splitlines()
