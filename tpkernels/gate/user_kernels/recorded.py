"""Results as they were recorded: what a kernel is compared with whose table says `oracle = "recorded"`.

Of a result its norm is kept, and sums over all elements with signs drawn at random: the squared difference of
two such sums is on average the squared norm of the difference of the results. So a few numbers in a file that
reads well in review tell how far a result of millions of elements has moved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.files import parsed, read_text

if TYPE_CHECKING:  # the gate itself, which reads and writes results, does without torch
    from torch import Tensor

RECORDED = "recorded"
SUMS = 16  # the norm of a difference is known to 18 %
_SEED = 20261129
_AT_ONCE = 1 << 20  # elements, whose signs are drawn at once

RecordedResults = Mapping[str, Mapping[str, Mapping[str, Any]]]  # case -> output -> sketch


def sketch(tensor: Tensor) -> dict[str, Any]:
    """What is kept of a result. Integers must be equal: a hash. So must places without a finite number."""
    if not tensor.dtype.is_floating_point:
        return {"hash": _hash(tensor)}
    values = tensor.double().flatten()
    finite = values.isfinite()
    places = {} if finite.all() else {"hash": _hash(finite)}
    values = values.where(finite, 0.0)
    norm = float(values.norm())
    return {"norm": f"{norm:.9g}", "sums": " ".join(f"{one:.9g}" for one in _sums(values)), **places}


def moved(now: Mapping[str, Any], recorded: Mapping[str, Any]) -> float:
    """‖now - recorded‖ / ‖recorded‖, estimated; infinite where the results cannot be compared."""
    if now.get("hash") != recorded.get("hash") or ("sums" in now) != ("sums" in recorded):
        return float("inf")
    if "sums" not in now:
        return 0.0
    pairs = zip(now["sums"].split(), recorded["sums"].split(), strict=True)
    squares = [(float(one) - float(other)) ** 2 for one, other in pairs]
    return float((sum(squares) / len(squares)) ** 0.5 / max(float(recorded["norm"]), 1e-300))


def _sums(values: Tensor) -> list[float]:
    import torch

    drawn, sums = torch.Generator().manual_seed(_SEED), torch.zeros(SUMS, dtype=torch.float64)
    for part in values.split(_AT_ONCE // SUMS):
        signs = torch.randint(0, 2, (SUMS, part.numel()), generator=drawn, dtype=torch.int8)
        sums += (signs.double() * 2 - 1) @ part
    return [*map(float, sums)]


def _hash(tensor: Tensor) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def read(path: Path) -> RecordedResults:
    """What was recorded; {} if there is no such file, ValueError if it holds anything else."""
    try:
        results: RecordedResults = parsed(read_text(path))["results"]
        return results
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no results: --update records them anew") from error


def write(results: RecordedResults, path: Path) -> None:
    """A line an output, in a fixed order."""
    path.write_text("".join(_lines(results)), encoding="utf-8")


def _lines(results: RecordedResults) -> Iterator[str]:
    yield '{"results": {\n'
    cases = sorted(results.items())
    for number, (case, outputs) in enumerate(cases):
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(outputs.items()))
        yield f" {json.dumps(case)}: {{\n{rows}\n }}{',' * (number + 1 < len(cases))}\n"
    yield "}}\n"
