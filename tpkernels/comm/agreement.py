"""All ranks of a group bring the same tensors, or all get the same error.

One small all-gather of a digest. Only if digests differ, a second one brings what each rank has, so that
every rank can say who differs, and where.
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import Call, handshake
from tpkernels.comm.gather_small import gather_small
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.supported import Problem

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Claim:
    """What one rank brings to a call.

    request: the call and its options
    tensors: each one's name, shape, dtype and layout
    problem: why this rank cannot take part, if so: the type of the error and its text
    """

    request: str
    tensors: tuple[str, ...]
    problem: Problem | None = None

    def refuse(self) -> NoReturn:
        """Raise the problem, without asking other ranks."""
        _raise_problem([self], [dist.get_rank()])
        raise AssertionError("there is no problem")


def agree(claim: Claim, group: ProcessGroup) -> None:
    """Return on all ranks, or raise the same error on all ranks."""
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
            claims = _exchange(text, [_length(answer) for answer in answers], call)
    except RuntimeError as error:
        raise RuntimeError(
            f"{claim.request}: ranks of process group '{group.group_name}' could not compare what they "
            f"bring; a rank died, came too late, or left the common order of calls. Cause: "
            f"{call.calls.first_failure() or error}"
        ) from error
    ranks = dist.get_process_group_ranks(group)
    _raise_problem(claims, ranks)
    _raise_difference(claims, ranks)


def describe(name: str, tensor: Tensor, *, strides: bool = True) -> str:
    """What must be equal on all ranks, in words."""
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


def _exchange(text: bytes, lengths: list[int], call: Call) -> list[Claim]:
    padded = torch.frombuffer(bytearray(text.ljust(max(lengths), b" ")), dtype=torch.uint8)
    claims = []
    for row in _all_gather(padded, call):
        request, tensors, problem = json.loads(bytes(row.tolist()))
        claims.append(Claim(request, tuple(tensors), tuple(problem) if problem else None))
    return claims


def _raise_problem(claims: Sequence[Claim], ranks: Sequence[int]) -> None:
    problems = [(rank, claim) for rank, claim in zip(ranks, claims, strict=True) if claim.problem]
    if not problems:
        return
    first, claim = problems[0]
    assert claim.problem is not None
    kind, text = claim.problem
    alike = [rank for rank, other in problems if other.problem == claim.problem]
    error = getattr(builtins, kind, ValueError)
    raise error(f"{claim.request}: on {_listed(alike or [first])}: {text}")


def _raise_difference(claims: Sequence[Claim], ranks: Sequence[int]) -> None:
    advice = "every rank must bring the same, in the same order"
    if _differ([claim.request for claim in claims]):
        found = _by_rank([claim.request for claim in claims], ranks)
        raise ValueError(f"ranks disagree: {found}; {advice}")
    request = claims[0].request
    for position in range(min(len(claim.tensors) for claim in claims)):
        here = [claim.tensors[position] for claim in claims]
        if _differ(here):
            raise ValueError(
                f"{request}: ranks disagree on tensor {position}: {_by_rank(here, ranks)}; {advice}"
            )
    counts = [str(len(claim.tensors)) for claim in claims]
    shortest = min(len(claim.tensors) for claim in claims)
    surplus = next(claim.tensors[shortest] for claim in claims if len(claim.tensors) > shortest)
    raise ValueError(
        f"{request}: ranks disagree on the number of tensors: {_by_rank(counts, ranks)}; the first that some "
        f"ranks lack is {surplus}; {advice}"
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
