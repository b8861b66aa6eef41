"""An embedding whose table is split over ranks, padded to a multiple of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.init import InitMethod, fill_shard, leave_unset
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State
from tpkernels.topology.sizes import split_vocabulary


class VocabParallelEmbedding(ParallelModule):
    """An embedding table (num_embeddings, embedding_dim) whose rows are split evenly over ranks.

    init_method: fills the full table, without padding; rows of padding are zero and stay so
    padding_idx: an id whose row starts at zero and gets no gradient
    divisible_by: pad each rank's rows to a multiple of it, Megatron's `make_vocab_size_divisible_by`
    sequence_parallel: the output is this rank's tokens (dimension 0); no effect on one rank
    perform_initialization: as in `ColumnParallelLinear`
    state: the tensor-parallel group: a ParallelState, process group or device mesh; None: the current state
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod = nn.init.xavier_normal_,
        padding_idx: int | None = None,
        divisible_by: int = 1,
        sequence_parallel: bool = False,
        perform_initialization: bool = True,
        state: State = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(state)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: expected a padding_idx from {-num_embeddings} to "
                f"{num_embeddings - 1}, got {padding_idx}"
            )
        if segments := self.world.segments:  # equal segments whose rows fill 16 bytes of any dtype
            divisible_by = segments * math.lcm(divisible_by, 8)
        self.split = split_vocabulary(num_embeddings, ranks=self.world.size, divisible_by=divisible_by)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.num_embeddings_per_partition = self.split.shard_size
        rows = self.split.rows_of(self.world.rank)
        self.vocab_start_index, self.vocab_end_index = rows.start, rows.stop
        self.init_method = init_method
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel = sequence_parallel and self.world.size > 1
        split = Attributes(tensor_model_parallel=True, partition_dim=0)
        self.add_parameter("weight", (len(rows), embedding_dim), split, device=device, dtype=dtype)
        if perform_initialization:
            self.reset_parameters()
        else:
            leave_unset(self.weight, rows=len(self.split.ids_of(self.world.rank)))

    def reset_parameters(self) -> None:
        """Draw the table, the same for every number of ranks.

        Called at construction; call it after `to_empty` of a layer that was built on the meta device.
        """
        ids = self.split.ids_of(self.world.rank)
        full = (self.num_embeddings, self.embedding_dim)
        fill_shard(self.weight, self.init_method, full=full, dim=0, ranges=[ids])
        if self.padding_idx is not None and self.padding_idx in ids:
            with torch.no_grad():
                self.weight[ids.index(self.padding_idx)].zero_()

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the row of each id.

        input_: (tokens, ...) ids, the same on all ranks
        returns: (tokens, ..., embedding_dim), or this rank's tokens of dimension 0 if sequence_parallel
        """
        return ops.vocab_embedding(
            input_,
            self.weight,
            self.world.group,
            sequence_parallel=self.sequence_parallel,
            padding_idx=self.padding_idx,
            vocab_size=self.num_embeddings,
        )

    def extra_repr(self) -> str:
        held = f"{self.world} holds rows {self.vocab_start_index} to {self.vocab_end_index - 1}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {held}"
