"""What docs/trainers.md says of Lightning Fabric, accelerate and Trainer, where they are installed."""

from __future__ import annotations

import re

import pytest
import torch

from tests.test_docs import ROOT, blocks_of, run_on_two_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PAGE = "trainers.md"
FABRIC, ACCELERATE, TRAINER = (
    block.text for block in blocks_of(PAGE, (ROOT / "docs" / PAGE).read_text()) if block.language == "py"
)
HIDING = TRAINER[TRAINER.index("for name in") : TRAINER.index("from transformers")]
CLIPPING = "tpkernels.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)"


def ran(text, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(text)
    return run_on_two_ranks(program, tmp_path)


def unsharded(batch, accumulated):
    """Losses of a plain loop over the rows that the page's programs draw."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2))
    rows = torch.randint(64, (24, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number, ids in enumerate(rows.split(batch), 1):
        loss = model(input_ids=ids, labels=ids).loss
        (loss / accumulated).backward()
        losses.append(loss.item())
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def losses_of_both_ranks(found):
    assert found.returncode == 0, found.stderr
    said = [float(loss) for loss in re.findall(r"loss ([\d.]+)", found.stdout)]
    return sorted(said, reverse=True)


def both(losses):
    return pytest.approx(sorted([*losses, *losses], reverse=True), abs=2e-5)


def test_fabric_trains_as_a_plain_loop(tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    assert losses_of_both_ranks(ran(FABRIC, tmp_path)) == both(unsharded(8, 1))


def test_fabric_that_wraps_the_model_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="lightning is not installed")
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)  # as under torchrun: Fabric starts no processes
    made = 'Fabric(strategy=SingleDeviceStrategy(torch.device("cpu")), precision="32-true")'
    assert made in FABRIC
    text = FABRIC.replace(made, 'Fabric(accelerator="cpu", devices=2, strategy="ddp")\nfabric.launch()')
    found = ran(text, tmp_path)
    assert found.returncode == 1
    assert "ValueError: DistributedDataParallel over ranks 0, 1 would average different" in found.stderr


def test_fabric_that_clips_by_itself_is_told(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="lightning is not installed")
    monkeypatch.setenv("TPKERNELS_CHECK_REPLICAS", "1")
    right = "norm = tpkernels.clip_grad_norm_(model.parameters(), 1.0)"
    assert right in FABRIC
    text = FABRIC.replace(right, "norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.1)")
    found = ran(text, tmp_path)
    assert found.returncode == 1
    assert found.stderr.count("RuntimeError: check_replicas: 'model.layers.0.input_layernorm.weight'") == 2


def test_accelerate_trains_as_a_plain_loop(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert losses_of_both_ranks(ran(ACCELERATE, tmp_path)) == both(unsharded(4, 2))


def test_accelerate_that_wraps_the_model_is_refused(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = ran(ACCELERATE.replace("buckets = ", "accelerator.prepare(model)\nbuckets = "), tmp_path)
    assert found.returncode == 1
    assert found.stderr.count("DistributedDataParallel over ranks 0, 1 would average different") >= 1


def test_trainer_trains(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = ran(TRAINER, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("train_loss") == 2


def test_a_trainer_that_wraps_the_model_is_refused(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = ran(TRAINER.replace(HIDING, ""), tmp_path)
    assert found.returncode == 1
    assert (
        found.stderr.count("ValueError: DistributedDataParallel over ranks 0, 1 would average different") == 2
    )


def test_a_trainer_that_clips_by_itself_is_told(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("TPKERNELS_CHECK_REPLICAS", "2")
    assert CLIPPING in TRAINER
    text = TRAINER.replace(CLIPPING, "super()._clip_grad_norm(model)")
    found = ran(text.replace("max_steps=4", "max_steps=4, max_grad_norm=0.1"), tmp_path)
    assert found.returncode == 1
    assert (
        found.stderr.count("RuntimeError: check_replicas: 'model.layers.0.input_layernorm.weight' differs")
        == 2
    )
