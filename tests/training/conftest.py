"""A text to train on."""

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(bytes(range(32, 120)) * 20)
    return path
