"""Environment variables that are on or off, or one of some words, and nothing else."""

import pytest

from tpkernels.env import env_choice, env_flag, env_or_safe


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", True), (None, True)])
def test_switch_is_read_or_left_at_its_default(value, on, monkeypatch):
    monkeypatch.delenv("TPKERNELS_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("TPKERNELS_SWITCH", value)
    assert env_flag("TPKERNELS_SWITCH", default=True) == on


@pytest.mark.parametrize("value", ["true", "off", "2", " 1"])
def test_neither_on_nor_off_is_refused(value, monkeypatch):
    monkeypatch.setenv("TPKERNELS_SWITCH", value)
    with pytest.raises(ValueError, match=f"TPKERNELS_SWITCH is '{value}'; expected 0 or 1"):
        env_flag("TPKERNELS_SWITCH", default=False)


def test_a_word_is_one_of_those_that_are_known(monkeypatch):
    monkeypatch.setenv("TPKERNELS_SWITCH", "")
    assert env_choice("TPKERNELS_SWITCH", ("0", "1", "timed")) == "0"
    monkeypatch.setenv("TPKERNELS_SWITCH", "timed")
    assert env_choice("TPKERNELS_SWITCH", ("0", "1", "timed")) == "timed"
    monkeypatch.setenv("TPKERNELS_SWITCH", "yes")
    with pytest.raises(ValueError, match="TPKERNELS_SWITCH is 'yes'; expected 0, 1 or timed"):
        env_choice("TPKERNELS_SWITCH", ("0", "1", "timed"))


@pytest.mark.parametrize(
    ("safe", "value", "read"),
    [("0", None, "auto"), ("0", "fast", "fast"), ("1", None, "slow"), ("1", "slow", "slow")],
)
def test_safe_mode_sets_what_is_not_set(safe, value, read, monkeypatch):
    monkeypatch.setenv("TPKERNELS_SAFE", safe)
    if value is not None:
        monkeypatch.setenv("TPKERNELS_WAY", value)
    assert env_or_safe("TPKERNELS_WAY", "auto", safe="slow") == read


@pytest.mark.parametrize("value", ["fast", "auto", ""])
def test_safe_mode_refuses_another_setting(value, monkeypatch):
    monkeypatch.setenv("TPKERNELS_SAFE", "1")
    monkeypatch.setenv("TPKERNELS_WAY", value)
    words = f"TPKERNELS_SAFE=1 takes TPKERNELS_WAY=slow, got '{value}'; unset one of them"
    with pytest.raises(ValueError, match=words):
        env_or_safe("TPKERNELS_WAY", "auto", safe="slow")
