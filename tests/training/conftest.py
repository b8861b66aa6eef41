"""A text to train on."""

import pytest


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 120)) * 20)
    return path
