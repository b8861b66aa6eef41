"""The extension: the right build is loaded, a wrong one never runs, and the first use builds it once."""

import os
import shutil
import subprocess
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.golden import chain, wrap
from tests.buckets.ways import on_ranks
from tests.checks import error_of
from tests.programs import until
from tests.ranks import RankPool
from tpkernels import extension as _ext
from tpkernels.buckets import build as extension_build
from tpkernels.buckets import gradients
from tpkernels.buckets.build import CannotBuild, build, problem_with_extension
from tpkernels.extension import Extension, ExtensionState


def test_extension_is_loaded_and_says_what_it_was_built_for():
    assert _ext.extension().state is ExtensionState.LOADED
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"built for torch {minor}." in _ext.extension().detail


FORGED = {  # what lies there, and what is said
    "another torch": (
        b"\x7fELF tpkernels built with torch 1.13.1\0",
        f"built for torch 1.13.1, but torch {torch.__version__} runs; rebuild: pip install",
    ),
    # tried: it gets as far as the loader, which refuses the forgery
    "another patch release": (
        b"tpkernels built with torch %d.%d.99" % tuple(map(int, torch.__version__.split(".")[:2])),
        "Could not load this library",
    ),
    "damaged": (b"not a library", "not ours or damaged"),
}


@pytest.mark.parametrize(("content", "said"), FORGED.values(), ids=FORGED)
def test_extension_that_cannot_be_right_is_refused(content, said, tmp_path):
    path = tmp_path / "_C.so"
    path.write_bytes(content)
    found = _ext.load(path)
    assert found.state is ExtensionState.UNUSABLE
    assert said in found.detail


def test_a_library_that_cannot_be_read_is_said_and_python_does_its_steps(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    library = tmp_path / "_C.so"
    library.write_bytes(b"tpkernels built with torch")
    monkeypatch.setattr(_ext, "installed_library", lambda: library)
    for look in ("exists", "read_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(type(library), look, refuse)
            found = _ext.extension.__wrapped__()
        assert (found.state, found.module) == (ExtensionState.UNUSABLE, None)
        assert "Permission denied" in found.detail


def test_a_library_without_a_python_module_serves_buckets():
    """It was built where Python's headers are not."""
    math = PathFinder.find_spec("_struct")
    assert math is not None
    assert _ext._python_module(Path(str(math.origin))) is None


@pytest.fixture
def not_installed(monkeypatch, tmp_path):
    """An install without the extension, and an empty cache."""
    monkeypatch.setattr(_ext, "installed_library", lambda: None)
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))


def test_absent_extension_is_no_error(not_installed):
    found = _ext.extension.__wrapped__()
    assert found.state is ExtensionState.ABSENT
    assert "the first GradientBuckets builds it" in found.detail
    assert "pip install --no-build-isolation" in found.detail


def test_library_of_the_first_use_is_loaded_once_it_is_built(not_installed):
    library = _ext.library_of_first_use()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    library.with_name("lock").touch()
    assert _ext.extension.__wrapped__().state is ExtensionState.ABSENT
    library.with_name("lock").unlink()
    assert f"{library} is not ours or damaged" in _ext.extension.__wrapped__().detail


@pytest.mark.parametrize("place", ["the library", "its folder", "the cache"])
def test_a_planted_library_is_neither_loaded_nor_built_upon(place, not_installed, monkeypatch, tmp_path):
    library = _ext.library_of_first_use()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"planted")
    {"the library": library, "its folder": library.parent, "the cache": tmp_path}[place].chmod(0o777)
    monkeypatch.setattr(_ext, "load", lambda _: pytest.fail("it runs"))
    found = _ext.extension.__wrapped__()
    assert found.state is ExtensionState.UNUSABLE
    assert "can be written by other users" in found.detail
    library.unlink()
    monkeypatch.setattr(extension_build, "_compile", lambda *_: pytest.fail("it builds"))
    if place != "the library":
        with pytest.raises(CannotBuild, match="can be written by other users"):
            build(library)


def test_each_text_of_the_sources_has_its_own_library(not_installed, monkeypatch, tmp_path):
    first = _ext.library_of_first_use()
    assert torch.__version__ in first.parent.name
    assert first == _ext.library_of_first_use()
    changed = shutil.copytree(_ext.sources(), tmp_path / "changed")
    monkeypatch.setattr(_ext, "sources", lambda: changed)
    assert first == _ext.library_of_first_use()
    (changed / "turn.h").write_text("// another\n")
    assert first != _ext.library_of_first_use()


