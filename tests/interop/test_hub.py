"""Local ops are copied out of the house, as a package that Hugging Face's `kernels` loads."""

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tpkernels import ops
from tpkernels.interop.hub import __main__ as hub

PROGRAM = """
import sys
from importlib import util
before = set(sys.modules)
spec = util.spec_from_file_location("copied", sys.argv[1])
sys.modules["copied"] = copied = util.module_from_spec(spec)
spec.loader.exec_module(copied)
import torch
x = torch.ones(3, 16, requires_grad=True)
copied.rms_norm(copied.linear(x, torch.ones(16, 16), None, "gelu"), torch.ones(16)).sum().backward()
found = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(name for name in found if name not in sys.stdlib_module_names and not name.startswith("_")))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hub.write(folder := tmp_path_factory.mktemp("hub"))
    return folder


def loaded(variant: Path, name: str):
    """The copy under a name, as `kernels` loads it."""
    spec = util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_copy_imports_torch_and_the_standard_library(folder):
    run = [sys.executable, "-P", "-c", PROGRAM, folder / "build/torch-cpu/__init__.py"]
    found = json.loads(subprocess.check_output(run, text=True, cwd=folder).replace("'", '"'))
    assert set(found) - {name.partition(".")[0] for name in torch_alone()} == {"copied"}


def test_copy_has_these_rooms(folder):
    found = (folder / "build/torch-cpu").iterdir()
    rooms = {path.name for path in found if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {"comm", "dispatch", "kernels", "ops"}


def test_swiglu_of_another_activation_is_refused(folder):
    mlp = loaded(folder / "build/torch-cpu", "copied_layers").layers.SwiGLUMLP()
    mlp.config, mlp.gate_proj = SimpleNamespace(hidden_act="gelu"), torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="expected hidden_act='silu'"):
        mlp(torch.ones(2))


def torch_alone() -> list[str]:
    """What torch imports itself, such as numpy and typing_extensions."""
    run = [sys.executable, "-c", "import torch, torch._dynamo, sys; print(*sys.modules)"]
    return subprocess.check_output(run, text=True).split()


@pytest.mark.parametrize("compiled", [False, True])
def test_copy_computes_the_same_bits_beside_the_house(compiled, folder):
    copied = loaded(folder / "build/torch-cpu", f"copied_{compiled}")
    torch.manual_seed(6)
    x, w, v = (torch.randn(size) for size in ((5, 16), (24, 16), (16, 24)))
    for name, inputs in {
        "linear": (x, w, w[:, 0].contiguous(), "gelu"),
        "swiglu": (x, w, w.flip(0)),
        "mlp": (x, w, None, v, None),
        "rms_norm": (x, w[0]),
        "layer_norm": (x, w[0], w[1]),
    }.items():
        ours, theirs = getattr(ops, name), getattr(copied, name)
        if compiled:
            theirs = torch.compile(theirs, backend="eager", fullgraph=True)
        assert torch.equal(theirs(*inputs), ours(*inputs)), name


def test_an_import_that_stays_absolute_is_refused(monkeypatch, tmp_path):
    (layers := tmp_path / "layers.py").write_text("import tpkernels\n")
    monkeypatch.setattr(hub, "LAYERS", layers)
    with pytest.raises(ValueError, match=r"got others in \['layers.py'\]"):
        hub.package_files()


def test_kernelized_llama_computes_the_same(folder, monkeypatch):
    kernels, transformers = pytest.importorskip("kernels"), pytest.importorskip("transformers")
    llama = transformers.models.llama.modeling_llama
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2))
    ids = torch.arange(16).view(2, 8)
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setenv("LOCAL_KERNELS", f"tpkernels/local={folder}")
    replaced = {"RMSNorm": llama.LlamaRMSNorm, "SwiGLUMLP": llama.LlamaMLP}
    mapping = {}
    for name, cls in replaced.items():
        monkeypatch.setattr(cls, "kernel_layer_name", name, raising=False)
        mapping[name] = {"cpu": kernels.LayerRepository("tpkernels/local", layer_name=name, revision="main")}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    forwards = {type(module): module.forward.__func__.__module__ for module in model.modules()}
    assert all(forwards[cls].endswith(".layers") for cls in replaced.values())
    found = model(ids, labels=ids)
    found.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-6, msg=name)
