"""The lesson's peek into column and row layers: the A of x @ A, 1024 x 512, over 16 ranks. No GPU, no group.

python examples/shards.py
"""

import torch

import tpkernels
from tpkernels import parallel_state

RANKS = 16


def show(title: str, layer_type: type[tpkernels.ColumnParallelLinear | tpkernels.RowParallelLinear]) -> None:
    """Each rank's piece of the same A: torch keeps weights transposed, as (out_features, in_features)."""
    pieces = []
    for rank in range(RANKS):
        parallel_state.set_tensor_model_parallel_rank(rank)
        torch.manual_seed(1234)
        weight = layer_type(1024, 512).weight
        assert weight is not None
        pieces.append(weight.detach().t())
    print(f"{title}\nA = [")
    print(", ".join(f"A{rank} {tuple(piece.shape)}" for rank, piece in enumerate(pieces)))
    print("]\n")


if __name__ == "__main__":
    parallel_state.set_tensor_model_parallel_world_size(RANKS)  # shards are built, but nothing can be sent
    show("A is cut column-wise:", tpkernels.ColumnParallelLinear)
    show("A is cut row-wise:", tpkernels.RowParallelLinear)
