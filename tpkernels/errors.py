"""Texts of errors, and warnings of all ranks, which are reported once."""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

LONGEST = 160  # characters that are quoted of a text
BEGINNING = 24  # of them, from its beginning

_said: WeakKeyDictionary[Store, set[str]] = WeakKeyDictionary()  # by this rank, which goes on saying it
_of_parent: list[Store] = []  # a fork must not use its parent's connection

_CHATTER: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\s*(Exception raised from |\(?frame #\d+: ).*", re.DOTALL), ""),  # a C++ back trace
    (re.compile(r"\[enforce fail at [^\]]*\] [^.]*\. ?"), ""),  # a place in a source, and what it looked at
    (re.compile(r"\[[^\]\s]*\.(?:cc|cpp|h|hpp):\d+\] ?"), ""),  # a place in a source
    (re.compile(r"Gloo connectFullMesh failed with"), "ranks could not connect:"),
    (re.compile(r" ?\(?\b0x[0-9a-f]{6,}\b\)?"), ""),  # an address in memory
)


def cause_of(error: object) -> str:
    """Return a backend's message without places in its source, back traces and addresses.

    >>> cause_of(RuntimeError("[/pytorch/gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:213"))
    'Connection closed by peer [127.0.0.1]:213'
    """
    text = str(error)
    for pattern, instead in _CHATTER:
        text = pattern.sub(instead, text)
    return text.strip() or type(error).__name__


def difference(calls: Sequence[str]) -> tuple[str, list[str]]:
    """Return the first argument in which the calls differ, and its value in each call, both short.

    calls: in Python's words. Texts that are no calls of one function differ as a whole: the argument is ""

    >>> difference(["new(size=2, plan=Plan(tensor=4, data=1))", "new(size=2, plan=Plan(tensor=2, data=2))"])
    ('plan.tensor of new', ['4', '2'])
    >>> difference(["sum of x", "sum of y"])
    ('', ['sum of x', 'sum of y'])
    """
    try:
        nodes: list[ast.expr | None] = [ast.parse(call, mode="eval").body for call in calls]
    except (SyntaxError, ValueError, RecursionError):
        return "", quoted(calls)
    function, path = _kind(nodes[0]), list[str]()
    while len({_kind(node) for node in nodes}) == 1:
        arguments = [_arguments(node) for node in nodes]
        for name in dict.fromkeys(name for each in arguments for name in each):
            nodes = [each.get(name) for each in arguments]
            if len({_text(node) for node in nodes}) > 1:
                path.append(name)
                break
        else:
            break
    if not path:
        return "", quoted(calls)
    return f"{'.'.join(path)} of {function}", quoted([_text(node) for node in nodes])


def short(call: str) -> str:
    """Return a call, shortened to the function's name if it is long.

    >>> short(f"parallelize({'plan, ' * 100})")
    'parallelize(...)'
    """
    return call if len(call) <= LONGEST else f"{call[:LONGEST].partition('(')[0]}(...)"


def quoted(texts: Sequence[str]) -> list[str]:
    """Return short texts, or of long texts the beginning and the surroundings of the first difference."""
    if max(map(len, texts)) <= LONGEST:
        return list(texts)
    alike = takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))
    first = max(0, len(list(alike)) - LONGEST // 4)
    end = first + LONGEST
    begin = min(first, BEGINNING)
    return [
        f"{text[:begin]}{'...' * (first > begin)}{text[max(first, begin) : end]}{'...' * (len(text) > end)}"
        for text in texts
    ]


def _kind(node: ast.expr | None) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else type(node).__name__


def _arguments(node: ast.expr | None) -> Mapping[str, ast.expr]:
    """Of a call, or what a list, a tuple or a dict has, by name or number."""
    if isinstance(node, ast.Call):
        named = {keyword.arg or "**": keyword.value for keyword in node.keywords}
        return {**{str(number): value for number, value in enumerate(node.args)}, **named}
    if isinstance(node, ast.Dict):
        return {_text(key).strip("'"): value for key, value in zip(node.keys, node.values, strict=True)}
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return {str(number): element for number, element in enumerate(elements)}


def _text(node: ast.expr | None) -> str:
    return "nothing" if node is None else ast.unparse(node)


def is_first_to_say(text: str, place: str = "") -> bool:
    """Whether no other rank has reported this text at this place before; does not wait.

    Without a process group the first rank of a machine says everything.
    """
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    name = hashlib.sha256(f"{place} {text}".encode()).hexdigest()
    store = distributed_c10d._get_default_store()
    said = _said.setdefault(store, set())
    if name in said or any(store is other for other in _of_parent):
        return True
    try:
        first = store.add(f"tpkernels said {name}", 1) == 1
    except RuntimeError:  # the store has ended with the launcher
        return True
    if first:
        said.add(name)
    return first


def warn(text: str, *, stacklevel: int) -> None:
    """Call `warnings.warn` on one rank of each machine."""
    if is_first_to_say(text, socket.gethostname()):
        warnings.warn(text, stacklevel=stacklevel + 1)


def logger_of_machine(name: str) -> logging.Logger:
    """Return a logger that writes each line on one rank of a machine."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_for_us)
    return logger


def _is_for_us(record: logging.LogRecord) -> bool:
    return is_first_to_say(record.getMessage(), socket.gethostname())


def _disown_store_of_parent() -> None:
    if dist.is_initialized():
        _of_parent.append(distributed_c10d._get_default_store())


os.register_at_fork(after_in_child=_disown_store_of_parent)
