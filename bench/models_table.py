"""The page of models of `transformers`, `docs/models-supported.md`: each is tried and compared, on two ranks.

python -m bench.models_table             write the page
python -m bench.models_table Qwen Gemma  only those whose names contain a word; no page is written

It ends with 1 if a model that `parallelize` took was wrong, or failed, since it should have been refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.interop.architecture_runs import STEPS, Outcome, ours, theirs
from tests.interop.architectures import ARCHITECTURES, KINDS
from tests.ranks import RankFailure, RankPool

PAGE = Path(__file__).parents[1] / "docs" / "models-supported.md"
RANKS = 2
SECONDS = 120.0  # of one model on a loaded machine, importing it included
UNSOUND = ("wrong", "fails")
HARDLY = 0.75  # of a model's numbers on a rank: it is split, but that saves little memory
HEADER = """# Models of transformers that were tried

For those who want to know whether `parallelize(model)` splits their model of `transformers` rightly.

Each model trained for {steps} steps of AdamW: unsharded, and after `parallelize(model)`, without a plan or
options, on {ranks} tensor-parallel ranks (gloo, CPU). Models are tiny, with random weights: 1 or 2 layers, 32
features, 4 heads, 2 heads of keys and values, 61 ids. Written {date} with torch {torch} and `transformers`
{transformers} by `python -m bench.models_table`, part of `make check-transformers`; sizes and inputs are in
`tests/interop/architectures.py`.

{counts}

- **right**: all three differences from the unsharded model are allowed, as below.
- **refused**: an error before anything is replaced. "Why not" below each table quotes it.
- **wrong**, **fails** (an error in training): faults of the splitting. `parallelize` must have none.
- **no plan**: `transformers` cannot split this model.
- **a rank holds**: this fraction of the model's numbers, at least one half. Where it is more, layers stay on
  every rank, and `parallelize` warns with their names.
- **transformers itself**: the model loaded by `from_pretrained` with `DistributedConfig(tp_size={ranks})`,
  compared in the same way. In parentheses: the largest of the three differences.

| difference | of | allowed in fp64 | in fp32 |
|---|---|---|---|
| loss | the {steps} losses, the largest; `transformers` computes losses in float32 | 1e-6 | 1e-4 |
| gradients | their norm in the first step, relative; AdamW would hide it | 1e-6 | 1e-5 |
| outputs | outputs after the last step, relative to the largest | 1e-4 | 1e-3 |

Models run in fp32 where they cannot run in float64, as most with experts. A few models amplify rounding by
millions: their outputs may differ as much as noise of 2<sup>-24</sup> on the weights changes those of the
unsharded model.
"""
COLUMNS = (
    "model",
    "dtype",
    "parallelize",
    "loss",
    "gradients",
    "outputs",
    "a rank holds",
    "transformers itself",
)
Both = tuple[Outcome, Outcome]


def page(outcomes: Mapping[str, Both], kinds: Mapping[str, Mapping[str, object]] = KINDS) -> str:
    """Of `parallelize` and of transformers itself, for each architecture."""
    text = HEADER.format(
        ranks=RANKS,
        steps=STEPS,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        torch=version("torch").partition("+")[0],
        transformers=version("transformers"),
        counts="\n".join(_counts(outcomes, kinds)),
    )
    return text + "".join("\n".join(_section(kind, names, outcomes)) for kind, names in kinds.items())


def _counts(outcomes: Mapping[str, Both], kinds: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    columns = ["", "tried", "`parallelize` right", f"of these, a rank holds over {HARDLY}", "refused"]
    columns += ["wrong or fails", "transformers itself right", "no plan", "wrong, refused or fails"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for kind, names in [*kinds.items(), ("**All**", outcomes)]:
        mine, its = zip(*(outcomes[name] for name in names), strict=True)
        numbers = [
            len(mine),
            _count(mine, "right"),
            sum(outcome.verdict == "right" and outcome.held > HARDLY for outcome in mine),
            _count(mine, "refused"),
            _count(mine, *UNSOUND),
            _count(its, "right"),
            _count(its, "no plan"),
            _count(its, *UNSOUND, "refused"),
        ]
        yield f"| {kind} | {' | '.join(map(str, numbers))} |"


def _count(outcomes: tuple[Outcome, ...], *verdicts: str) -> int:
    return sum(outcome.verdict in verdicts for outcome in outcomes)


def _section(kind: str, names: Mapping[str, object], outcomes: Mapping[str, Both]) -> Iterator[str]:
    yield f"\n## {kind}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for name in names:
        yield row(name, *outcomes[name])
    whys = [
        (name, who, outcome)
        for name in names
        for who, outcome in zip(("", " of transformers itself"), outcomes[name], strict=True)
        if outcome.why
    ]
    if whys:
        yield "\nWhy not:\n"
        for name, who, outcome in whys:
            yield f"- `{name}`{who}, {outcome.verdict}: {first_sentence(outcome.why)}"
    yield ""


def row(name: str, mine: Outcome, its: Outcome) -> str:
    apart = [_off(each) for each in mine.apart] if mine.apart else [""] * 3
    held = f"{mine.held:.2f}" if mine.apart else ""
    other = f"{_strong(its)} ({_off(max(its.apart))})" if its.apart else _strong(its)
    dtype = mine.dtype.replace("float", "fp")
    return f"| `{name}` | {dtype} | {_strong(mine)} | {' | '.join(apart)} | {held} | {other} |"


def _off(number: float) -> str:
    return f"{number:.0e}" if number else "0"


def _strong(outcome: Outcome) -> str:
    return f"**{outcome.verdict}**" if outcome.verdict in UNSOUND else outcome.verdict


def first_sentence(text: str) -> str:
    """Of an error, in one line of Markdown."""
    line = " ".join(text.split())
    end = min((at for at in (line.find(". "), line.find("; ")) if at > 0), default=len(line))
    return line[: min(end, 300)].rstrip(".").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def tried(names: list[str], told: Callable[[str], None] = print) -> dict[str, Both]:
    """Each by ranks that go on with the next model if one ends them."""
    mine: dict[str, Outcome] = {}
    found: dict[str, Both] = {}
    with RankPool(RANKS) as pool:
        for name in names:
            mine[name] = _outcome(pool, ours, name)
            told(f"{name}: {mine[name].verdict} {mine[name].apart or first_sentence(mine[name].why)}")
    with RankPool(RANKS) as pool, TemporaryDirectory() as folder:
        for name in names:
            found[name] = mine[name], _outcome(pool, theirs, name, folder)
            told(f"{name}, by transformers itself: {found[name][1].verdict}")
    return found


def _outcome(pool: RankPool, function: Callable[..., Outcome], *args: str) -> Outcome:
    """The worst of the ranks'."""
    try:
        outcomes = pool.run(function, *args, timeout=SECONDS)
    except RankFailure as failure:
        return Outcome("fails", str(failure).partition("\n")[2])
    return max(outcomes, key=lambda outcome: ("right", "no plan", "refused", *UNSOUND).index(outcome.verdict))


def main(words: list[str]) -> int:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    names = [name for name in ARCHITECTURES if not words or any(word in name for word in words)]
    outcomes = tried(names)
    if not words:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    unsound = [name for name, (mine, _) in outcomes.items() if mine.verdict in UNSOUND]
    print(f"{len(names)} models tried; wrong, or failed in training: {', '.join(unsound) or 'none'}")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
