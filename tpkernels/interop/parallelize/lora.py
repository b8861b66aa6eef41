"""Splits peft's LoRA layers with the model: a plan's entry for a layer applies to the layer that LoRA wraps.

Y = W X + scaling * B A X. Where W is split along its out_features, B is too, and A is replicated; where W is
split along its in_features, A is too, and B is replicated. peft is not imported: a model without it has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tpkernels.interop.parallelize.hf_modules import Cut, SplitDropout


def split_with(name: str, module: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to which a plan's entry for `module` applies: itself, or the layers in peft's adapter.

    kind: how the plan splits the module, as in `Split`; "" if it keeps the module
    """
    if not is_of_peft(module):
        yield name, module
        return
    inside = dict(module.named_modules(prefix=name))
    if type(module).__name__ == "ModulesToSaveWrapper":
        for path in (f"{name}.original_module", *_below(inside, f"{name}.modules_to_save.")):
            yield path, inside[path]
        return
    _require_plain_lora(name, module)
    yield f"{name}.base_layer", inside[f"{name}.base_layer"]
    if kind == "embedding":
        raise ValueError(
            f"'{name}': expected no LoRA on an embedding whose rows are split; leave it out of target_modules"
        )
    factors = {"": ("lora_A", "lora_B")}.get(kind, ("lora_A",) if kind.startswith("row") else ("lora_B",))
    for factor in factors:
        for path in _below(inside, f"{name}.{factor}."):
            yield path, inside[path]


def is_factor(model: nn.Module, name: str) -> bool:
    """Whether the layer `name` is A or B of an adapter."""
    layer, _, inside = name.rpartition(".")[0].rpartition(".")
    return inside in ("lora_A", "lora_B") and is_of_peft(model.get_submodule(layer))


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel, whose names plans use; any other model itself."""
    find = getattr(model, "get_base_model", None)
    inner = find() if is_of_peft(model) and callable(find) else model
    assert isinstance(inner, nn.Module)
    return inner


def split_dropouts(layer: nn.Module, features: Cut) -> None:
    """Split the dropout of a LoRA layer whose input features are split."""
    rates: nn.ModuleDict = getattr(layer, "lora_dropout", nn.ModuleDict())
    for adapter, dropout in rates.items():
        if isinstance(dropout, nn.Dropout):
            rates[adapter] = SplitDropout(dropout.p, features).train(dropout.training)


def activate_adapters(model: nn.Module) -> None:
    """Activate all adapters of LoRA layers, so that a trial covers any adapter that is active later."""
    for module in model.modules():
        if is_of_peft(module) and (names := [*getattr(module, "lora_A", ())]):
            vars(module).update(_active_adapter=names, _disable_adapters=False)


def refuse_what_differs(name: str, *, variant: str, initialization: object = True) -> None:
    """Raise for options of LoRA that would be wrong on shards.

    name: the layer's
    variant: such as DoRA; "" for none
    """
    if variant:
        raise ValueError(
            f"'{name}': expected plain LoRA, got {variant}, whose norms or routes need the full weight; "
            "leave it off"
        )
    if initialization not in (True, False, "gaussian"):
        raise ValueError(
            f"'{name}': expected init_lora_weights True, False or 'gaussian', got {initialization!r}, which "
            "needs the full weight; apply LoRA before parallelize"
        )


def _require_plain_lora(name: str, module: nn.Module) -> None:
    if not hasattr(module, "lora_A") or not isinstance(getattr(module, "base_layer", None), nn.Module):
        raise TypeError(
            f"'{name}': expected LoRA, or no adapter, got {type(module).__name__} of peft; merge it, or "
            "parallelize before"
        )
    if getattr(module, "merged", False):
        raise ValueError(f"'{name}': expected LoRA that is not merged; call unmerge_adapter() first")
    variants = getattr(module, "lora_variant", {})
    variant = next((type(found).__name__ for found in variants.values()), "")
    refuse_what_differs(name, variant=variant)


def is_of_peft(module: nn.Module) -> bool:
    """Whether the class of a module, or a base of it, is of peft."""
    return any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__)


def _below(inside: dict[str, nn.Module], prefix: str) -> list[str]:
    """Return the paths one level below `prefix`: a layer for each adapter."""
    return [path for path in inside if path.startswith(prefix) and "." not in path.removeprefix(prefix)]
