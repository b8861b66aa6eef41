"""All ranks of a group agree, or all raise the same error.

`agree` compares what ranks bring to a call: one small all-gather of a digest. Only if digests differ, a
second one brings what each rank has, so that every rank can say who differs, and where. `offers_of_all` tells
each rank what the others offer for something that all make together, `bytes_of_all` whatever ranks bring.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import Call, handshake
from tpkernels.comm.calls import CannotTakePart as CannotTakePart
from tpkernels.comm.dump import install_if_asked
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports import processes
from tpkernels.comm.transports.c10d import gather_small
from tpkernels.errors import cause_of, difference, short

_DIGEST_BYTES = 16
_OFFER_CHARACTERS, _OFFER_BYTES = 256, 16 * 1024  # of a text, and of what a rank offers: up to five texts


class Closable(Protocol):
    """An object that all ranks build, and close if one of them could not build it."""

    def close(self) -> None: ...


B = TypeVar("B", bound=Closable)
Problem = tuple[str, str]  # why a rank cannot take part: the type of an error, and its text


@dataclass(frozen=True)
class Claim:
    """The arguments of a call on one rank, which `agree` compares with those of the other ranks.

    request: the call and its options
    tensors: each one's name, shape, dtype and layout
    problem: why this rank cannot take part, if so: the type of the error and its text
    is_data: whether ranks have read the tensors, rather than made them
    """

    request: str
    tensors: tuple[str, ...]
    problem: Problem | None = None
    is_data: bool = False

    def refuse(self) -> NoReturn:
        """Raise the problem, without asking other ranks."""
        _raise_problem([self], [dist.get_rank()])
        raise AssertionError("there is no problem")


def agree(claim: Claim, group: ProcessGroup) -> None:
    """Compare the claims of all ranks: return on all of them, or raise the same error on all of them."""
    install_if_asked()
    text = json.dumps([claim.request, claim.tensors, claim.problem]).encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    message = torch.frombuffer(bytearray(digest + len(text).to_bytes(8, "little")), dtype=torch.uint8)
    call = handshake(claim.request, "comparison of what ranks bring", group)
    try:
        answers = _all_gather(message, call)
        if bool((answers == answers[0]).all()):
            if claim.problem is None:
                return
            claims = [claim] * len(answers)
        else:
            claims = [
                Claim(request, tuple(tensors), tuple(problem) if problem else None, claim.is_data)
                for request, tensors, problem in _gather_json(text, max(map(_length, answers)), call)
            ]
    except RuntimeError as error:
        raise RuntimeError(
            f"{short(claim.request)}: ranks of process group '{group.group_name}' could not compare what "
            f"they bring; a rank died, came too late, or left the common order of calls. Cause: "
            f"{call.calls.first_failure() or cause_of(error)}"
        ) from error
    ranks = dist.get_process_group_ranks(group)
    _raise_problem(claims, ranks)
    _raise_difference(claims, ranks)


def offers_of_all(
    name: str, call: Call, problem: str, wanted: str = "", offer: Sequence[str] = ()
) -> list[list[str]]:
    """Return the offers of all ranks; all raise if a rank asks for something else or cannot take part.

    problem: why this rank cannot take part, if so
    wanted: what all must ask for alike. Long texts are cut.
    """
    texts = [text[:_OFFER_CHARACTERS] for text in (wanted, problem, *offer)]
    found = _gather_json(json.dumps(texts).encode(), _OFFER_BYTES, call)
    here = f"{name} on rank {call.calls.rank}"
    for peer, (theirs, *_) in enumerate(found):
        if theirs != texts[0]:
            raise ValueError(
                f"{here}: expected equal arguments on all ranks, got {texts[0]} here and "
                f"{theirs} on rank {peer}"
            )
    for peer, (_, why, *_) in enumerate(found):
        if why:
            raise CannotTakePart(f"{here}: rank {peer} cannot take part: {why}")
    return [offered for _, _, *offered in found]


def offers_here(
    name: str, call: Call, problem: str, wanted: str, offer: str, place: str = ""
) -> tuple[list[int], list[str]]:
    """Return the ranks on this machine, this one among them, and what each rank of the group offers.

    All raise if a rank wants something else (another shape, say), or has a problem.
    place: on the machine; ranks at others count as on another machine
    """
    found = offers_of_all(name, call, problem, wanted, (processes.machine() + place, offer))
    own = found[call.calls.rank][0]
    return [peer for peer, (theirs, _) in enumerate(found) if theirs == own], [theirs for _, theirs in found]


def built_by_all(name: str, call: Call, build: Callable[[], B]) -> B:
    """Return the result of `build` once it has succeeded on all ranks; all raise if it fails on one."""
    built, problem = None, ""
    try:
        built = build()
    except Exception as error:  # whatever it is, the others wait to be told
        problem = f"{type(error).__name__}: {error}"
    try:
        offers_of_all(name, call, problem)
    except BaseException:
        if built is not None:
            built.close()
        raise
    assert built is not None, "this rank had no problem"
    return built


def bytes_of_all(name: str, own: bytes, group: ProcessGroup) -> list[bytes]:
    """Return the bytes of all ranks, whose lengths may differ. name: of the call, for errors"""
    call = handshake(name, "bytes of all ranks", group)
    lengths = _all_gather(torch.tensor([len(own)], device="cpu"), call).flatten().tolist()
    padded = torch.frombuffer(bytearray(own.ljust(max(lengths))), dtype=torch.uint8)
    rows = _all_gather(padded, call)
    return [ctypes.string_at(row.data_ptr(), size) for row, size in zip(rows, lengths, strict=True)]


def describe(name: str, tensor: Tensor, *, strides: bool = True) -> str:
    """Describe in words what must be equal on all ranks: name, shape, dtype and, if asked, strides."""
    layout = ""
    if strides and not tensor.is_contiguous():
        dense = torch.empty_like(tensor, device="meta").stride()
        contiguous = torch.empty(tensor.shape, device="meta").stride()
        layout = "" if dense == contiguous else f" strides {dense}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"'{name}' {tuple(tensor.shape)} {dtype} on {tensor.device.type}{layout}"


def _all_gather(message: Tensor, call: Call) -> Tensor:
    """(ranks, bytes), on the CPU."""
    return gather_small(call, message.to(exchange_device(call.group))).cpu()


def _length(answer: Tensor) -> int:
    return int.from_bytes(bytes(answer[_DIGEST_BYTES:].tolist()), "little")


def _gather_json(text: bytes, longest: int, call: Call) -> list[Any]:
    """What the texts of all ranks say, which are padded to one length."""
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    rows = _all_gather(padded, call)
    return [json.loads(ctypes.string_at(row.data_ptr(), len(row))) for row in rows]


def _raise_problem(claims: Sequence[Claim], ranks: Sequence[int]) -> None:
    problems = [(rank, claim) for rank, claim in zip(ranks, claims, strict=True) if claim.problem]
    if not problems:
        return
    first, claim = problems[0]
    assert claim.problem is not None
    kind, text = claim.problem
    alike = [rank for rank, other in problems if other.problem == claim.problem]
    error = getattr(builtins, kind, ValueError)
    raise error(f"{short(claim.request)}: on {_listed(alike or [first])}: {text}")


def _raise_difference(claims: Sequence[Claim], ranks: Sequence[int]) -> None:
    advice = "every rank must bring the same, in the same order"
    if _differ([claim.request for claim in claims]):
        where, found = difference([claim.request for claim in claims])
        on = f" on {where}" if where else ""
        raise ValueError(f"ranks disagree{on}: {_by_rank(found, ranks)}; {advice}")
    request = short(claims[0].request)
    for position in range(min(len(claim.tensors) for claim in claims)):
        here = [claim.tensors[position] for claim in claims]
        if _differ(here) and claims[0].is_data:
            raise ValueError(
                f"{request}: other data on the ranks of a tensor group: give each the same batch, by a "
                f"sampler over state.rank_in('dp') of state.size('dp'). {_by_rank(here, ranks)}"
            )
        if _differ(here):
            raise ValueError(
                f"{request}: ranks disagree on tensor {position}; {advice}: {_by_rank(here, ranks)}"
            )
    counts = [str(len(claim.tensors)) for claim in claims]
    shortest = min(len(claim.tensors) for claim in claims)
    surplus = next(claim.tensors[shortest] for claim in claims if len(claim.tensors) > shortest)
    raise ValueError(
        f"{request}: ranks disagree on the number of tensors; {advice}: {_by_rank(counts, ranks)}; the first "
        f"that some ranks lack is {surplus}"
    )


def _differ(values: Sequence[str]) -> bool:
    return len(set(values)) > 1


def _by_rank(values: Sequence[str], ranks: Sequence[int]) -> str:
    owners: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        owners.setdefault(value, []).append(rank)
    return "; ".join(f"{_listed(who)} has {value}" for value, who in owners.items())


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
