"""`explain`: how a call's rows move, who computes, why not better, and what hides behind what.

    print(tpkernels.explain(model, x))
    print(tpkernels.explain(step, batch, model=model))      a function that calls backward, too

The call is made once; its steps are read from the `journal`. All ranks make it together.
"""

from __future__ import annotations

import html
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import commonpath
from textwrap import wrap
from typing import Any, NamedTuple

from torch import Tensor, nn

from tpkernels.journal import OpStep, Transfer, read_by

WIDTH = 110  # of notes, in characters
NOTHING = "-"


@dataclass(eq=False)
class OpCall:
    """A call of an op, or of a product outside of ops. site: the module whose parameters it takes, or ""."""

    name: str
    site: str
    transfers: list[Transfer] = field(default_factory=list)
    products: list[OpStep] = field(default_factory=list)


class CallsRead:
    """Reads the calls of ops from the journal, and which products hide which transfers."""

    def __init__(self, sites: Mapping[int, str]) -> None:
        """sites: names of parameters by the addresses of their numbers"""
        self.calls: list[OpCall] = []
        self.hidden_behind = defaultdict[Transfer, list[OpStep]](list)
        self._sites, self._in_flight = sites, list[Transfer]()
        self._open = defaultdict[int, list[OpCall]](list)  # by thread

    def begin(self, step: OpStep) -> None:
        ops = self._open[threading.get_ident()]
        if step.kind == "op":
            ops.append(OpCall(step.name, self._site_of(step)))
            self.calls.append(ops[-1])
        elif step.kind == "transfer" and step.transfer is not None:
            self._in_flight.append(step.transfer)
            if not ops:  # such as a check of a layer's
                self.calls.append(OpCall(step.name, "", [step.transfer]))
            else:  # as errors name the op: several share an operator
                ops[-1].name = step.name
                ops[-1].transfers.append(step.transfer)
        elif step.kind == "product":
            if ops:
                ops[-1].products.append(step)
            else:
                self.calls.append(OpCall(step.name, self._site_of(step), [], [step]))
            self._in_flight = [transfer for transfer in self._in_flight if not transfer.is_awaited]
            for transfer in self._in_flight:
                if transfer.is_sent:
                    self.hidden_behind[transfer].append(step)

    def end(self, step: OpStep) -> None:
        if step.kind == "op":
            self._open[threading.get_ident()].pop()

    def _site_of(self, step: OpStep) -> str:
        names = {
            self._sites[address] for address in map(Tensor.data_ptr, step.tensors) if address in self._sites
        }
        paths = [name.replace(".", "/").rpartition("/")[0] for name in names]
        return commonpath(paths).replace("/", ".") if paths else ""


class CallRow(NamedTuple):
    """A row of the table."""

    site: str
    op: str
    moves: str
    by: str
    hidden_behind: str
    computed: str
    notes: tuple[str, ...]  # why not better


HEADINGS = ("call site", "op", "moves", "by", "hidden behind", "computed", "why not better")


class Explanation:
    """A table of call sites, which prints itself in a terminal and in a notebook.

    rows: equal calls of layers that differ in a number, such as `layers.*.mlp`, are one row, with a count
    """

    def __init__(self, rows: Mapping[CallRow, int]) -> None:
        self.rows = rows
        self.notes = list(dict.fromkeys(note for row in rows for note in row.notes))

    def cells(self) -> list[list[str]]:
        """Return the cells of the table, without its headings."""
        return [
            [
                f"{count} x {row.site}" if count > 1 else row.site,
                *row[1:-1],
                " ".join(f"[{self.notes.index(note) + 1}]" for note in row.notes),
            ]
            for row, count in self.rows.items()
        ]

    def __str__(self) -> str:
        table = [list(HEADINGS), *self.cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        for number, note in enumerate(self.notes, 1):
            lines += wrap(f"[{number}] {note}", WIDTH, subsequent_indent="    ")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self.cells())
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<table>{row(HEADINGS, 'th')}{body}</table><ol>{notes}</ol>"


def explain(
    model_or_function: Callable[..., Any],
    *inputs: object,
    model: nn.Module | None = None,
    **options: object,
) -> Explanation:
    """Call a model or a function once, and return a table of what its ops do, and why not better.

    A call site is named by the module whose parameters the op takes. All ranks of its groups call this.

    model: whose parameters name call sites, if what is called is a function
    options: further arguments of the call
    """
    named = model_or_function if isinstance(model_or_function, nn.Module) else model
    sites = {} if named is None else {p.data_ptr(): name for name, p in named.named_parameters() if p.numel()}
    read = CallsRead(sites)
    with read_by(read):
        model_or_function(*inputs, **options)
    return Explanation(Counter(row for call in read.calls for row in _rows_of(call, read.hidden_behind)))


def _rows_of(call: OpCall, hidden_behind: Mapping[Transfer, Sequence[OpStep]]) -> Iterable[CallRow]:
    site = re.sub(r"\.\d+(?=\.|$)", ".*", call.site) or NOTHING
    by = {step.by: [each.name for each in call.products if each.by == step.by] for step in call.products}
    computed = (
        "; ".join(f"{', '.join(dict.fromkeys(names))} by {who}" for who, names in by.items()) or NOTHING
    )
    why = tuple(dict.fromkeys(step.why for step in call.products if step.why))
    if not call.transfers and call.products:  # else it is a region of a rank that has all
        yield CallRow(site, call.name, NOTHING, NOTHING, NOTHING, computed, why)
    for transfer in call.transfers:
        hiding = Counter(step.name for step in hidden_behind.get(transfer, ()))
        behind = ", ".join(f"{count} {name}" for name, count in hiding.items())
        notes = filter(None, (transfer.why, "" if behind else transfer.why_bare))
        yield CallRow(
            site, call.name, transfer.what, transfer.way, behind or "nothing", computed, (*notes, *why)
        )
        computed, why = '"', ()
