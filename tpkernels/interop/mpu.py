"""The older Megatron's `mpu.initialize`, over `parallel_state`: its spellings and its own functions."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import torch.distributed as dist

from tpkernels import parallel_state
from tpkernels.errors import warn
from tpkernels.groups import initialize
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.groups.state import ParallelState, ParallelStateError


class LayerArguments(Protocol):
    """The parsed arguments that the layer counts read."""

    num_layers: int
    num_layers_decoder: int
    transformer_pipeline_model_parallel_size: int
    pipeline_model_parallel_split_rank: int | None
    standalone_embedding_stage: bool


def is_unitialized() -> bool:
    """Whether there are no groups yet. The misspelling is Megatron's."""
    return not parallel_state.model_parallel_is_initialized()


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    pipeline_model_parallel_split_rank_: int | None = None,
) -> ParallelState:
    """As in `parallel_state`, but a size larger than the world is reduced to the world's, with a warning."""
    return initialize.initialize_model_parallel(
        _at_most_world(tensor_model_parallel_size_, "tensor_model_parallel_size_"),
        _at_most_world(pipeline_model_parallel_size_, "pipeline_model_parallel_size_"),
        virtual_pipeline_model_parallel_size_,
        pipeline_model_parallel_split_rank_,
    )


def get_num_layers(args: LayerArguments, is_encoder_and_decoder_model: bool) -> int:
    """Return the number of transformer layers that this stage holds."""
    return _layers_here(args.num_layers, args, is_encoder_and_decoder_model)


def get_num_layers_decoder(args: LayerArguments, is_encoder_and_decoder_model: bool) -> int:
    """Return the number of layers that this stage holds, for a decoder with a depth of its own."""
    return _layers_here(args.num_layers_decoder, args, is_encoder_and_decoder_model)


def _at_most_world(size: int, name: str) -> int:
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group(...) first"
        )
    world_size = dist.get_world_size()
    if not isinstance(size, SupportsIndex) or operator.index(size) <= world_size:
        return size
    warn(f"{name} {size} is larger than the world: using {world_size}", stacklevel=3)
    return world_size


def _layers_here(layers: int, args: LayerArguments, is_encoder_and_decoder_model: bool) -> int:
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return layers
    stages = args.transformer_pipeline_model_parallel_size
    only_embeds = args.standalone_embedding_stage and parallel_state.get_pipeline_model_parallel_rank() == 0
    if not is_encoder_and_decoder_model:
        share = _divide(layers, stages, "transformer_pipeline_model_parallel_size")
        return 0 if only_embeds else share
    if args.pipeline_model_parallel_split_rank is None:
        raise InvalidSizes(
            "a model with encoder and decoder needs args.pipeline_model_parallel_split_rank, got None"
        )
    # A standalone embedding stage is one of the stages before the split, and holds no layers.
    encoder_stages = args.pipeline_model_parallel_split_rank - bool(args.standalone_embedding_stage)
    encoder_share = _divide(layers, encoder_stages, "number of ranks given to encoder")
    decoder_share = _divide(layers, stages - encoder_stages, "number of ranks given to decoder")
    if not parallel_state.is_pipeline_stage_before_split():
        return decoder_share
    return 0 if only_embeds else encoder_share


def _divide(layers: int, stages: int, what: str) -> int:
    if stages < 1 or layers % stages:
        raise InvalidSizes(f"num_layers ({layers}) must be divisible by {what} ({stages})")
    return layers // stages


if TYPE_CHECKING:
    from tpkernels.parallel_state import *  # type: ignore[assignment]  # noqa: F403
else:
    globals().update({name: getattr(parallel_state, name) for name in parallel_state.__all__} | globals())
    __all__ = [*parallel_state.__all__, "get_num_layers", "get_num_layers_decoder", "is_unitialized"]
