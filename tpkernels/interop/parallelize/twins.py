"""Copies a model to try a plan on, makes up inputs for it, and calls it.

The numbers of sequences and tokens are coprime to the ranks: a model that folds features into them, because
it has one rank's heads only, returns another shape. The last id of a sequence ends it; no other is special.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import count, islice
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tpkernels.interop.parallelize.lora import activate_adapters

# A tensor, positional arguments, or arguments by name.
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
IMAGE_SIDE = 64  # of a model that takes images of any size


def twin_of(
    model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    """Return a copy in eval mode; all of its floating-point parameters require gradients.

    dtype: of its floating-point tensors; None: the parameters share memory with the model's
    device: tensors on the meta device get memory on it: zeros, and ones for vectors, because weights of norms
        near zero would make hidden states too small to show a fault; None: they stay
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        value, floating = tensor.detach(), tensor.is_floating_point()
        if value.is_meta and device is not None:
            is_ones = isinstance(tensor, nn.Parameter) and tensor.ndim == 1
            value = torch.full_like(value, float(is_ones), device=device)
        if floating and dtype:
            value = value.to(dtype, copy=True)
        elif not isinstance(tensor, nn.Parameter):
            value = value.clone()
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=floating) if is_weight else value
    twin = deepcopy(model, memo).eval()
    activate_adapters(twin)
    return twin


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Call model(inputs), with tensors on the model's device, and floating-point tensors in its dtype."""
    weights = [p for p in model.parameters() if p.is_floating_point()]

    def fitting(value: Any) -> Any:
        if not isinstance(value, Tensor) or not weights:
            return value
        dtype = weights[0].dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=weights[0].device, dtype=dtype)

    fitted = tree_map(fitting, inputs)
    if isinstance(fitted, Mapping):
        return model(**fitted)
    return model(*fitted) if isinstance(fitted, tuple) else model(fitted)


def floating_tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in a module's output, in order."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def trial_context(model: nn.Module) -> Iterator[None]:
    """Compute with gradients, not on the meta device; restore random streams afterwards."""
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    default = torch.get_default_device()
    default = torch.device("cpu") if default.type == "meta" else default
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.inference_mode(False), default:
        yield


def made_up_inputs(model: nn.Module, ranks: int, *, divided: bool = False) -> Iterator[Inputs]:
    """Yield inputs made up for a model, the likeliest first.

    For a model of `transformers` arguments by name. Otherwise ids if the first embedding or linear layer is
    an embedding, else features; none without such a layer.

    divided: make the number of tokens a multiple of the ranks
    """
    batch, tokens = islice((n for n in count(2) if gcd(n, ranks) == 1), 2)
    tokens = 2 * ranks if divided else tokens
    main = getattr(model, "main_input_name", None)
    if isinstance(main, str) and (config := getattr(model, "config", None)) is not None:
        yield from _named(model, config, main, batch, tokens)
        return
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield (_ids(batch, tokens, module.num_embeddings),)
            return
        if isinstance(module, nn.Linear):
            yield (_features(batch, tokens, module.in_features),)
            return


