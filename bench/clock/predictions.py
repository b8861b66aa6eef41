"""What the clock's model says of entries at the shapes of large models: docs/clock-predictions.md.

python -m bench.clock.predictions [part of a name ...]     without a part: the entries named below
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from tpkernels.dispatch.registered import entry_specs
from tpkernels.dispatch.workload import of_entry
from tpkernels.gate.ahead_of_time import Entry, ast_source, compile_key, gpu_target
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.launch import Built
from tpkernels.gate.clock.model import ERROR, predict_built
from tpkernels.gate.compile_gate import has_parts
from tpkernels.gate.disk_cache import DiskCache

NAMED = (
    "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/none",
    "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z",
    "linear/descriptor/bf16/128x256x64-w8-s3-p2-c1/gelu_tanh+bias+z",
    "linear/descriptor/bf16/128x128x64-w4-s5-p4-c2/gelu_tanh+bias+z",
    "linear/descriptor/bf16/128x128x64-w4-s3-p2-x2/gelu_tanh+bias+z",
    "glu/descriptor/bf16/128x128x64-w8-s4-p2/swiglu+gu",
    "glu/descriptor/bf16/128x128x64-w8-s4-p4-c1/swiglu+gu",
    "dgrad/descriptor/bf16/128x256x64-w8-s3-p4-flat/none",
    "dgrad/descriptor/bf16/128x256x64-w8-s3-p4-flat/gelu_tanh+db",
    "dgrad/descriptor/bf16/128x256x64-w8-s3-p8-c1/gelu_tanh+db",
    "dgrad/descriptor/bf16/128x128x64-w4-s4-p4-c2/gelu_tanh+db",
    "dglu/descriptor/bf16/128x128x64-w8-s4-p4/swiglu+h",
    "dglu/descriptor/bf16/128x128x64-w4-s3-p8-x2/swiglu+h",
    "dglu/descriptor/bf16/128x256x64-w8-s3-p4-flat/swiglu+h",
    "dglu/descriptor/bf16/128x256x64-w8-s3-p8-c1/swiglu+h",
    "dglu/descriptor/bf16/128x128x64-w4-s4-p4-c2/swiglu+h",
    "wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32",
    "norm_fwd/pointer/bf16/8192/rms",
    "norm_bwd/pointer/bf16/8192/rms",
    "reduce_slots/pointer/bf16/16x128/bias",
)
LAYERS = (  # tokens, out_features, in_features
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 3584, 4096),
    (8192, 4096, 3584),
    (8192, 8192, 8192),
)


def built_of(entry: Entry) -> Built:
    """Compiled for sm_90, or from the user's cache."""
    import triton

    cache, key = DiskCache.of_user("published"), compile_key(entry, "sm_90")
    kept: Any = cache.get(key)
    if not isinstance(kept, dict):
        with TemporaryDirectory(prefix="tpkernels-") as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            compiled = triton.compile(ast_source(entry), target=gpu_target("sm_90"), options=entry.options)
        metadata = compiled.metadata
        kept = {"cubin": compiled.asm["cubin"].hex(), "warps": metadata.num_warps, "shared": metadata.shared}
        cache.put(key, kept)
    metadata = SimpleNamespace(num_warps=kept["warps"], shared=kept["shared"])
    return Built.of(SimpleNamespace(asm={"cubin": bytes.fromhex(kept["cubin"])}, metadata=metadata))


def chosen(parts: Sequence[str]) -> list[str]:
    if not parts:
        return list(NAMED)
    names = entry_specs().items()
    return [
        n for n, one in names if "sm_90" in one.architectures and any(has_parts(n, part) for part in parts)
    ]


def table(parts: Sequence[str]) -> Iterator[str]:
    """In Markdown."""
    yield (
        "| entry | step / products alone | edge | blocks an SM | "
        + " | ".join("x".join(map(str, x)) for x in LAYERS)
        + " |"
    )
    yield "|---" * (4 + len(LAYERS)) + "|"
    for name in chosen(parts):
        yield _row(entry_specs()[name].entry())


def _row(entry: Entry) -> str:
    built = built_of(entry)
    cost = cost_of(built, of_entry(entry))
    step = "" if cost.step is None else f"{cost.step.cycles:,.0f} / {cost.ideal:,.0f}"
    cells = [_cell(entry, built, cost, layer) for layer in LAYERS]
    return (
        " | ".join((f"| {entry.name}", step, f"{cost.edge.cycles:,.0f}", str(cost.resident), *cells)) + " |"
    )


def _cell(entry: Entry, built: Built, cost: Cost, layer: tuple[int, int, int]) -> str:
    work = of_entry(entry, layer)
    try:
        if work.product is None:  # a block's cost depends on the shape
            cost = cost_of(built, work)
        found = predict_built(built, work, cost)
    except ValueError:  # a norm, say, of other features than it is compiled for
        return ""
    speed = f", {found.tflops:.0f} TFLOP/s" if found.tflops else ""
    longer = f" to {found.slowest * 1e6:,.0f}" if found.open else ""
    return f"{found.seconds * 1e6:,.0f}{longer} µs{speed}; {found.bound}"


def main() -> None:
    print(f"Model, ± {ERROR:.0%}; cycles are of one SM. After the semicolon stands what costs most.\n")
    for line in table(sys.argv[1:]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
