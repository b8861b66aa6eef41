"""Public names, as the stubs beside the packages' `__init__` say them."""

import pytest

import tpkernels


def test_every_public_name_can_be_imported():
    for name in tpkernels.__all__:
        assert getattr(tpkernels, name) is not None
        assert name in dir(tpkernels)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = tpkernels.nonsense
