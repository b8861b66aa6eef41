"""The two sides of `reshard`: the tensors that each rank holds and needs, and whether they fit.

All ranks gather the descriptions of all ranks, so that each finds the same errors and the same plan.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tpkernels.checkpoints.moves import Block, BlockMove, Placement, common
from tpkernels.checkpoints.peer_memory import Located, Trial, can_read, own_trial
from tpkernels.checkpoints.reshard_transfer import Peer, block_of, free, give_memory, is_freed
from tpkernels.checkpoints.shards import Chunk, TensorShard, require_one_stage, shards_in, shards_of
from tpkernels.comm.transports import select
from tpkernels.comm.transports.processes import machine
from tpkernels.interop.renamed_shards import Heads, NamingScheme, some_names, under_our_names
from tpkernels.layers.world import State

Tensors = Mapping[str, Tensor | TensorShard]  # by name; a plain tensor is a full one, a DTensor a shard


@dataclass
class Side:
    """One rank's shards of the tensors that it holds, or needs.

    shards: by the names of this side
    tensors: by the names under which tensors move
    together: for tensors of the caller's own mapping, the ranks that together hold each full tensor
    """

    shards: dict[str, TensorShard] = field(default_factory=dict)
    tensors: dict[str, Part] = field(default_factory=dict)
    together: dict[str, tuple[int, ...]] = field(default_factory=dict)
    padding: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: nn.Module | Tensors | None, state: State) -> Side:
        side, given = cls(), cast(object, tensors)  # callers need not be type-checked
        if given is None:
            return side
        require_one_stage(state)
        if isinstance(given, nn.Module):
            _require_known_shards(given)
            side.add(shards_of(given, state))
        elif isinstance(given, Mapping):
            shards, side.together = shards_in(given, state)
            side.add(shards)
        else:
            got = type(given).__name__
            raise TypeError(f"expected a model, a mapping of tensors by name, or None, got {got}")
        for name, shard in side.shards.items():
            _require_plain(name, shard.local)
        return side

    def add(self, shards: Mapping[str, TensorShard]) -> None:
        """Add shards to move under their own names; raise if a rank would hold a row twice."""
        for name, shard in shards.items():
            chunks = list(shard.chunks())
            if any(common(block_of(one), block_of(other)) for one, other in combinations(chunks, 2)):
                raise ValueError(
                    f"'{name}': expected ranges that do not overlap on a rank, got some twice; give each "
                    "copy a name of its own"
                )
            self.shards[name], self.tensors[name] = shard, Part(shard.shape, shard.local.dtype, chunks)

    def give_memory(self, names: Iterable[str]) -> None:
        """Give the freed ones among these tensors memory again."""
        for name in names:
            shard = self.shards.get(name)
            if shard is not None and is_freed(shard.local):
                give_memory(shard.tensor)
                self.add({name: shard})

    def free(self, names: Iterable[str]) -> None:
        """Free the memory of these tensors."""
        for name in names:
            if self.tensors.pop(name, None) is not None:  # it has views
                free(self.shards[name].tensor)

    def rename(self, ours: Mapping[str, tuple[int, ...]], names: NamingScheme, heads: Heads | None) -> None:
        """Let all tensors move under our names. ours: full shapes by name"""
        found = under_our_names(self.shards, ours, names, heads)
        self.tensors = {
            name: Part(ours[name], chunks[0].view.dtype, chunks) for name, chunks in found.chunks.items()
        }
        self.padding = found.padding

    @property
    def chunks(self) -> dict[str, Sequence[Chunk]]:
        return {name: part.chunks for name, part in self.tensors.items()}

    @property
    def places(self) -> tuple[object, ...]:
        """Names, ranges and memory of all shards: everything on this side that a plan depends on."""
        found: list[object] = [*self.together.items()]
        for name, shard in self.shards.items():
            local, ranges = shard.local, tuple(map(tuple, shard.ranges))  # which callers may give as lists
            found += name, tuple(shard.shape), shard.dim, ranges, shard.rank, tuple(shard.start)
            found += local.data_ptr(), local.shape, local.stride(), local.dtype, local.device
            found += local.is_neg(), local.is_conj()
        return tuple(found)

    @property
    def is_on_cpu(self) -> bool:
        return all(
            local.device.type == "cpu"
            and not (local.is_conj() or local.is_neg())  # whose bytes are no numbers
            for local in (shard.local for shard in self.shards.values())
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Zero the padding once the tensors are filled, and let autograd know of the new values."""
        for view in self.padding:
            view.zero_()
        for shard in self.shards.values():
            shard.zero_padding()
            torch.autograd.graph.increment_version(shard.local)  # torch did not see the read bytes


