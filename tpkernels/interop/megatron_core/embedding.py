"""Megatron's vocabulary-parallel embedding, computed by our ops."""

from __future__ import annotations

from megatron.core.tensor_parallel import layers as theirs
from torch import Tensor

from tpkernels import ops
from tpkernels.interop.megatron_core.limits import require_no_invariance, require_whole_weight


class VocabParallelEmbedding(theirs.VocabParallelEmbedding):  # type: ignore[misc] # Megatron is not typed
    """Megatron's, with its constructor, parameters, initial weights, attributes and checkpoints.

    An id that does not exist is an error; Megatron's gives a row of zeros.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """The row of each id.

        input_: (batch, sequence) ids, the same on all ranks
        returns: (batch, sequence, features), or this rank's (sequence, batch, features) if
            reduce_scatter_embeddings
        """
        require_no_invariance("VocabParallelEmbedding")
        require_whole_weight("VocabParallelEmbedding", getattr(self, "gtp_remat_size", 1))
        scattered = self.reduce_scatter_embeddings
        ids = input_.transpose(0, 1).contiguous() if scattered else input_
        split = scattered and self.tp_group.size() > 1
        return ops.vocab_embedding(ids, self.weight, self.tp_group, sequence_parallel=split)
