"""What tests leave out of Triton's interpreter is looking for what was found before."""

import pytest
import torch
from triton.runtime import interpreter

from tests.interpreting import HOMES, UPSTREAM, patch_builtin


class Noting:
    """What would be replaced."""

    def __init__(self):
        self.names = []

    def set_attr(self, home, name, value):
        self.names.append((home, name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these tests do not interpret")
def test_the_builtins_that_upstream_replaces_are_replaced():
    assert interpreter._patch_builtin is patch_builtin
    for home in HOMES:
        upstream, ours = Noting(), Noting()
        UPSTREAM(home, interpreter.interpreter_builder, upstream)
        patch_builtin(home, interpreter.interpreter_builder, ours)
        assert ours.names == upstream.names
    assert len(ours.names) > 2
