"""Programs that are forked with the package imported read variables as those that begin by themselves."""

from __future__ import annotations

import pytest
import torch

from tests.warm_python import ran

READ = """
from tpkernels.kernels.interpret import INTERPRETING
from tpkernels.ops.tensor_parallel import parallel
print(INTERPRETING, parallel.debug)
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="servers of a machine with a GPU do not import the package"
)
@pytest.mark.parametrize(
    ("variables", "read"),
    [
        ({}, "True False"),
        ({"TPKERNELS_DEBUG": "1"}, "True True"),
        ({"TRITON_INTERPRET": "0"}, "False False"),
    ],
    ids=["usual", "of the package", "of Triton"],
)
def test_what_is_read_on_import_is_that_of_the_program(variables, read):
    said = ran("-c", READ, environment=variables)
    assert said.stdout.strip() == read, said.stderr
