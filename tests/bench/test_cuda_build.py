"""What is read of our sources is looked up in torch: faults that are planted are told."""

from pathlib import Path
from typing import Protocol

import pytest
from torch._C import _distributed_c10d as c10d

from bench import cuda_build
from bench.cuda_build import Found, lacking, look_up

ROOT = Path(__file__).parents[2]
IMPORTS = """\
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup
"""
FAULTS = {
    "a name": ("torch.cuda.strems()", "torch.cuda.strems is not there"),
    "imported": ("from torch.distributed import PrefixStores", "torch.distributed.PrefixStores is not there"),
    "module": (
        "import torch.distributed._symetric",
        "torch.distributed._symetric is not there",
    ),
    "of an argument": ("def f(g: ProcessGroup | None): return g.sizes()", "ProcessGroup.sizes is not there"),
    "of a binding": ("c10d.AllreduceOptionss()", "AllreduceOptionss is not there"),
    "keyword of an overload": ("torch.ops.aten.sum.dim_IntList(1, dims=4)", "dim_IntList takes no dims"),
    "keyword in Python": ("dist.new_group(ranks=[0], bakend='gloo')", "new_group takes no bakend"),
    "keyword of a binding": ("dist.PrefixStore(prefix='', stores=1)", "PrefixStore takes no stores"),
    "no entry": ("torch.mm(1, 2)", "aten::mm has no entry for MPS"),
}


def problems(source: str) -> list[str]:
    found = Found("MPS" if "torch.mm" in source else "CPU")  # MPS: which nobody builds for Linux
    look_up(IMPORTS + source, "it.py", found)
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
        "def it(torch): torch.cudas",
        "try:\n  from torch import cudas\nexcept ImportError:\n  cudas = None",
        "if hasattr(torch, 'cudas'): torch.cudas()",
        "torch.ops.tpkernels.anything(1)",
        "dist.new_group(*[1], **{'bakend': 1})",
        "dist.group.WORLD",
        "def f(g: ProcessGroup):\n  g = f()\n  return g.sizes",
        "def f(g: ProcessGroup):\n  def f(g): return g.sizes",
    ],
)
def test_what_is_right_or_not_known_is_not_told(source):
    assert problems(source) == []


def test_a_class_of_ours_that_stands_for_one_of_torch_is_compared():
    class Handle(Protocol):
        def get_buffer(self, rank: int, shape: object) -> None: ...

        def size(self) -> int: ...

    assert [*lacking(Handle, c10d._SymmetricMemory)] == [
        "_SymmetricMemory.get_buffer takes no shape",
        "_SymmetricMemory.size is not there",
    ]


def test_our_own_sources_are_followed():
    found = Found("CPU")
    for name in ("comm/transports/rendezvous.py", "comm/groups.py", "groups/c10d.py"):
        look_up((ROOT / "tpkernels" / name).read_text(), name, found)
    assert found.names >= {
        "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p",
        "torch.distributed._symmetric_memory.rendezvous",
        "torch.distributed.ProcessGroupNCCL.Options",
        "ProcessGroup.group_name",
    }
    assert [told for told in found.problems if "ProcessGroupNCCL" not in told] == []


def test_a_torch_without_cuda_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: False)
    assert cuda_build.main() == 1
    assert "expected a CUDA build of torch" in capsys.readouterr().out


def test_what_is_missing_is_printed_and_fails(monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    checks = ("modules", "names", "csrc")
    for check in checks:
        monkeypatch.setattr(cuda_build, check, lambda: iter(["1 looked up", "torch.it is not there"]))
    assert cuda_build.main() == 1
    assert f"{len(checks)} problems" in capsys.readouterr().out
    for check in checks:
        monkeypatch.setattr(cuda_build, check, lambda: iter(["1 looked up"]))
    assert cuda_build.main() == 0
