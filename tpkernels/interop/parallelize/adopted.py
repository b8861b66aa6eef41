"""Modules of others that stay, and hold this rank's shard of their own parameters.

Their class becomes one of its own that is also ours: parameters keep their marks, as in our layers, and the
module computes what it did, on shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tpkernels import ops
from tpkernels.interop.parallelize.cut import Cut
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State
from tpkernels.ops.tensor_parallel.mappings import copy_to_region, reduce_from_region
from tpkernels.topology.shard import VocabularySplit, split_vocabulary


def adopt_parameters(
    module: nn.Module,
    parts: Mapping[str, Cut | None],
    *,
    stacks: tuple[int, ...],
    summed: bool,
    state: State,
) -> nn.Module:
    """The same module; the caller sets its parameters.

    parts: as in `Swap`; those that are None are biases that ranks add once
    stacks: how many weights are concatenated in each of the others
    """
    once = tuple(name for name, cut in parts.items() if cut is None)
    split = {name: cut for name, cut in parts.items() if cut is not None}
    marks = {
        name: Attributes(tensor_model_parallel=True, partition_dim=cut.dim, partition_stride=stride)
        for (name, cut), stride in zip(split.items(), stacks, strict=True)
    }
    own: Any = type(module)
    ours = SummedModule if summed else ParallelModule
    module.__class__ = _derived(own.__name__, ours, own)
    assert isinstance(module, ParallelModule)
    module.adopt(state, marks | {name: Attributes() for name in once})
    if isinstance(module, SummedModule):
        module.added_once = once
    return module


def adopt_table(module: nn.Module, *, state: State) -> nn.Module:
    """The same embedding, of a class derived from nn.Embedding; the caller sets its rows."""
    assert isinstance(module, nn.Embedding)
    own: Any = type(module)
    module.__class__ = _derived(own.__name__, own, SplitTable)  # its forward calls ours
    assert isinstance(module, SplitTable)
    module.adopt(state, {"weight": Attributes(tensor_model_parallel=True, partition_dim=0)})
    module.split = split_vocabulary(module.num_embeddings, ranks=module.world.size)
    return module


class SummedModule(ParallelModule):
    """Takes full features, and adds over ranks what each computes with its shards: experts."""

    added_once: tuple[str, ...]

    def forward(self, *args: Any, **named: Any) -> Any:  # those of the module's own class
        args, named = tree_map(self._copied, (args, named))
        with self._biases_of_first_rank():
            partial = super().forward(*args, **named)
        return tree_map(self._sum, partial)

    def _copied(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return copy_to_region(x, self.world.group) if floating else x

    def _sum(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return reduce_from_region(x, self.world.group) if floating else x

    @contextmanager
    def _biases_of_first_rank(self) -> Iterator[None]:
        """Every rank would add them; gradients are the first rank's, on all ranks."""
        try:
            for name in self.added_once:
                parameter = getattr(self, name)
                bias = copy_to_region(parameter, self.world.group)
                own = bias if self.world.rank == 0 else torch.zeros_like(bias) * bias
                object.__setattr__(self, name, own)  # an attribute of that name hides the parameter
            yield
        finally:
            for name in self.added_once:
                vars(self).pop(name, None)


class SplitTable(ParallelModule, nn.Embedding):
    """What a class derived from nn.Embedding calls as its base: a lookup of rows that ranks split."""

    split: VocabularySplit

    def forward(self, input: Tensor) -> Tensor:
        return ops.vocab_embedding(
            input,
            self.weight,
            self.world.group,
            padding_idx=self.padding_idx,
            vocab_size=self.num_embeddings,
        )


@cache
def _derived(name: str, *bases: Any) -> type[Any]:
    return type(f"Split{name}", bases, {})