def _require_plain(name: str, local: Tensor) -> None:
    """Raise for tensors without plain, strided elements in memory."""
    if local.is_meta:
        raise ValueError(f"'{name}' is on the meta device; call model.to_empty(device=...) first")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"'{name}' was made in inference mode; call reshard within it, too")
    if (
        is_traceable_wrapper_subclass(cast(object, local))
        or local.layout != torch.strided
        or local.is_quantized
    ):
        raise ValueError(f"'{name}': expected plain numbers, got {type(local).__name__} {local.layout}")


def _require_known_shards(model: nn.Module) -> None:
    """Raise for models with state other than tensors, or with different tensors under one name on ranks."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"'{name}' is wrapped by FullyShardedDataParallel, whose flat parameters do not name the "
                "tensors in them; use fully_shard, or pass a full state_dict"
            )
        if getattr(module, "merged_adapters", None):
            raise ValueError(
                f"'{name}' has an adapter of peft merged into its weight, which the other model does "
                "not know; call unmerge_adapter() before, and merge_adapter() of both after"
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state and _is_more(
            module.get_extra_state()
        ):
            raise ValueError(
                f"'{name}' ({type(module).__name__}) has extra state, such as scales of fp8 "
                "(get_extra_state), which is not moved; pass a mapping of the tensors that do not need it"
            )
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            raise ValueError(
                f"'{name}' is of an expert (allreduce=False): other ranks may have other experts under this "
                "name; pass the experts' tensors under names of their own"
            )
        if any(getattr(parameter, key, None) is not None for key in ("quant_state", "SCB")):
            raise ValueError(
                f"'{name}' is quantized by bitsandbytes, whose scales are no tensors of the model; "
                "dequantize it"
            )


def _is_more(state: object) -> bool:
    return state is not None and not (isinstance(state, Tensor) and not state.numel())


class Part(NamedTuple):
    """One rank's chunks of a tensor."""

    shape: tuple[int, ...]  # full
    dtype: torch.dtype
    chunks: list[Chunk]


def refuse_freed(shards: Mapping[str, TensorShard], why: str) -> None:
    """Raise if a tensor was freed. why: the end of the message"""
    for name, shard in shards.items():
        if is_freed(shard.local):
            raise ValueError(f"'{name}' was freed by a call with free_source=True, and {why}")


