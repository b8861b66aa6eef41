"""Which variables there are, and what is said of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpkernels import tp_invariance
from tpkernels.cli.doctor import POWERS_OF_TWO, VARIABLES, mistakes
from tpkernels.comm.transports.select import TRANSPORTS
from tpkernels.dispatch.backends import BACKENDS
from tpkernels.env import env_flag
from tpkernels.layers import replicas

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "tpkernels").rglob("*.py"), *(ROOT / "csrc").glob("*.cpp"), ROOT / "setup.py"]


def told(**environment: str) -> list[str]:
    return [text for _, text in mistakes(environment)]


def test_every_variable_that_is_read_is_known_with_its_words():
    # A name in quotes is one that code asks for.
    read = {name for path in SOURCES for name in re.findall(r'"(TPKERNELS_[A-Z_]*[A-Z])"', path.read_text())}
    assert read == VARIABLES.keys()
    assert set(VARIABLES["TPKERNELS_BACKEND"].words) == set(BACKENDS)
    assert set(VARIABLES["TPKERNELS_TRANSPORT"].words) == set(TRANSPORTS)
    assert int(POWERS_OF_TWO[-1]) == tp_invariance.MOST_SEGMENTS


VALUES = {
    "TPKERNELS_TUNE": ["", "0", "1", "2", "true", " 1"],
    "TPKERNELS_DEBUG": ["", "1", "yes"],
    "TPKERNELS_CHECK_REPLICAS": ["", "0", "100", "-1", "many", "1.5"],
    "TPKERNELS_TP_INVARIANT": ["", "0", "1", "8", "008", "1024", "7", "2048", "-8", "eight"],
}


def is_read(name: str, value: str) -> bool:
    """Whether those who ask for the variable take the value."""
    try:
        if name == replicas.VARIABLE:
            replicas._read(value)
        elif name == tp_invariance.VARIABLE:
            tp_invariance._of_environment()
        else:
            env_flag(name, default=True)
    except ValueError:
        return False
    return True


def test_what_is_refused_here_is_refused_where_it_is_read(monkeypatch):
    taken = []
    for name, values in VALUES.items():
        for value in values:
            monkeypatch.setenv(name, value)
            assert is_read(name, value) == (not told(**{name: value})), f"{name}={value}"
            taken.append(is_read(name, value))
    assert 8 < sum(taken) < len(taken) - 8


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TPKERNELS_TUEN", "0", "nothing reads it; did you mean TPKERNELS_TUNE?"),
        ("TPKERNELS_BACK_END", "torch", "nothing reads it; did you mean TPKERNELS_BACKEND?"),
        ("TPKERNELS_TRANSPORTS", "c10d", "nothing reads it; did you mean TPKERNELS_TRANSPORT?"),
        ("TPKERNEL_TRANSPORT", "c10d", "nothing reads it; did you mean TPKERNELS_TRANSPORT?"),
        ("TP_KERNELS_DEBUG", "1", "nothing reads it; did you mean TPKERNELS_DEBUG?"),
        ("tpkernels_debug", "1", "nothing reads it; did you mean TPKERNELS_DEBUG?"),
        ("TPKERNELS_BACKEND", "tritn", "expected one of auto, torch, triton; did you mean triton?"),
        ("TPKERNELS_BACKEND", "Torch", "expected one of auto, torch, triton; did you mean torch?"),
        ("TPKERNELS_BACKEND", "", "expected one of auto, torch, triton"),
        ("TPKERNELS_LOG", "choice", "expected choices; did you mean choices?"),
        ("TPKERNELS_TUNE", "01", "expected 0 or 1; did you mean 1?"),
        ("TPKERNELS_CHECK_REPLICAS", "often", "expected a number of optimizer steps, or 0 for never"),
    ],
)
def test_what_was_meant_is_said(name, value, said):
    assert told(**{name: value}) == [f"{name}={value}: {said}"]


def test_others_variables_are_left_alone():
    assert told(NCCL_DEBUG="INFO", TRITON_INTERPRET="1", KERNELS="", TP="2", BACKEND="gloo") == []
