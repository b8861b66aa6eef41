"""`nn.Module`s over a tensor-parallel group, as Megatron names them."""
