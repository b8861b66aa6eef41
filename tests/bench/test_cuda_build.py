"""What is read of our sources is looked up in torch: faults that are planted are told."""

from pathlib import Path
from typing import Protocol

import pytest
import torch.distributed as dist

from bench.cuda_build import __main__ as cuda_build
from bench.cuda_build.lookup import Found
from bench.cuda_build.reader import read, read_source
from bench.cuda_build.signatures import compare_members, require

ROOT = Path(__file__).parents[2]
IMPORTS = """\
import torch
import torch.distributed as dist
from importlib import import_module
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup
"""
FAULTS = {
    "a name": ("torch.cuda.strems()", "torch.cuda.strems is not there"),
    "imported": ("from torch.distributed import PrefixStores", "torch.distributed.PrefixStores is not there"),
    "module": (
        "import torch.distributed._symetric_memory",
        "torch.distributed._symetric_memory No module named",
    ),
    "module by name": ("import_module('torch.cudas').stream", "torch.cudas No module named"),
    "of an argument": (
        "def size(group: ProcessGroup | None): return group.sizes()",
        "ProcessGroup.sizes is not there",
    ),
    "of a field": (
        "class It:\n  def __init__(self, group: ProcessGroup):\n    self.group = group\n"
        "  def size(self): return self.group.sizes()",
        "ProcessGroup.sizes is not there",
    ),
    "asked for another's class": (
        "def it(x: Tensor, y: dict):\n  assert isinstance(y, dict)\n  x.more",
        "torch.Tensor.more is not there",
    ),
    "of a result": (
        "def it(g: ProcessGroup, d): g._get_backend(d).option",
        "Backend.option is not there",
    ),
    "that is set": (
        "it = c10d.AllreduceOptions()\nit.reduceOps = 1",
        "AllreduceOptions.reduceOps is not there",
    ),
    "of torch's class in Python": ("torch.cuda.CUDAGraph().replays()", "CUDAGraph.replays is not there"),
    "keyword of an operator": ("torch.empty(3, on='cuda')", "torch.empty takes no on"),
    "keyword of a method": (
        "def it(x: Tensor): x.copy_(x, blocking=False)",
        "Tensor.copy_ takes no blocking",
    ),
    "keyword of an overload": (
        "torch.ops.aten.addmm.dtype_out(1, 2, 3, dtype=4)",
        "addmm.dtype_out takes no dtype",
    ),
    "keyword in Python": ("dist.new_group(ranks=[0], bakend='gloo')", "new_group takes no bakend"),
    "keyword of a binding": ("dist.PrefixStore(prefix='', stores=1)", "PrefixStore takes no stores"),
    "too many arguments": ("c10d._resolve_process_group('a', 1)", "takes 1 arguments, got 2"),
    "no entry": ("torch.mm(1, 2)", "aten::mm has no entry for MPS"),
}


def problems(source: str) -> list[str]:
    found = Found("MPS" if "torch.mm" in source else "")  # which nobody builds for Linux
    read_source(IMPORTS + source, "it.py", found)
    return found.problems


@pytest.mark.parametrize(("source", "said"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_told(source, said):
    (told,) = problems(source)
    assert told.startswith(f"it.py:{len((IMPORTS + source).splitlines())}: ")
    assert said in told


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(2, 3, device='meta', requires_grad=True)",
        "def it(x: Tensor): x.sum(dim=0, keepdim=True).main_grad = 1",
        "def it(x: Tensor): x.to_local(grad_placements=None)",  # of a DTensor
        "def it(torch): torch.cudas",
        "try:\n  from torch import cudas\nexcept ImportError:\n  cudas = None",
        "if hasattr(torch, 'cudas'): torch.cudas()",
        "if dist: it = dist\nelse: it = torch\nit.ProcessGroup",
        "torch.ops.tpkernels.anything(1)",
        "def it(x: Tensor): x.more if isinstance(x, dict) else x.T",
        "def it(x: Tensor):\n  if isinstance(x, dict):\n    x.more",
        "def it(x: Tensor):\n  assert isinstance(x, dict)\n  x.more",
        "def it(x: Tensor):\n  if not isinstance(x, dict):\n    return\n  x.more",
        "dist.new_group(*[1], **{'bakend': 1})",
        "def it(module: torch.nn.Module): module.weight.data_ptrs",
    ],
)
def test_what_is_right_or_not_known_is_not_told(source):
    assert problems(source) == []


def test_a_class_of_ours_that_stands_for_one_of_torch_is_compared():
    class Handle(Protocol):
        def size(self) -> int: ...

        def broadcast(self, tensors: object, options: object, more: object, and_more: object) -> None: ...

        def sizes(self) -> int: ...

    found = Found()
    compare_members(Handle, dist.ProcessGroup, found)
    require(["size", "rakn"], dist.ProcessGroup, found)
    assert [told.rpartition("Handle: ")[2] for told in found.problems] == [
        "ProcessGroup.broadcast takes 3 arguments, got 4",
        "ProcessGroup.sizes is not there",
        "ProcessGroup.rakn is not there",
    ]


def test_our_own_sources_are_followed():
    paths = [ROOT / "tpkernels" / name for name in ("comm/transports/rendezvous.py", "groups/c10d.py")]
    found = read(paths)
    assert found.names >= {
        "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p",
        "torch.distributed._symmetric_memory.rendezvous",
        "torch.distributed.ProcessGroup._register_backend",
        "torch.distributed.ProcessGroupNCCL",
    }
    assert found.calls > 20
    assert [told for told in found.problems if "ProcessGroupNCCL" not in told] == []


def test_a_torch_without_cuda_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: False)
    assert cuda_build.main() == 1
    assert "expected a CUDA build of torch" in capsys.readouterr().out


def test_what_is_missing_is_printed_and_fails(monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    for check in ("modules", "names", "classes", "group_names"):
        monkeypatch.setattr(cuda_build, check, lambda: iter(["1 looked up", "torch.it is not there"]))
    assert cuda_build.main() == 1
    assert "4 problems" in capsys.readouterr().out
    for check in ("modules", "names", "classes", "group_names"):
        monkeypatch.setattr(cuda_build, check, lambda: iter(["1 looked up"]))
    assert cuda_build.main() == 0