def refuse_shared_memory(source: Side, target: Side, *, is_freed_later: bool) -> None:
    """Raise if a tensor to be filled shares memory with a held tensor, or with another one to be filled.

    is_freed_later: whether the source is freed
    """
    held: list[tuple[int, int, str]] = []  # memory of storages; those of numpy's arrays may meet in part
    same: set[tuple[object, ...]] = set()
    for name, part in source.tensors.items():
        for chunk in part.chunks:
            held.append((*_extent(chunk.view.untyped_storage()), name))
            if not is_freed_later:
                same.add((name, block_of(chunk), *_numbers(chunk.view)))
    held.sort()
    furthest = held[:1]  # of each and what begins before it, the one that ends last
    for each in held[1:]:
        furthest.append(each if each[1] > furthest[-1][1] else furthest[-1])
    filled: list[tuple[int, int, str, Tensor]] = []  # from where to where in memory
    for name, part in target.tensors.items():
        for chunk in part.chunks:
            if not chunk.view.numel() or is_freed(chunk.view):
                continue
            if _overlaps(chunk.view):
                raise ValueError(
                    f"to: several elements of '{name}' are one memory, as of an expanded tensor; "
                    "give it memory of its own"
                )
            begin, end = _extent(chunk.view.untyped_storage())
            before = bisect_left(held, (end,))  # how many begin before the end
            is_shared = before > 0 and furthest[before - 1][1] > begin
            if is_shared and (name, block_of(chunk), *_numbers(chunk.view)) not in same:
                raise ValueError(
                    f"to: '{name}' shares memory with '{furthest[before - 1][2]}' of the model that it is "
                    f"filled from, {'which is freed' if is_freed_later else 'in another layout'}; give it "
                    "memory of its own"
                )
            first, last = chunk.view.data_ptr(), (chunk.view[(-1,) * chunk.view.ndim]).data_ptr()
            filled.append((first, last + chunk.view.element_size(), name, chunk.view))
    filled.sort(key=lambda each: each[:3])
    extents_meet = any(begin < end for (_, end, *_), (begin, *_) in pairwise(filled))
    if extents_meet and (names := _sharing([(name, view) for *_, name, view in filled])):
        raise ValueError(
            f"to: '{names[0]}' and '{names[1]}' are one memory, at least in part, and two tensors of the "
            "model that it is filled from; leave one of the names out"
        )


