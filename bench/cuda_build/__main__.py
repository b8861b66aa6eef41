"""Whether a CUDA build of torch has all that our CUDA path takes from it: `make check-torch`.

It needs no GPU, and ends with 1 if something is missing. What is looked up is read from our sources
(`reader`); the Makefile compiles the extension against that build first.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import tpkernels
from bench.cuda_build.lookup import Found
from bench.cuda_build.reader import read
from bench.cuda_build.signatures import compare_members, require
from tpkernels.buckets import registered
from tpkernels.comm.transports import rendezvous
from tpkernels.extension import ExtensionState, extension

# What modules of ours may need that is not installed there
OPTIONAL = {
    "accelerate",
    "lightning",
    "matplotlib",
    "megatron",
    "peft",
    "safetensors",
    "transformers",
    "yaml",
}


def main() -> int:
    """Print a line for each check, and what is wrong."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
    if not torch.backends.cuda.is_built():
        print("expected a CUDA build of torch, which `make check-torch` installs")
        return 1
    checks: Sequence[Callable[[], Iterator[str]]] = (modules, names, classes, csrc, group_names)
    problems = 0
    for check in checks:
        title, *wrong = check()
        print(f"{check.__name__}: {title}", *wrong, sep="\n  ")
        problems += len(wrong)
    print(f"{problems} problems" if problems else "all there")
    return bool(problems)


def modules() -> Iterator[str]:
    """All of ours can be imported; a name that is missing there is missing when users import it."""
    root, wrong, left_out, count = Path(tpkernels.__file__).parent, [], set(), 0
    for module in pkgutil.walk_packages([str(root)], "tpkernels."):
        if module.name.rpartition(".")[2] in ("_C", "__main__"):
            continue
        try:
            import_module(module.name)
            count += 1
        except ImportError as error:
            if (name := (error.name or "").partition(".")[0]) in OPTIONAL:
                left_out.add(name)
            else:
                wrong.append(f"{module.name}: {error}")
        except Exception as error:  # whatever it is, it is reported
            wrong.append(f"{module.name}: {type(error).__name__}: {error}")
    yield f"{count} imported" + (f", without those of {', '.join(sorted(left_out))}" if left_out else "")
    yield from wrong


def names() -> Iterator[str]:
    """Names, arguments and entries of operators."""
    found = read(sorted(Path(tpkernels.__file__).parent.rglob("*.py")), "CUDA")
    calls = f"{found.calls} calls compared with signatures ({len(found.unreadable)} functions show none)"
    yield f"{len(found.names)} names, {calls}, {len(found.operators)} operators with an entry for CUDA"
    yield from found.problems


def classes() -> Iterator[str]:
    """What we ask of objects whose class no source of ours names."""
    found = Found()
    compare_members(rendezvous.Handle, c10d._SymmetricMemory, found)
    require(registered.CALLS, dist.ProcessGroupNCCL, found)
    yield f"{len(found.names)} methods and properties of _SymmetricMemory and ProcessGroupNCCL"
    yield from found.problems


def csrc() -> Iterator[str]:
    """The extension was compiled against this build, and loads."""
    loaded = extension()
    yield loaded.detail
    if loaded.state is not ExtensionState.LOADED:
        yield f"expected it loaded, it is {loaded.state.value}"


def group_names() -> Iterator[str]:
    """Torch's rendezvous and barrier find the ranks of a machine by a name of ours."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None, "it has just been made"
    name = rendezvous.name_of_ranks(world, [0])
    found = c10d._resolve_process_group(name)
    yield f"'{name}' has rank {found.rank()} of {found.size()}"
    if found.group_name != name:
        yield f"expected a group of that name, got '{found.group_name}'"
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
