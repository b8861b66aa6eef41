"""Finds replicated parameters with partial gradients by one forward without communication.

The gradient of a parameter between a column and a row layer, such as a norm of queries or keys, is partial:
each rank sees its own features only. To find such parameters, a copy of the unsharded model is called: its
column layers return this rank's features, its row layers get zeros for the features of other ranks. In
autograd's graph a gradient is partial if a path leads from a row layer to the parameter without a column
layer on it. Without such a graph, the positions of modules decide.

Copies a model to try a plan on, makes up inputs for it, and calls it.

The numbers of sequences and tokens are coprime to the ranks: a model that folds features into them, because
it has one rank's heads only, returns another shape. The last id of a sequence ends it; no other is special.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import count, islice
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map

from tpkernels.interop.parallelize.changes import Changes
from tpkernels.interop.parallelize.hf_modules import ModuleChange
from tpkernels.interop.parallelize.plan import activate_adapters

# A tensor, positional arguments, or arguments by name.
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
IMAGE_SIDE = 64  # of a model that takes images of any size


def twin_of(
    model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    """Return a copy in eval mode; all of its floating-point parameters require gradients.

    dtype: of its floating-point tensors; None: the parameters share memory with the model's
    device: tensors on the meta device become zeros on it; None: they stay
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        value, floating = tensor.detach(), tensor.is_floating_point()
        if value.is_meta and device is not None:
            value = torch.zeros_like(value, device=device)
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
    if "decoder_input_ids" in inputs:  # a classifier makes them from the encoder's
        yield {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    if main == "input_ids":  # multiple choice, of two
        yield {main: torch.stack([inputs[main], inputs[main].roll(1, 1)], 1)}
    yield {name: value[:1] for name, value in inputs.items()}  # a classifier that knows no padding


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


ParameterNames = frozenset[str]


def partial_parameters(model: nn.Module, changes: Changes, seen: dict[str, bool]) -> ParameterNames:
    """Return names of parameters with partial gradients; raise if it is unknown for a parameter.

    seen: from `graph_of_rank`: by name, whether a parameter sees this rank's features only
    """
    replaced = changes.handled
    said = {id(p): partial for module, partial in changes.kept.items() for p in module.parameters()}
    beside = {id(p) for module in _beside_split(model, changes.modules) for p in module._parameters.values()}
    names = []
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in replaced or not parameter.is_floating_point():
            continue
        if key not in said and name not in seen and key in beside:
            raise ValueError(
                f"'{name}' is next to split layers, and no call shows whether its gradient is full or "
                "partial. Pass verify=example inputs that use it, or give the plan an entry for its "
                "module: 'replicated', if it works on full features, or 'partial', if on this rank's. "
                "Reentrant checkpointing in eval mode hides its use; turn checkpointing on afterwards"
            )
        if said.get(key, seen.get(name, False)):
            names.append(name)
    return frozenset(names)


def graph_of_rank(twin: nn.Module, changes: Changes, inputs: Inputs) -> dict[str, bool]:
    """Return for each parameter that the twin uses whether it sees this rank's features only.

    changes: of the twin; this call divides its numbers
    """
    entering: set[Node] = set()  # walking backward: inputs of row layers, where features become split
    leaving: set[Node] = set()  # and outputs of column layers, where they are full again
    roots: list[Tensor] = []
    running: list[str] = []
    names = {id(p): name for name, p in twin.named_parameters()}
    replaced = changes.handled
    changes.set_numbers()
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: running.append(name))
    for change in changes.modules:
        if change.narrows_output:
            change.old.register_forward_hook(_returns_shard(change, leaving))
        elif change.kind == "row":
            change.old.register_forward_pre_hook(_pads_input(change, entering))
            change.old.register_forward_hook(lambda _, __, output: roots.append(output))
        elif change.kind == "parameters" and not change.summed:
            for short in change.cuts:
                whole = getattr(change.old, short).detach()
                setattr(change.old, short, nn.Parameter(change.shard_of(short, whole)))
    for module, _ in changes.tails:
        module.register_forward_hook(partial(_leaves, leaving))
    for module in twin.modules():
        module.register_forward_hook(lambda *_: running.__delitem__(-1))
    try:
        with trial_context(twin):
            output = floating_tensors(call_model(twin, inputs))[:1]
    except Exception as error:
        place = (running or [""])[-1] or type(twin).__name__
        raise ValueError(
            f"plan: '{place}' does not take this rank's features, though it takes all of them. If it reads "
            "their number from an attribute, give the plan a Divided; otherwise split it, or the layers "
            f"before it, in another way. It raises {type(error).__name__}: {error}"
        ) from error
    found = _walk([*output, *roots], entering, leaving)
    said = {id(p) for module in changes.kept for p in module.parameters()}
    both = [names[p] for p, where in found.items() if len(where) == 2 and p in names and p not in said]
    if both:
        raise ValueError(
            f"plan: '{both[0]}' reaches full features, and split features without a column before them"
            f"{f'; so do {len(both) - 1} more parameters' if len(both) > 1 else ''}: their gradients would "
            "be neither full nor partial. Let its results enter through a column, or split less"
        )
    return {names[p]: True in where for p, where in found.items() if p in names and p not in replaced}


def _returns_shard(change: ModuleChange, leaving: set[Node]) -> Any:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        shard = change.own_output(output)
        if shard.grad_fn is not None:  # under no_grad, as in reentrant checkpointing, there is no graph
            leaving.add(shard.grad_fn)
        return shard

    return hook


def _leaves(leaving: set[Node], _: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Treat the full output as leaving split features: features before the tail enter a column."""
    output = output.clone()
    if output.grad_fn is not None:
        leaving.add(output.grad_fn)
    return output


def _pads_input(change: ModuleChange, entering: set[Node]) -> Any:
    assert change.features is not None
    features, full = change.features.size, change.features.full

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if x.shape[-1] != features:
            raise ValueError(f"expected this rank's {features} of {full} features, got {tuple(x.shape)}")
        padded = F.pad(x, (0, full - features))
        if padded.grad_fn is not None:
            entering.add(padded.grad_fn)
        return (padded, *args[1:])

    return hook


def _walk(roots: Iterable[Tensor], entering: set[Node], leaving: set[Node]) -> dict[int, set[bool]]:
    """Return for each parameter, by id, whether split features (True), full ones (False) or both reach it."""
    todo = deque((x.grad_fn, False) for x in roots)
    visited: set[tuple[Node, bool]] = set()
    found: dict[int, set[bool]] = {}
    while todo:
        node, split = todo.popleft()
        if node is None or (node, split) in visited:
            continue
        visited.add((node, split))
        split = node in entering or (split and node not in leaving)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.setdefault(id(variable), set()).add(split)
        todo.extend((parent, split) for parent, _ in node.next_functions)
    return found


def _beside_split(model: nn.Module, changes: list[ModuleChange]) -> set[nn.Module]:
    """Return parents with a split layer among their children, and their children's modules without one."""
    split = {change.old for change in changes if change.narrows_output or change.kind == "row"}

    def children(module: nn.Module) -> Iterable[nn.Module]:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                yield from children(child)
            yield child

    found = set()
    for parent in model.modules():
        if split.isdisjoint(children(parent)) or parent in split:
            continue
        found.add(parent)
        for child in children(parent):
            if split.isdisjoint(child.modules()):
                found.update(child.modules())
    return found
