"""Inputs to try a model with, made up from what is known of it.

The numbers of sequences and tokens are coprime to the ranks: a model that folds features into them, because
it has a rank's share of its heads, returns another shape.
"""

from __future__ import annotations

from itertools import count, islice
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.interop.parallelize.twins import Inputs


def made_up_inputs(model: nn.Module, ranks: int, *, divided: bool = False) -> Inputs | None:
    """For a model of `transformers` arguments by name; else ids if the first embedding or linear layer is an
    embedding, or features; None without such a layer.

    divided: ranks share the tokens, whose number is a multiple of theirs
    """
    batch, tokens = islice((n for n in count(2) if gcd(n, ranks) == 1), 2)
    tokens = 2 * ranks if divided else tokens
    main = getattr(model, "main_input_name", None)
    if isinstance(main, str) and (config := getattr(model, "config", None)) is not None:
        return _named(model, config, main, batch, tokens)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return (_ids(batch, tokens, module.num_embeddings),)
        if isinstance(module, nn.Linear):
            return (_features(batch, tokens, module.in_features),)
    return None


def _named(model: Any, config: Any, main: str, batch: int, tokens: int) -> Inputs | None:
    """Arguments of a model of `transformers`, by its main input and its config."""
    inputs: dict[str, Tensor] = {}
    vision = getattr(config, "vision_config", config)
    if main == "input_ids":
        inputs[main] = _ids(batch, tokens, _vocabulary(model, config))
    elif main == "input_features" and hasattr(config, "num_mel_bins"):  # as Whisper's
        inputs[main] = _features(batch, config.num_mel_bins, 2 * config.max_source_positions)
    elif main != "pixel_values":
        return None
    if main == "pixel_values" or hasattr(model, "vision_model"):
        sides = getattr(vision, "image_size", None)
        height, width = sides if isinstance(sides, list | tuple) else (sides, sides)
        if height is None or width is None:
            return None
        inputs["pixel_values"] = _features(batch, getattr(vision, "num_channels", 3), height, width)
    if getattr(config, "is_encoder_decoder", False) and hasattr(config, "vocab_size"):
        inputs["decoder_input_ids"] = _ids(batch, tokens + 1, _vocabulary(model, config))
    return inputs


def _vocabulary(model: Any, config: Any) -> int:
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a model of text and images has several
        table = None
    if isinstance(table, nn.Embedding):
        return table.num_embeddings
    size: int = config.get_text_config().vocab_size
    return size


def _ids(batch: int, tokens: int, size: int) -> Tensor:
    return (torch.arange(batch * tokens, device="cpu").view(batch, tokens) * 7 + 1) % size


def _features(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, device="cpu").cos().view(shape)