def _extent(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _numbers(view: Tensor) -> tuple[object, ...]:
    """What memory a view reads, and as which numbers; of views of one shape."""
    return view.data_ptr(), view.stride(), view.dtype, view.is_conj(), view.is_neg()


def _sharing(views: Sequence[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Return the names of two views that share an element, if there are any."""
    found = []
    for number, (_, view) in enumerate(views):
        by_stride = sorted(range(view.ndim), key=view.stride, reverse=True)
        runs = Located.of(view.permute(by_stride)).runs()
        found.append(torch.cat([runs, torch.full_like(runs[:, :1], number)], dim=1))
    begins, sizes, owners = torch.cat(found).unbind(1)
    order = begins.argsort()
    ends, later = (begins + sizes)[order[:-1]], order[1:]
    meet = (begins[later] < ends).nonzero()
    if not len(meet):
        return None
    first = int(meet[0])
    one, other = owners[order[first : first + 2]].tolist()
    return views[one][0], views[other][0]


def _overlaps(view: Tensor) -> bool:
    """Whether elements may share memory: whether a stride is below the span of smaller strides."""
    span = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False


class TensorDescription(NamedTuple):
    """One rank's description of its blocks of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    together: tuple[int, ...] | None = None  # ranks that together hold it, if it is from a mapping

    @classmethod
    def of(cls, side: Side) -> dict[str, TensorDescription]:
        return {
            name: cls(shape, dtype, tuple(map(block_of, chunks)), side.together.get(name))
            for name, (shape, dtype, chunks) in side.tensors.items()
        }


class Description(NamedTuple):
    """One rank's description for all ranks.

    place: its machine
    trial: memory to try reading from this process; None: the tensors that it holds are not on the CPU
    reads: whether the tensors that it needs are on the CPU
    tensors: pickled (held, needed), each `TensorDescription` by name: replicas send the same
    located: pickled addresses of its held tensors, by name, for ranks that read them
    """

    place: str
    trial: Trial | None
    reads: bool
    tensors: bytes
    located: bytes

    @classmethod
    def of(cls, source: Side, target: Side) -> Description:
        reads = target.is_on_cpu and select.requested_transport != "c10d"
        trial = own_trial() if source.is_on_cpu else None
        tensors = pickle.dumps((TensorDescription.of(source), TensorDescription.of(target)))
        located = {
            name: [(block_of(chunk), Located.of(chunk.view)) for chunk in part.chunks]
            for name, part in source.tensors.items()
        }
        return cls(machine(), trial, reads, tensors, pickle.dumps(located if trial else {}))


ByRank = list[dict[str, TensorDescription]]  # replicas share one dict


def held_and_needed(everybody: Sequence[Description]) -> tuple[ByRank, ByRank]:
    """Return the tensors that each rank holds, and those that it needs."""
    known: dict[bytes, tuple[dict[str, TensorDescription], dict[str, TensorDescription]]] = {}
    for each in everybody:
        if each.tensors not in known:
            known[each.tensors] = pickle.loads(each.tensors)
    held, needed = zip(*(known[each.tensors] for each in everybody), strict=True)
    return list(held), list(needed)


def dtypes_of(held: ByRank, needed: ByRank, *, cast: bool) -> dict[str, torch.dtype]:
    """Return the dtype of each held tensor; raise unless needed tensors and held tensors match."""
    found, wanted = _agreed("holds", held), _agreed("needs", needed)
    missing, surplus = [name for name in wanted if name not in found], [n for n in found if n not in wanted]
    if missing or surplus:
        also, lacking = some_names(missing), some_names(surplus)
        raise ValueError(f"the models differ in tensors: `to` has also {also}, and lacks {lacking}")
    for name, (shape, dtype) in wanted.items():
        if found[name][0] != shape:
            raise ValueError(f"'{name}': expected {found[name][0]} in `to`, got {shape}: full shapes")
        _require_dtype(name, found[name][1], dtype, cast=cast)
    distinct = {id(own): own for own in held}.values()
    for name in found:
        if len({own[name].together for own in distinct if name in own}) > 1:
            holders = [rank for rank, own in enumerate(held) if name in own]
            raise ValueError(
                f"'{name}': ranks {', '.join(map(str, holders))} hold plain tensors, or DTensors of several "
                "meshes, of this name, which may be shards or replicas: pass the model, DTensors, or the "
                "result of checkpoints.shards.shards_of(model)"
            )
    return {name: dtype for name, (_, dtype) in found.items()}


def _require_dtype(name: str, held: torch.dtype, needed: torch.dtype, *, cast: bool) -> None:
    if held == needed:
        return
    if not cast:
        raise ValueError(f"'{name}': expected {held} in `to`, got {needed}; pass cast=True to convert")
    if not (held.is_floating_point and needed.is_floating_point and min(held.itemsize, needed.itemsize) > 1):
        raise ValueError(
            f"'{name}': cast=True converts between floating-point numbers of at least two bytes, got {held} "
            f"and {needed}: they need scales, or lose more than digits; convert them yourself"
        )


def _agreed(what: str, tensors: ByRank) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return full shape and dtype of each tensor; raise if ranks differ in them."""
    found: dict[str, tuple[int, TensorDescription]] = {}
    distinct = {id(own): rank for rank, own in reversed([*enumerate(tensors)])}
    for rank in sorted(distinct.values()):
        for name, mine in tensors[rank].items():
            first, other = found.setdefault(name, (rank, mine))
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"'{name}': rank {first} {what} {other.shape} of {other.dtype}, rank {rank} "
                    f"{mine.shape} of {mine.dtype}: full shapes; every rank must have the same model"
                )
    if not found:
        raise ValueError(f"expected a model on at least one rank, no rank {what} any tensor")
    return {name: (mine.shape, mine.dtype) for name, (_, mine) in found.items()}


def placements_of(held: ByRank, needed: ByRank, dtypes: Mapping[str, torch.dtype]) -> list[Placement]:
    """Return the held and the needed blocks of each tensor, by rank."""

    def blocks(tensors: ByRank, name: str) -> list[tuple[Block, ...]]:
        return [own[name].blocks if name in own else () for own in tensors]

    return [
        Placement(name, dtype.itemsize, blocks(held, name), blocks(needed, name))
        for name, dtype in dtypes.items()
    ]


def readable(moves: Sequence[BlockMove], everybody: Sequence[Description], rank: int) -> dict[int, Peer]:
    """Return the ranks whose memory this rank reads, after a trial read of each."""
    peers = {}
    for sender in {move.sender for move in moves if move.receiver == rank != move.sender}:
        theirs = everybody[sender]
        if not everybody[rank].reads or theirs.trial is None or theirs.place != everybody[rank].place:
            continue
        if can_read(theirs.trial):
            peers[sender] = Peer(theirs.trial.process, pickle.loads(theirs.located))
    return peers
