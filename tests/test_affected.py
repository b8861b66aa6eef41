"""Which tests a change reaches."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import affected
from tests.affected import changed_since, nobody_reads, reached, selected
from tests.imports import Graph

ROOT = Path(__file__).parents[1]
FAULTS = {  # room -> a file of it, one line of that, the line with a fault, and a test that must fail
    "topology": ("shard.py", "return size // ranks", "return size // ranks + 1", "topology/test_shard.py"),
    "child": (".py", "if code >= 0", "if code > 0", "test_child.py"),
    "env_flag": (".py", 'return value == "1"', 'return value != "1"', "test_env_flag.py"),
    "files": (".py", 'decode("utf-8")', 'decode("utf-16")', "test_files.py"),
    "gpus": (".py", "return max(flops /", "return min(flops /", "planning/test_step_time.py"),
    "tp_invariance": (".py", "return segments // ranks", "return segments * ranks", "test_tp_invariance.py"),
    "messages": (".py", "(?:cc|cpp|h|hpp)", "(?:cpp)", "test_messages.py"),
    "saying": (".py", "return first", "return True", "test_saying.py"),
    "extension": (".py", "(built_with) != _minor", "(built_with) == _minor", "buckets/test_ext.py"),
    "lazy_names": (".py", "return {name: module for", "return {module: name for", "test_lazy_names.py"),
    "runtime": ("random.py", "if self._cuda_only", "if not self._cuda_only", "runtime/test_random.py"),
    "parallel_state": ("todays.py", "_size != size", "_size == size", "test_parallel_state_today.py"),
    "comm": ("schedule.py", "(part < longer)", "(part <= longer)", "comm/test_schedule.py"),
    "buckets": ("layout.py", "-(-value // multiple)", "(value // multiple)", "buckets/test_bucket_layout.py"),
    "kernels": ("tiles.py", "return (_INTERPRETED,)", "return ()", "kernels/test_tiles.py"),
    "dispatch": ("problem.py", "tokens, self.in", "tokens, self.out", "dispatch/test_candidates.py"),
    "gate": ("accuracy.py", "- exact", "+ exact", "gate/test_catalog.py"),
    "ops": ("local/norm.py", "return dx if needs_dx", "return dx if not needs_dx", "ops/test_behaviour.py"),
    "streams": ("execution.py", "before == 0 and", "before > 0 and", "streams/test_cases.py"),
    "layers": ("init.py", "return master", "return -master", "layers/test_init.py"),
    "models": ("gpt.py", "first + count,", "first + count - 1,", "models/test_gpt.py"),
    "interop": ("safetensors.py", "return full", "return {}", "interop/test_safetensors.py"),
    "optim": ("muon.py", "return x.T if", "return x if", "optim/test_muon.py"),
    "planning": ("memory.py", "+ max(self.activ", "+ min(self.activ", "planning/test_memory.py"),
    "training": ("measures.py", "return 3 * 2 *", "return 3 *", "training/test_measures.py"),
    "pictures": ("page.py", "return escape(writable(words))", "return words", "pictures/test_page.py"),
    "cli": ("plan.py", "return 0", "return 1", "cli/test_commands.py"),
}
IN_AN_INSTANT = ["topology", "env_flag"]


@pytest.fixture(scope="module")
def graph():
    return Graph(ROOT)


def faulty(room):
    file = FAULTS[room][0]
    return f"tpkernels/{room}{file}" if file == ".py" else f"tpkernels/{room}/{file}"


def failed_with_faults(rooms, folder):
    """Test files that fail in a copy of this checkout."""
    there = shutil.ignore_patterns("__pycache__", ".*", "build", "out")
    for name in ("tpkernels", "tests", "bench", "csrc", "docs", "data", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=there)
    for name in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy(ROOT / name, folder)
    for room in rooms:
        _, line, fault, _ = FAULTS[room]
        path = folder / faulty(room)
        path.write_text(path.read_text().replace(line, fault))
    tests = [f"tests/{FAULTS[room][-1]}" for room in rooms]
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(["-x"] if len(rooms) == 1 else [])]
    command = [sys.executable, "-m", "pytest", *plain, *tests]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "TPKERNELS_SWEEP": "0",
        "TPKERNELS_REQUIRE_EXT": "1",  # so that a missing extension fails tests, and skips none
    }
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    told = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {test.partition("::")[0].removeprefix("tests/") for test in told}


def test_every_file_is_reached_by_a_test_or_it_is_said_why_not(graph):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout: which files are tracked is not known")
    files = [path for path in tracked.stdout.splitlines() if (ROOT / path).exists()]
    unknown = [path for path in files if not reached(graph, path) and not nobody_reads(path)]
    assert unknown == []


def test_every_room_has_a_planted_fault():
    rooms = {
        path.name.removesuffix(".py") for path in (ROOT / "tpkernels").glob("[a-z]*") if path.name[0] != "_"
    }
    assert rooms - {"py.typed"} == FAULTS.keys()


@pytest.mark.parametrize("room", FAULTS)
def test_test_that_a_fault_turns_red_is_selected(graph, room):
    file, (_, line, fault, test) = faulty(room), FAULTS[room]
    text = (ROOT / file).read_text()
    assert text.replace(line, fault) != text, f"{file} holds no {line!r} any more: plant another fault"
    chosen, far = selected(graph, [file])
    assert f"tests/{test}" in [one.test for one in chosen]
    assert not {one.test for one in chosen} & {one.test for one in far}


def test_faults_turn_tests_red(tmp_path):
    assert failed_with_faults(IN_AN_INSTANT, tmp_path) == {FAULTS[room][-1] for room in IN_AN_INSTANT}


@pytest.mark.sweep
@pytest.mark.parametrize("room", [room for room in FAULTS if room not in IN_AN_INSTANT])
def test_fault_turns_its_test_red(room, tmp_path):
    assert failed_with_faults([room], tmp_path) == {FAULTS[room][-1]}


def write(folder, texts):
    for name, text in texts.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "pyproject.toml").touch()
    return Graph(folder)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("import tpkernels.a", {"tpkernels.a"}),
        ("def f():\n    from tpkernels.a import x", {"tpkernels.a"}),
        ("if TYPE_CHECKING:\n    import tpkernels.a\nelse:\n    import tpkernels.b", {"tpkernels.b"}),
        ("from tpkernels import a, Given", {"tpkernels.a", "tpkernels.b"}),
        ("from tpkernels import own", {"tpkernels"}),
        ("import tpkernels\ntpkernels.Given(tpkernels.c)", {"tpkernels.b", "tpkernels.c"}),
        ("import tpkernels as t\nt.own", {"tpkernels"}),
        ('patch("tpkernels.a.x")', {"tpkernels.a"}),
        ('run("from tpkernels import Given")', {"tpkernels.b"}),
        ('run(python, "-m", "tpkernels", "plan")', {"tpkernels.__main__", "tpkernels.cli.plan"}),
        ('"""Of `tpkernels.a`."""\nx = launcher("k")', {"tpkernels.kernels.k"}),
        ("def test(ranks2): ...", {"tests.ranks"}),
    ],
)
def test_module_needs_what_it_names(tmp_path, text, needed):
    package = "own = 1\nif TYPE_CHECKING:\n    from tpkernels.b import Given as Given\nimport tpkernels.a"
    empty = dict.fromkeys(["a", "b", "c", "__main__", "cli/__init__", "cli/plan", "kernels/k"], "")
    files = {f"tpkernels/{name}": text for name, text in {**empty, "__init__": package}.items()}
    graph = write(tmp_path, {**files, "tests/ranks": "", "tests/test_it": text})
    assert graph.needs["tests.test_it"] == needed


def test_chain_is_the_shortest_and_the_nearest_test_comes_first(tmp_path):
    graph = write(
        tmp_path,
        {
            "tpkernels/ops/a": "",
            "tpkernels/ops/b": "import tpkernels.ops.a",
            "tests/layers/test_x": "import tpkernels.ops.a",
            "tests/ops/test_far": "import tpkernels.ops.b",
            "tests/ops/test_a": "import tpkernels.ops.b, tests.helper",
            "tests/helper": "import tpkernels.ops.b",
        },
    )
    assert [str(one) for one in reached(graph, "tpkernels/ops/a.py")] == [
        "tests/ops/test_a.py  tpkernels/ops/b.py > tpkernels/ops/a.py",
        "tests/ops/test_far.py  tpkernels/ops/b.py > tpkernels/ops/a.py",
        "tests/layers/test_x.py  tpkernels/ops/a.py",
    ]
    assert [one.test for one in reached(graph, "tests/helper.py")] == ["tests/ops/test_a.py"]


def test_what_is_far_is_left_out_but_not_in_the_same_room_nor_the_nearest(tmp_path):
    chain = {f"tpkernels/ops/m{i}": f"import tpkernels.ops.m{i + 1}" for i in range(5)}
    room, near, far = "tests/ops/test_room.py", "tests/gate/test_near.py", "tests/gate/test_far.py"
    imported = {room: "m0", near: "m4", far: "m0"}
    tests = {path.removesuffix(".py"): f"import tpkernels.ops.{name}" for path, name in imported.items()}

    def found(graph):
        return [[one.test for one in its] for its in selected(graph, ["tpkernels/ops/m5.py"])]

    assert found(write(tmp_path, {"tpkernels/ops/m5": "", **chain, **tests})) == [[room, near], [far]]
    (tmp_path / room).unlink()
    (tmp_path / near).unlink()
    assert found(Graph(tmp_path)) == [[far], []]


def test_nearest_and_quickest_tests_fill_the_budget(tmp_path):
    seconds = {"ops/test_a": 170, "ops/test_b": 9, "gate/test_c": 2, "gate/test_d": 1, "gate/test_e": 999}
    tests = {f"tests/{name}": "import tpkernels.ops.a" for name in seconds}
    graph = write(tmp_path, {"tpkernels/ops/a": "", **tests})
    (tmp_path / "docs").mkdir()
    rows = [f"| tests/{name}.py | 3 | {took} | 5 |\n" for name, took in seconds.items()]
    (tmp_path / "docs/test-profile.md").write_text("".join(rows))
    for changed, room, others in [
        (["tpkernels/ops/a.py"], "ab", "d"),
        (["tpkernels/ops/a.py", "tests/gate/test_e.py"], "a", "e"),  # which were the nearest to each
    ]:
        expected = {f"tests/ops/test_{name}.py" for name in room}
        expected |= {f"tests/gate/test_{name}.py" for name in others}
        chosen, left_out = selected(graph, changed)
        assert {one.test for one in chosen} == expected
        assert len(left_out) == len(seconds) - len(expected)


def test_changes_are_counted_from_where_the_branch_left_main(tmp_path):
    def git(*arguments):
        user = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name):
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("first")
    commit("second")
    assert changed_since(tmp_path, None) == ["second"]
    (tmp_path / "third").touch()
    assert changed_since(tmp_path, None) == ["third"]
    git("switch", "-c", "branch")
    commit("fourth")
    (tmp_path / "first").write_text("again")
    assert changed_since(tmp_path, None) == ["first", "fourth", "third"]
    assert changed_since(tmp_path, "HEAD") == ["first"]
    with pytest.raises(SystemExit, match="name a commit: make affected BASE="):
        changed_since(tmp_path, "nonsense")


def test_listing_says_why_each_test_runs_and_what_is_left_out(monkeypatch, capsys, graph):
    monkeypatch.setattr(affected, "Graph", lambda _: graph)
    monkeypatch.setattr(
        affected, "changed_since", lambda *_: ["tpkernels/ops/local/norm.py", ".clang-format"]
    )
    assert affected.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert "no test for .clang-format: `make lint` uses it\n" in told
    assert "\ntests/ops/test_behaviour.py  tpkernels/ops/local/norm.py\n" in told
    assert "\ntests/test_architecture.py  reads all sources\n" in told
    assert "test_docs.py" in told.partition("left out")[2]