# Stand-ins for the program that builds: each notes its process, and holds torch's lock as torch does, which
# takes seconds to import.
LOCKED = """
import os, sys, time
from importlib.util import find_spec
from pathlib import Path
sys.path.append(f"{find_spec('torch').submodule_search_locations[0]}/utils")
from file_baton import FileBaton
folder = Path(sys.argv[-1])
baton = FileBaton(folder / "lock")
if not baton.try_acquire():
    (folder / f"waits-{os.getpid()}").touch()
    baton.wait()
    sys.exit(not (folder / "tpkernels_C.so").exists())
try:
    with (folder / "builders").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    BUILD
finally:
    baton.release()
"""
BUILDS = '(folder / "tpkernels_C.so").write_text("a library")'
FAILS = 'print("all.cpp:1: error: no such header\\nand more of it"); sys.exit(1)'
HANGS = "time.sleep(600)"
UNTIL_ALL_WAIT = 'while len(list(folder.glob("waits-*"))) < 3: time.sleep(0.01)\n    '


@pytest.fixture
def library(tmp_path):
    return tmp_path / "extension" / "tpkernels_C.so"


def builders(library):
    file = library.with_name("builders")
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def built_by(program, library):
    with patch.object(extension_build, "_BUILD", LOCKED.replace("BUILD", program)):
        return *error_of(build, library), library.exists()


def test_one_rank_builds_for_all(library):
    with RankPool(4) as own:
        answers = own.run(built_by, UNTIL_ALL_WAIT + BUILDS, library)
    assert [(kind, exists) for kind, _, exists in answers] == [("nothing", True)] * 4
    assert len(builders(library)) == 1
    assert not list(library.parent.glob("log-*"))


def test_a_failed_build_is_an_error_of_all_ranks_that_waited(library):
    with RankPool(4) as own:
        answers = own.run(built_by, UNTIL_ALL_WAIT + FAILS, library)
    assert [(kind, exists) for kind, _, exists in answers] == [("CannotBuild", False)] * 4
    texts = sorted(text.partition(" (the ")[0] for _, text, _ in answers)
    waited = "it failed, here or in the process that was waited for"
    assert texts == ["all.cpp:1: error: no such header", waited, waited, waited]
    assert len(builders(library)) == 1


def test_a_build_after_a_failure_tries_again(library, capsys):
    assert built_by(FAILS, library)[0] == "CannotBuild"
    assert built_by(BUILDS, library)[0] == "nothing"
    told = f"tpkernels: building the C++ extension once, into {library.parent}\n"
    assert capsys.readouterr().err == told * 2
    assert len(builders(library)) == 2


def test_a_build_that_hangs_is_ended_and_releases_the_lock(library, monkeypatch):
    """Its time begins once it builds: a busy machine may take longer to start it."""

    class Begun(subprocess.Popen):
        def wait(self, timeout=None):
            until(lambda: builders(library))
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    monkeypatch.setattr(extension_build, "BUILD_SECONDS", 1.0)
    kind, text, _ = built_by(HANGS, library)
    assert kind == "CannotBuild"
    assert text == f"it took longer than 1 s; if no process is building, remove {library.parent}"
    (pid,) = builders(library)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not library.with_name("lock").exists()


def test_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotBuild, match=r"Not a directory.*; set TPKERNELS_CACHE_DIR to a folder"):
        build(tmp_path / "file" / "extension" / "tpkernels_C.so")
    with pytest.raises(CannotBuild, match="there is no folder for it; set TPKERNELS_CACHE_DIR"):
        build(None)


@pytest.fixture
def absent(monkeypatch, tmp_path):
    monkeypatch.setattr(extension_build, "extension", lambda: Extension(ExtensionState.ABSENT, "not built"))
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))


def test_what_stands_in_the_way_is_an_import_error_that_says_what_to_do(absent, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "ccache-of-nobody g++")
    assert problem_with_extension() == (
        "ImportError",
        "the C++ extension is not built, and cannot be built here: there is no C++ compiler: "
        "'ccache-of-nobody g++' is not on the PATH; install one for C++20 (apt install g++, say), or name "
        "one in CXX; until then use torch.nn.parallel.DistributedDataParallel",
    )
    monkeypatch.delenv("CXX")
    (tmp_path / "c++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    kind, text = problem_with_extension()
    assert kind == "ImportError"
    assert "ninja is not on the PATH; install it: pip install ninja; until then use torch.nn.para" in text
    found = Extension(ExtensionState.UNUSABLE, "built for another")
    monkeypatch.setattr(extension_build, "extension", lambda: found)
    expected = "ImportError", "tpkernels' C++ extension is unusable: built for another"
    assert problem_with_extension() == expected


@on_ranks(2)
def test_all_ranks_raise_if_one_has_no_extension():
    found = ("ImportError", "there is no C++ compiler") if dist.get_rank() == 1 else None
    with (
        patch.object(gradients, "problem_with_extension", lambda: found),
        pytest.raises(ImportError, match=r"on rank 1: there is no C\+\+ compiler$"),
    ):
        wrap(chain(1))
