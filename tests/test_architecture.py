"""The house rules that a reviewer would otherwise have to remember."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tpkernels"
MAY_IMPORT = {  # room -> rooms it may enter
    "env": "",
    "errors": "",
    "files": "",
    "extension": "files",
    "tp_invariance": "",
    "journal": "",
    "explanation": "journal",
    "testing": "explanation journal",
    "reserved_sms": "extension files",
    "groups": "env errors tp_invariance",
    "comm": "env errors extension files journal reserved_sms tp_invariance",
    "buckets": "comm errors extension files groups tp_invariance",
    "kernels": "env extension files tp_invariance",
    "dispatch": "env errors extension files journal kernels planning reserved_sms tp_invariance",
    "ops": "comm dispatch env extension journal kernels tp_invariance",
    "layers": "env errors groups ops tp_invariance",
    "models": "groups layers ops tp_invariance",
    "checkpoints": "comm errors files groups layers models ops",
    "parallel_state": "groups",
    "interop": "checkpoints comm errors files groups layers models ops parallel_state tp_invariance",
    "optim": "checkpoints comm groups interop layers",
    "pictures": "",
    "planning": "buckets checkpoints comm groups kernels layers models",
    "training": "buckets checkpoints comm errors files groups interop layers "
    "models ops pictures planning tp_invariance",
    "gate": "files",
    "registered": "dispatch gate kernels planning",
    "cli": None,  # on top: anything
}
SHARED_NAMES = {  # public classes and type aliases of one name in several files, and why
    "layers, and what Megatron is given under its own names": "ColumnParallelLinear RowParallelLinear "
    "VocabParallelEmbedding LayerNorm RMSNorm",
    "type aliases that their own rooms alone use": "Key Options Pair Problem",
}
MAX_LINES = 600  # ask whether a longer file holds two ideas
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("tpkernels", "tests", "bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
ROOM_FILES = [path for path in FILES if path.parts[0] == "tpkernels" and path.name[:2] != "__"]


@cache
def text_of(path: Path) -> str:
    return (ROOT / path).read_text()


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def room_of(path: Path) -> str:
    return path.parts[1].removesuffix(".py")


def rooms_entered(source: str) -> set[str]:
    """The rooms of ours that a source imports from."""
    names = {name.split(".")[1] for name in modules_imported(source) if name.startswith("tpkernels.")}
    return names - {"__version__"}


def trespasses(room: str, source: str) -> set[str]:
    allowed = MAY_IMPORT[room]
    return set() if allowed is None else rooms_entered(source) - {room, *allowed.split()}


def has_global(source: str) -> bool:
    """Files without the word are not parsed."""
    return "global " in source and any(isinstance(node, ast.Global) for node in ast.walk(parsed(source)))


def modules_imported(source: str) -> set[str]:
    """All that are imported anywhere: in functions, and for type checkers alone, too."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def foreign_imports(source: str) -> set[str]:
    """Top-level packages outside the standard library and ourselves."""
    names = {name.split(".")[0] for name in modules_imported(source)}
    return names - set(sys.stdlib_module_names) - {"tpkernels"}


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Modules that import themselves by way of others, those of a circle together.

    sources: text by name of the module
    """
    imports = {name: modules_imported(text) & sources.keys() - {name} for name, text in sources.items()}
    reached = dict(imports)
    for _ in sources:  # one step further each time
        reached = {name: its.union(*(imports[other] for other in its)) for name, its in reached.items()}
    inside = sorted(name for name, its in reached.items() if name in its)
    return [
        list(own)
        for own in dict.fromkeys(
            tuple(other for other in inside if other in reached[name] and name in reached[other])
            for name in inside
        )
    ]


def types_named_by(node: ast.stmt) -> list[str]:
    """The public class or type alias that a statement of a module defines: alias names are CamelCase."""
    if isinstance(node, ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign | ast.AnnAssign) and not ast.unparse(node.value or node).startswith(
        "TypeVar("
    ):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name) and not target.id.isupper()]
    else:
        names = []
    return [name for name in names if name[0].isupper()]


def types_defined_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Public classes and type aliases of one name, with the files that define them.

    sources: text by name of the file
    """
    files: dict[str, list[str]] = {}
    for name, text in sources.items():
        for node in parsed(text).body:
            for defined in types_named_by(node):
                files.setdefault(defined, []).append(name)
    return {name: its for name, its in files.items() if len(its) > 1}


