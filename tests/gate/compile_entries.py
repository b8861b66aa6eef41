"""Compiles catalog entries without a GPU and prints what came out, as JSON. Runs in a process of its own:

    python -m tests.gate.compile_entries sm_90 ENTRY...

The tests that call it run in a process whose kernels are interpreted, and Triton fixes that choice when a
kernel is defined.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget

from tpkernels.gate.catalog import Entry, ast_source, catalog


def compiled(entry: Entry, architecture: str) -> dict[str, object]:
    kernel = triton.compile(
        ast_source(entry),
        target=GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32),
        options={"num_warps": entry.num_warps, "num_stages": entry.num_stages},
    )
    ttir, ttgir, ptx = (kernel.asm[stage] for stage in ("ttir", "ttgir", "ptx"))
    return {
        "shared": kernel.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "serial_wgmma": len(
            [d for d in re.findall(r"ttng\.warp_group_dot .*", ttgir) if "isAsync = true" not in d]
        ),
        "tma_loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*\.shared", ptx)),
        "tma_reductions": len(re.findall(r"cp\.reduce\.async\.bulk\.tensor", ptx)),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
        "first": {  # where in the text of the kernel each stands first; -1: nowhere
            "acquire": ptx.find("ld.global.sys.acquire"),
            "proxy_fence": ptx.find("fence.proxy.async.global"),
            "tma_load": ptx.find("cp.async.bulk.tensor.2d.shared"),
        },
        "offset_types": sorted(set(re.findall(r"tt\.addptr .*, tensor<\S*x(i\d+)\S*>", ttir))),
    }


def main(architecture: str, names: list[str]) -> None:
    entries = {entry.name: entry for entry in catalog()}
    print(json.dumps({name: compiled(entries[name], architecture) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
