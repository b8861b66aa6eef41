"""What docs/trainers.md says of Lightning Fabric, accelerate and Trainer, where they are installed."""

import re

import pytest
import torch

from tests.test_docs import ROOT, blocks_of, run_on_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PAGE = "trainers.md"
FABRIC, ACCELERATE, TRAINER, _ = (  # the last is torchtitan's
    block.text for block in blocks_of(PAGE, (ROOT / "docs" / PAGE).read_text()) if block.language == "py"
)
HIDING = TRAINER[TRAINER.index("for name in") : TRAINER.index("from transformers")]


def ran(text, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(text)
    return run_on_ranks(2, program)


def unsharded_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2))


def unsharded(batch, accumulated):
    """Losses of a plain loop over the rows that the page's programs draw."""
    model = unsharded_model()
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


@pytest.mark.parametrize(
    ("package", "program", "batch", "accumulated"),
    [("lightning", FABRIC, 8, 1), ("accelerate", ACCELERATE, 4, 2)],
    ids=["fabric", "accelerate"],
)
def test_it_trains_as_a_plain_loop(package, program, batch, accumulated, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    found = ran(program, tmp_path)
    assert found.returncode == 0, found.stderr
    said = [float(loss) for loss in re.findall(r"loss ([\d.]+)", found.stdout)]
    expected = unsharded(batch, accumulated)
    assert sorted(said) == pytest.approx(sorted([*expected, *expected]), abs=2e-5)


def test_trainer_trains(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = ran(TRAINER, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("train_loss") == 2


def test_trainer_saves_full_adapters(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plan, train = "plan=llama_plan(model.config))\n", ".train()\n"
    assert plan in TRAINER
    assert train in TRAINER
    adapted = f"""{plan}
from peft import LoraConfig, get_peft_model
from tpkernels.interop.peft import on_shards, save_full_weights
model = get_peft_model(model, on_shards(LoraConfig(target_modules=["v_proj", "o_proj"])))
save_full_weights(model)
"""
    found = ran(TRAINER.replace(plan, adapted).replace(train, ".save_model('saved')\n"), tmp_path)
    assert found.returncode == 0, found.stderr
    read = peft.PeftModel.from_pretrained(unsharded_model(), tmp_path / "saved").state_dict()
    shapes = {tuple(tensor.shape) for name, tensor in read.items() if "lora_" in name}
    assert shapes == {(8, 32), (32, 8)}


AS_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}  # which starts ranks
MADE = 'Fabric(strategy=SingleDeviceStrategy(torch.device("cpu")), precision="32-true")'
WRAPS = 'Fabric(accelerator="cpu", devices=2, strategy="ddp")\nfabric.launch()'
OURS = "norm = tpkernels.clip_grad_norm_(model.parameters(), 1.0)"
ITS_OWN = "norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.1)"
CLIPPING = "tpkernels.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)"
WRAPPED = "ValueError: DistributedDataParallel over ranks 0, 1 would average different"
DIFFERS = "of the optimizer, (32,)' differs between tensor-parallel ranks"  # a norm's weight
SHORT, CLIPS = "max_steps=4", "max_steps=4, max_grad_norm=0.1"
WRONG = {  # package, environment, program, what is replaced in it, what is said, on how many ranks at least
    "fabric_wraps": ("lightning", AS_TORCHRUN, FABRIC, {MADE: WRAPS}, WRAPPED, 1),
    "fabric_clips": ("lightning", {}, FABRIC, {OURS: ITS_OWN}, DIFFERS, 2),
    "accelerate_wraps": (
        *("accelerate", {}, ACCELERATE, {"buckets = ": "model = accelerator.prepare(model)\nbuckets = "}),
        *(WRAPPED.removeprefix("ValueError: "), 1),
    ),
    "trainer_wraps": ("accelerate", {}, TRAINER, {HIDING: ""}, WRAPPED, 1),
    "trainer_clips": (
        *("accelerate", {}, TRAINER),
        *({CLIPPING: "super()._clip_grad_norm(model)", SHORT: CLIPS}, DIFFERS, 2),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_wraps_or_clips_by_itself_is_told(case, tmp_path, monkeypatch):
    package, environment, text, replaced, said, ranks = WRONG[case]
    pytest.importorskip(package, reason=f"{package} is not installed")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    found = ran(text, tmp_path)
    assert found.returncode == 1
    assert found.stderr.count(said) >= ranks
