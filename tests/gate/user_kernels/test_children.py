"""Processes that run the code of others end with who started them."""

from tests.programs import await_end_of, started, until

RUNS = """
from pathlib import Path
from tpkernels.gate.user_kernels.children import answers
print(*answers("tpkernels.gate.user_kernels.children", Path("."), [{"module": "hangs"}]))
"""
HANGS = "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(600)"


def test_code_of_others_ends_with_who_runs_it_even_if_that_is_killed(tmp_path):
    """A session of its own has no terminal that would end it."""
    (tmp_path / "hangs.py").write_text(HANGS)
    said = tmp_path / "pid"
    with started("-c", RUNS, cwd=tmp_path) as parent:
        until(lambda: said.exists() and said.read_text().endswith(" "))
        parent.kill()
        await_end_of([int(said.read_text())])
