"""The house rules that a reviewer would otherwise have to remember."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tpkernels"
MAY_IMPORT = {  # room -> rooms it may enter
    "_renamed": set(),
    "files": set(),
    "topology": set(),
    "pictures": set(),
    "runtime": {"topology"},
    "env_flag": set(),
    "comm": {"env_flag", "files"},
    "buckets": {"comm"},
    "kernels": {"env_flag", "files"},
    "dispatch": {"env_flag", "files", "kernels"},
    "gate": {"dispatch", "files", "kernels"},
    "ops": {"comm", "dispatch", "env_flag", "kernels"},
    "layers": {"buckets", "ops", "runtime", "topology"},
    "models": {"layers", "ops", "runtime", "topology"},
    "planning": {"buckets", "comm", "kernels", "layers", "models", "topology"},
    "training": {
        "buckets",
        "comm",
        "files",
        "interop",
        "layers",
        "models",
        "ops",
        "pictures",
        "planning",
        "runtime",
        "topology",
    },
    "interop": {"files", "models", "layers", "ops", "runtime", "topology", "parallel_state"},
    "parallel_state": {"runtime", "topology"},
    "cli": None,  # on top: anything
}
MAX_LINES = 400
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("tpkernels", "tests", "bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
ROOM_FILES = [path for path in FILES if path.parts[0] == "tpkernels" and path.name[:2] != "__"]


def room_of(path: Path) -> str:
    return path.parts[1].removesuffix(".py")


def rooms_entered(source: str) -> set[str]:
    """The rooms of ours that a source imports from."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "tpkernels":
            names += [f"tpkernels.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("tpkernels.")} - {"__version__"}


def trespasses(room: str, source: str) -> set[str]:
    allowed = MAY_IMPORT[room]
    return set() if allowed is None else rooms_entered(source) - allowed - {room}


def has_global(source: str) -> bool:
    return any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(source)))


def foreign_imports(source: str) -> set[str]:
    """Top-level packages outside the standard library and ourselves."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names) - {"tpkernels"}


@pytest.mark.parametrize("path", ROOM_FILES, ids=str)
def test_file_keeps_to_its_room(path):
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is not a room of the house: give it a row in MAY_IMPORT"
    trespass = trespasses(room, (ROOT / path).read_text())
    assert not trespass, f"{room} may import {sorted(MAY_IMPORT[room])}, not {sorted(trespass)}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_holds_one_idea(path):
    source = (ROOT / path).read_text()
    assert len(source.splitlines()) <= MAX_LINES, "two ideas: part them"
    assert not has_global(source), "no `global` statements"


def test_topology_and_files_stand_on_the_standard_library_alone():
    for path in [*(PACKAGE / "topology").glob("*.py"), PACKAGE / "files.py"]:
        assert not foreign_imports(path.read_text()), path


def test_pictures_need_pillow_for_pixels_alone():
    for path in (PACKAGE / "pictures").glob("*.py"):
        assert foreign_imports(path.read_text()) <= ({"PIL"} if path.name == "png.py" else set()), path


def test_groups_are_created_in_one_place():
    creators = [
        path
        for path in FILES
        if path.parts[0] == "tpkernels"
        and (
            "_new_process_group_helper(" in (ROOT / path).read_text()
            or "new_group(" in (ROOT / path).read_text()
        )
    ]
    assert [path.name for path in creators] == ["c10d.py", "process_groups.py"]


def test_rules_see_planted_faults():
    assert trespasses("kernels", "from tpkernels.comm.calls import x") == {"comm"}
    assert trespasses("comm", "def f():\n    import tpkernels.kernels.linear") == {"kernels"}
    assert trespasses("topology", "from tpkernels import runtime") == {"runtime"}
    assert trespasses("layers", "from tpkernels.kernels import linear") == {"kernels"}
    assert not trespasses("ops", "from tpkernels.comm import a\nfrom tpkernels.kernels import b")
    assert not trespasses("cli", "from tpkernels.ops import anything")
    assert has_global("def f():\n    global x\n    x = 1")
    assert foreign_imports("import os, torch.nn\nfrom numpy import array") == {"torch", "numpy"}
