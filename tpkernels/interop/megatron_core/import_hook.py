"""An import hook: Megatron's `parallel_state` and `tensor_parallel` from tpkernels, the rest its own.

`DotProductAttention` is Megatron's, with a mark on its softmax offsets.

    from tpkernels.interop.megatron_core.import_hook import install
    install()  # before anything of Megatron is imported
    from megatron.core import parallel_state, tensor_parallel

A served module is Megatron's, executed under another name, with our names in place of its own: other names,
such as `RankGenerator` or `CheckpointWithoutOutput`, stay Megatron's, and call ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_ROOM = "tpkernels.interop.megatron_core"
_STATE = "megatron.core.parallel_state"
_TENSOR = "megatron.core.tensor_parallel"
_ATTRIBUTES = (
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
)
# module of Megatron -> module of ours -> names; none: all that it exports, and what Megatron's own code needs
SERVED: Mapping[str, Mapping[str, Sequence[str]]] = {
    _STATE: {"parallel_state": ()},
    f"{_TENSOR}.cross_entropy": {"utilities": ("vocab_parallel_cross_entropy",)},
    f"{_TENSOR}.random": {"rng": ()},
    f"{_TENSOR}.utils": {"utilities": ("gather_split_1d_tensor", "split_tensor_into_1d_equal_chunks")},
    "megatron.core.transformer.dot_product_attention": {"attention": ("DotProductAttention",)},
    f"{_TENSOR}.layers": {
        "utilities": _ATTRIBUTES,
        "linear": (
            "ColumnParallelLinear",
            "RowParallelLinear",
            "VocabParallelEmbedding",
            "linear_with_frozen_weight",
            "linear_with_grad_accumulation_and_async_allreduce",
        ),
    },
}


class MegatronImportedError(RuntimeError):
    """Megatron's modules were imported before `install`, and keep the names that they have imported."""


def install() -> None:
    """Make imports of `megatron.core.parallel_state` and the modules of `tensor_parallel` return ours."""
    if _InstalledFinder.finder is not None:
        return
    imported = sorted(name for name in sys.modules if name == "megatron.core" or name in SERVED)
    if imported:
        raise MegatronImportedError(
            f"install() must be called before Megatron is imported, but {', '.join(imported)} "
            f"{'is' if len(imported) == 1 else 'are'} imported already: call it in the program's first lines"
        )
    _InstalledFinder.finder = _Finder()
    sys.meta_path.insert(0, _InstalledFinder.finder)


def uninstall() -> None:
    """Remove the hook and all imported modules of `megatron.core`: a later import gives Megatron's own.

    Modules that hold names of the removed modules keep them.
    """
    if _InstalledFinder.finder is None:
        return
    sys.meta_path.remove(_InstalledFinder.finder)
    _InstalledFinder.finder = None
    for name in [
        name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core.")
    ]:
        del sys.modules[name]
    vars(sys.modules.get("megatron", ModuleType("megatron"))).pop("core", None)
    for name in [name for name in sys.modules if name.startswith(f"{_ROOM}.") and _is_of_megatron(name)]:
        room = vars(sys.modules[_ROOM])
        room.pop(name.rpartition(".")[2], None)
        del sys.modules[name]


@contextmanager
def installed() -> Iterator[None]:
    """`install` inside the block, `uninstall` after it."""
    install()
    try:
        yield
    finally:
        uninstall()


class _InstalledFinder:
    """The finder in `sys.meta_path`; None if not installed."""

    finder: _Finder | None = None


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in SERVED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec)
        return spec


class _Loader(Loader):
    """Loads Megatron's module under another name, and replaces its names by ours."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self._theirs = spec.loader
        self._aside = ModuleSpec(spec.name, spec.loader, origin=spec.origin)
        self._aside.has_location = True

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        original = module_from_spec(self._aside)
        sys.modules[name] = original  # our layers are subclasses of Megatron's: they find those
        try:
            self._theirs.exec_module(original)
            ours = _ours(name)
        finally:
            sys.modules[name] = module
        hides_variables = "__getattr__" in ours  # which answers for Megatron's private variables
        vars(module).update(
            {
                key: value
                for key, value in vars(original).items()
                if key[:2] != "__" and not (hides_variables and key[0] == "_" and key.isupper())
            }
        )
        vars(module).update(ours)
        vars(module)["__aside__"] = original
        module.__class__ = _Served
        # Megatron's remaining functions look up others in their module; its classes may be bases of ours.
        vars(original).update({key: value for key, value in ours.items() if not isinstance(value, type)})


class _Served(ModuleType):
    """A module that passes attributes set on it, as by monkeypatching, to Megatron's own module."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name[:2] != "__" and not isinstance(value, type):
            setattr(vars(self)["__aside__"], name, value)


def _ours(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for home, names in SERVED[name].items():
        module = import_module(f"{_ROOM}.{home}")
        if not names:
            private = ("__getattr__", "_fork_rng", "_get_all_rng_states", "_set_all_rng_states")
            names = [*module.__all__, *(each for each in private if each in vars(module))]
        found |= {each: getattr(module, each) for each in names}
    return found


def _is_of_megatron(name: str) -> bool:
    """Whether one of our modules has names from Megatron."""
    return any(
        (
            value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        ).startswith("megatron.")
        or any(base.__module__.startswith("megatron.") for base in getattr(value, "__mro__", ()))
        for value in vars(sys.modules[name]).values()
        if isinstance(value, ModuleType | type) or callable(value)
    )
