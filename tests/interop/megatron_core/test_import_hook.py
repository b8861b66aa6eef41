"""The import hook: which of Megatron's modules are ours, and how it ends."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tpkernels.interop.megatron_core import import_hook as hook

ROOT = Path(__file__).parents[3]


def test_modules_of_megatron_come_from_here_and_the_rest_from_megatron():
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core, whose imports are hooked")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.interop.megatron_core.import_hook_program"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "state": ["initialize", None],
        "tensor_parallel": ["rng", "utilities"],
        "left": ["megatron.core.parallel_state", "megatron.core.tensor_parallel.mappings"],
        "scratch": ["GlobalMemoryBuffer", "AssertionError"],
        "streams": ["rng", "rng", True],
        "layers": ["tpkernels.layers.attributes", "linear"],
        "attention": "attention",
        "groups": {"tp": 2, "pp": 2, "dp": 2, "mp": 4, "tp_ep_pp": 4},
        "twice": "nothing",
        "imported": [],
        "after": "megatron.core.parallel_state",
        "late": ["MegatronImportedError", True],
    }


def test_install_waits_for_an_import_and_uninstall_takes_it_back(monkeypatch):
    for name in [name for name in sys.modules if f"{name}.".startswith("megatron.core.")]:
        monkeypatch.delitem(sys.modules, name)
    before = list(sys.meta_path)
    with hook.installed():
        hook.install()
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before
    hook.uninstall()
    assert sys.meta_path == before


def test_too_late_is_an_error_with_a_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", sys)
    with pytest.raises(
        hook.MegatronImportedError, match=r"but .*megatron\.core\.parallel_state.* imported already"
    ):
        hook.install()


def test_every_name_that_is_served_exists():
    from importlib import import_module

    for module, homes in hook.SERVED.items():
        for home, names in homes.items():
            if home in ("linear", "attention"):  # which need Megatron
                continue
            ours = import_module(f"tpkernels.interop.megatron_core.{home}")
            for name in names or ours.__all__:
                assert hasattr(ours, name), (module, name)
