"""What docs/huggingface.md says of transformers' Trainer, where it is installed."""

from __future__ import annotations

import pytest

from tests.test_docs import ROOT, blocks_of, run_on_two_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

PAGE = "huggingface.md"
(PROGRAM,) = (b for b in blocks_of(PAGE, (ROOT / "docs" / PAGE).read_text()) if b.language == "py")
HIDING = PROGRAM.text[PROGRAM.text.index("for name in") : PROGRAM.text.index("from transformers")]
CLIPPING = "tpkernels.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)"


def ran(text, tmp_path):
    assert text != PROGRAM.text or HIDING in text
    program = tmp_path / "program.py"
    program.write_text(text)
    return run_on_two_ranks(program, tmp_path)


def test_the_program_of_the_page_trains(tmp_path):
    found = ran(PROGRAM.text, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("train_loss") == 2


def test_a_trainer_that_wraps_the_model_is_refused(tmp_path):
    found = ran(PROGRAM.text.replace(HIDING, ""), tmp_path)
    assert found.returncode == 1
    assert (
        found.stderr.count("ValueError: DistributedDataParallel over ranks 0, 1 would average different") == 2
    )


def test_a_trainer_that_clips_by_itself_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CHECK_REPLICAS", "2")
    assert CLIPPING in PROGRAM.text
    text = PROGRAM.text.replace(CLIPPING, "super()._clip_grad_norm(model)")
    found = ran(text.replace("max_steps=4", "max_steps=4, max_grad_norm=0.1"), tmp_path)
    assert found.returncode == 1
    assert (
        found.stderr.count("RuntimeError: check_replicas: 'model.layers.0.input_layernorm.weight' differs")
        == 2
    )
