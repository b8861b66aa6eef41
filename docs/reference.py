"""Writes the API reference, HTML made of docstrings: `python docs/reference.py FOLDER`. Needs pdoc."""

from __future__ import annotations

import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

import pdoc

MODULES = (
    "tpkernels",
    "tpkernels.ops",
    "tpkernels.optim",
    "tpkernels.parallel_state",
    "tpkernels.testing",
    "tpkernels.gate",
    "tpkernels.interop",
    "tpkernels.interop.mpu",
    "tpkernels.interop.megatron",
    "tpkernels.checkpoints",
    "tpkernels.checkpoints.dcp",
    "tpkernels.checkpoints.safetensors",
    "tpkernels.interop.huggingface",
)
EMPTY = re.compile(r"<h2>Submodules</h2>\s*<ul>\s*</ul>")  # of modules whose submodules are left out


def write(folder: Path) -> None:
    package = import_module("tpkernels")
    for lazy in (package, package.ops):
        for name in lazy.__all__:  # imported when first used, and pdoc takes what is there
            setattr(lazy, name, getattr(lazy, name))
    icon = quote(Path(__file__).with_name("favicon.svg").read_text())
    pdoc.render.configure(
        show_source=False,
        footer_text=f"tpkernels {package.__version__}",
        favicon=f"data:image/svg+xml,{icon}",
    )
    pdoc.render_helpers.markdown_extensions["breaks"] = {
        "on_newline": True
    }  # arguments have lines of their own
    others = f"!(?!({'|'.join(map(re.escape, MODULES))})$)"
    # it is left out below, and imports peft, which need not be installed
    warnings.filterwarnings("ignore", "Couldn't import tpkernels.interop.peft")
    pdoc.pdoc("tpkernels", "tpkernels.checkpoints", "tpkernels.gate", others, output_directory=folder)
    for page in folder.rglob("*.html"):
        page.write_text(EMPTY.sub("", page.read_text()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