def _named(model: Any, config: Any, main: str, batch: int, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Yield arguments of a model of `transformers`: all that are known, then those for some tasks."""
    inputs: dict[str, Tensor] = {}
    if main == "input_ids":
        if (size := _vocabulary(model, config)) is None:
            return
        inputs[main] = _text(config, batch, tokens, size)
    elif main in ("input_features", "input_values"):
        if (sound := _sound(config, main, batch, tokens)) is None:
            return
        inputs[main] = sound
    elif main != "pixel_values":
        return
    if main == "pixel_values" or hasattr(model, "vision_model"):
        side = _held(config, "image_size") or IMAGE_SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        sizes = (_held(config, "num_channels") or 3, height, width)
        frames = _held(config, "num_frames")  # of a video
        inputs["pixel_values"] = _features(batch, frames, *sizes) if frames else _features(batch, *sizes)
    decoder = getattr(config, "decoder", config)
    if getattr(config, "is_encoder_decoder", False) and hasattr(decoder, "vocab_size"):
        inputs["decoder_input_ids"] = _text(decoder, batch, tokens + 1, decoder.vocab_size)
    yield inputs
    if main == "pixel_values":  # a model that describes images goes on with a text, as Blip
        yield from _described(model, config, inputs, batch, tokens)
    if "decoder_input_ids" in inputs:  # a classifier makes them from the encoder's
        yield {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    if main == "input_ids":  # multiple choice, of two
        yield {main: torch.stack([inputs[main], inputs[main].roll(1, 1)], 1)}
    yield {name: value[:1] for name, value in inputs.items()}  # a classifier that knows no padding


def _described(
    model: Any, config: Any, images: dict[str, Tensor], batch: int, tokens: int
) -> Iterator[dict[str, Tensor]]:
    """Yield images with a text after them, without and with places in it for their features."""
    taken = inspect.signature(model.forward).parameters
    size = _vocabulary(model, config)
    if "input_ids" not in taken or size is None:
        return
    queries = _held(config, "qformer_config")
    named = dict(images)
    if "qformer_input_ids" in taken and queries is not None:
        named["qformer_input_ids"] = _text(queries, batch, tokens, queries.vocab_size)
    text = _text(config, batch, tokens, size)
    place, count = _held(config, "image_token_index"), _held(config, "num_query_tokens")
    if type(place) is int and type(count) is int:
        yield named | {"input_ids": torch.cat([torch.full((batch, count), place), text], 1)}
    yield named | {"input_ids": text}


def _sound(config: Any, main: str, batch: int, tokens: int) -> Tensor | None:
    """Return waves that a model turns into tokens ** 2, or frames of a spectrum; None if unknown."""
    mels, kernels = _held(config, "num_mel_bins"), _held(config, "conv_kernel")
    if main == "input_values" and isinstance(kernels, list | tuple):  # as Wav2Vec2's
        samples = tokens**2
        for kernel, stride in zip(reversed(kernels), reversed(_held(config, "conv_stride")), strict=True):
            samples = (samples - 1) * stride + kernel
        return _features(batch, samples)
    if main == "input_values" and mels and (frames := _held(config, "max_length")):  # as AST's
        return _features(batch, frames, mels)
    if main == "input_features" and mels and _held(config, "max_source_positions"):  # as Whisper's
        return _features(batch, mels, 2 * _held(config, "max_source_positions"))
    features = _held(config, "feature_projection_input_dim") or _held(config, "input_feat_per_channel")
    return _features(batch, 4 * tokens, features) if features and main == "input_features" else None


def _held(config: Any, name: str) -> Any:
    """Return an attribute of a config, or of the first inner config that has it; None without."""
    for each in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        if (found := getattr(each, name, None)) is not None:
            return found
    return None


def _vocabulary(model: Any, config: Any) -> int | None:
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a model of text and images has several
        table = None
    if isinstance(table, nn.Embedding):
        return table.num_embeddings
    return getattr(config.get_text_config(), "vocab_size", None)


def _text(config: Any, batch: int, tokens: int, size: int) -> Tensor:
    """Return plain ids; the last of each sequence is the config's end of sequence, if it has one."""
    named = {
        name: value for name, value in vars(config).items() if name.endswith(("token_id", "token_index"))
    }
    special = {name: value if isinstance(value, list) else [value] for name, value in named.items()}
    marks = {number for numbers in special.values() for number in numbers}
    plain = [number for number in range(size) if number not in marks] or [0]
    ids = torch.tensor(plain, device="cpu")[_ids(batch, tokens, len(plain))]
    for end in special.get("eos_token_id", [])[:1]:
        if isinstance(end, int) and 0 <= end < size:
            ids[:, -1] = end
    return ids


def _ids(batch: int, tokens: int, size: int) -> Tensor:
    return (torch.arange(batch * tokens, device="cpu").view(batch, tokens) * 7 + 1) % size


def _features(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, device="cpu").cos().view(shape)
