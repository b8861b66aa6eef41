"""The API reference is complete: every public name has a docstring, and is on its page."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import tpkernels
from tests.programs import ran

ROOT = Path(__file__).parents[1]
ROOMS = ("ops", "optim", "interop", "parallel_state", "testing")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    made = ran(ROOT / "docs" / "reference.py", folder)
    assert made.returncode == 0, made.stderr
    assert "Warn" not in made.stderr + made.stdout  # which is how pdoc says that it leaves something out
    return folder


PUBLIC = {
    "tpkernels": [name for name in tpkernels.__all__ if name not in ROOMS],
    "tpkernels.ops": ["linear", "row_linear", "vocab_sample"],
    "tpkernels.optim": ["Muon", "hidden_matrices", "require_elementwise"],
    "tpkernels.gate": ["register"],
    "tpkernels.testing": ["assert_overlapped"],
    "tpkernels.interop.mpu": ["get_data_parallel_group", "is_unitialized"],
    "tpkernels.checkpoints.dcp": ["save", "load", "latest"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_page_has_every_public_function(reference, module):
    page = (reference / f"{module.replace('.', '/')}.html").read_text()
    assert not [name for name in PUBLIC[module] if f'id="{name}"' not in page]


def test_arguments_stand_on_lines_of_their_own(reference):
    page = (reference / "tpkernels" / "ops.html").read_text()
    assert "<br />" in page[page.index("act(x weightᵀ + bias)") :][:300]


def test_no_part_of_a_page_is_empty(reference):
    pages = {page.stem: page.read_text() for page in reference.rglob("*.html")}
    assert "Submodules" not in pages["ops"]
    assert "Submodules" in pages["tpkernels"]


@pytest.mark.sweep
def test_site_has_all_pages_and_the_reference(tmp_path):
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs-material is not installed (make site installs it)")
    made = ran(ROOT / "docs" / "site.py", tmp_path)  # which fails on links and anchors that lead nowhere
    assert made.returncode == 0, made.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages <= {page.parent.name for page in tmp_path.glob("docs/*/index.html")}
    assert (tmp_path / "reference" / "tpkernels.html").exists()
    assert 'src="../tables.js"' in (tmp_path / "docs" / "measured-figures" / "index.html").read_text()
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert "reduce-scatter" in str(found)
    boosts = {one["location"].split("#")[0]: one.get("boost", 1) for one in found}
    assert boosts["docs/measured-figures/"] < boosts["docs/overlap/"] == 1  # tables have every word
    assert "favicon.svg" in (tmp_path / "index.html").read_text()
    assert 'rel="icon"' in (tmp_path / "reference" / "tpkernels.html").read_text()


def test_every_public_name_says_what_it_is():
    assert not [name for name in tpkernels.__all__ if not (getattr(tpkernels, name).__doc__ or "").strip()]