def broken(rule):
    """What each file does that a rule forbids, by file."""
    found = {str(path): rule(path) for path in FILES}
    return {path: what for path, what in found.items() if what}


def test_files_keep_to_their_rooms():
    unknown = {room_of(path) for path in ROOM_FILES} - MAY_IMPORT.keys()
    assert not unknown, "give each room of the house a row in MAY_IMPORT"
    rooms = {path: room_of(path) for path in ROOM_FILES}
    assert broken(lambda path: path in rooms and trespasses(rooms[path], text_of(path))) == {}


def test_files_of_a_room_import_each_other_in_no_circle():
    for room in sorted({room_of(path) for path in ROOM_FILES}):
        paths = [path for path in ROOM_FILES if room_of(path) == room]
        assert circles({".".join(path.with_suffix("").parts): text_of(path) for path in paths}) == [], room


def test_a_type_name_means_one_thing():
    named = {name for names in SHARED_NAMES.values() for name in names.split()}
    found = types_defined_twice({str(path): text_of(path) for path in ROOM_FILES})
    assert {name: files for name, files in found.items() if name not in named} == {}, "rename one of them"
    assert named <= found.keys(), "no longer shared: strike it out"


def test_files_are_not_longer_than_one_idea():
    lengths = {path: len(text_of(path).splitlines()) for path in FILES}
    assert broken(lambda path: lengths[path] > MAX_LINES and lengths[path]) == {}, "two ideas: part them"


def test_no_file_has_a_global_statement():
    assert broken(lambda path: has_global(text_of(path))) == {}


@pytest.mark.parametrize(
    "file", ["files.py", "env.py", *(f"groups/{name}.py" for name in ("draw", "kinds", "plan", "sizes"))]
)
def test_a_file_needs_the_standard_library_alone(file):
    assert not foreign_imports((PACKAGE / file).read_text())


def test_pictures_need_matplotlib_alone_and_only_to_draw():
    for path in (PACKAGE / "pictures").glob("*.py"):
        assert foreign_imports(path.read_text()) <= {"matplotlib"}, path
        for node in ast.parse(path.read_text()).body:  # what is imported when the file is
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not foreign_imports(ast.unparse(node)), path


def test_groups_are_created_in_four_files():
    creating = ("_new_process_group_helper(", "new_group(")
    creators = [path for path in ROOM_FILES if any(name in text_of(path) for name in creating)]
    assert [path.name for path in creators] == [
        "memory.py",
        "qualify_ranks.py",
        "c10d.py",
        "initialize.py",
    ]


def test_rules_see_planted_faults():
    assert trespasses("kernels", "from tpkernels.comm.calls import x") == {"comm"}
    assert trespasses("comm", "def f():\n    import tpkernels.kernels.linear") == {"kernels"}
    assert trespasses("groups", "from tpkernels import layers") == {"layers"}
    assert trespasses("layers", "from tpkernels.kernels import linear") == {"kernels"}
    assert not trespasses("ops", "from tpkernels.comm import a\nfrom tpkernels.kernels import b")
    assert not trespasses("cli", "from tpkernels.ops import anything")
    shared = {
        "a": "class Plan: ...\nclass _Own: ...",
        "b": "class _Own: ...\nclass Plan: ...",
    }
    assert types_defined_twice(shared | {"c": "class Other: ..."}) == {"Plan": ["a", "b"]}
    assert types_defined_twice({"a": "Key = tuple[int, str]", "b": "Key: TypeAlias = str"}) == {
        "Key": ["a", "b"]
    }
    assert types_defined_twice({"a": 'T = TypeVar("T")\nSIZE = 1', "b": 'T = TypeVar("T")\nSIZE = 2'}) == {}
    assert has_global("def f():\n    global x\n    x = 1")
    there, back = "def f():\n    from r import b", "if TYPE_CHECKING:\n    from r.a import x"
    assert circles({"r.a": there, "r.b": back, "r.c": "import r.a"}) == [["r.a", "r.b"]]
    assert circles({"r.a": "import r.b", "r.b": "import r.c", "r.c": "import r.a"}) == [["r.a", "r.b", "r.c"]]
    assert circles({"r.a": "import r.b", "r.b": "import r.c", "r.c": "import os"}) == []
    assert foreign_imports("import os, torch.nn\nfrom numpy import array") == {"torch", "numpy"}
