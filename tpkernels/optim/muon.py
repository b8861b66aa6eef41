"""Muon for tensor-parallel models: one rank orthogonalizes each full matrix.

Momentum, weight decay and the update are elementwise, and work on shards. A step sends each shard twice in
bfloat16: its momentum to the matrix's owner, and the result's shard back.

`CombinedOptimizer` steps Muon and optimizers of other parameters as one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tpkernels.checkpoints.shards import TensorShard, shards_of, world_of
from tpkernels.comm.agreement import Claim, Problem, agree, describe
from tpkernels.comm.groups import required_group
from tpkernels.groups.sizes import VocabularySplit
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.optimizers import problem_on_shards
from tpkernels.layers.replicas import gradient_of
from tpkernels.layers.world import State
from tpkernels.layers.wrappers import is_dtensor
from tpkernels.optim.full_matrices import FullMatrices

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero: singular values end between 0.7 and 1.2
NS_STEPS = 5
EPS = 1e-7
ROUND_BYTES = 2**28  # of matrices that a rank receives at a time, in bfloat16
MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class _MatrixStep:
    """One matrix in one step."""

    name: str
    shard: TensorShard
    options: dict[str, Any]
    gradient: Tensor


class Muon(torch.optim.Muon):
    """torch.optim.Muon of the unsharded model, bit for bit, with the same arguments, defaults and state.

    Called by all ranks of the tensor-parallel group, with the same arguments. Every rank orthogonalizes
    replicated matrices. Data-parallel ranks take the same step from reduced gradients; pass their group to
    divide the work between them.

    params: matrices of `model`: see `hidden_matrices`. `main_grad` is used before `grad`
    model: its layers determine how matrices are sharded
    split_stacked: treat each of the weights stacked in one parameter (`partition_stride`), such as gate and
        up, as a matrix; False: the parameter is one matrix, as in torch
    data_parallel_group: ranks with the same shards and reduced gradients; each replica orthogonalizes some of
        the matrices, and all of them must call `step`
    round_bytes: bytes of full matrices that each rank holds at a time, approximately
    state: as the model was built with; by default found in its layers
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        model: nn.Module,
        split_stacked: bool = False,
        data_parallel_group: ProcessGroup | None = None,
        round_bytes: int = ROUND_BYTES,
        state: State = None,
    ) -> None:
        if round_bytes < 1:
            raise ValueError(f"Muon: expected round_bytes of 1 or more, got {round_bytes}")
        self._world = world_of(model, state)
        self._replicas = None
        if data_parallel_group is not None and required_group(data_parallel_group).size() > 1:
            self._replicas = data_parallel_group
        self._shards = {shard.tensor: (name, shard) for name, shard in shards_of(model, state).items()}
        for parameter, (name, _) in self._shards.items():
            if is_dtensor(parameter):
                raise TypeError(
                    f"Muon: '{name}': expected a plain parameter, got a DTensor, as `fully_shard` and "
                    "`as_dtensor=True` make them; use DDP or GradientBuckets"
                )
        self._round_bytes = round_bytes
        self._split_stacked = split_stacked
        self._exchange: FullMatrices | None = None
        self._positions: dict[Tensor, int] = {}  # in the exchange
        super().__init__(
            params,
            lr,  # type: ignore[arg-type]  # torch's accepts a tensor, too, but only by its documentation
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )
        self.defaults["split_stacked"] = split_stacked

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also called for each group at construction."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("split_stacked", self._split_stacked)
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"Muon: expected adjust_lr_fn 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
            )
        for parameter in group["params"]:
            self._require_matrix(parameter)
        self._exchange = None  # made again by the next step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = list(self._work())
        self._agree(found)
        exchange = self._exchange or self._planned()
        work = {self._positions[each.shard.tensor]: each for each in found}
        held = {i: _held(each.shard, self._direction(each)).bfloat16() for i, each in work.items()}
        for i, result in exchange.apply(lambda i, full: _orthogonalized(work[i], full), held):
            _update(work[i], result)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but keep the momentum in its saved dtype."""
        super().load_state_dict(state_dict)
        keep_momentum(self, self, state_dict)

    def _work(self) -> Iterator[_MatrixStep]:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    name, shard = self._shards[parameter]
                    yield _MatrixStep(name, shard, group, gradient)

    def _agree(self, work: list[_MatrixStep]) -> None:
        """Raise on all ranks unless they have gradients of the same matrices, and the same options."""
        problem: Problem | None = None
        sparse = [each.name for each in work if each.gradient.is_sparse]
        if sparse:
            problem = "RuntimeError", f"expected dense gradients, got a sparse one of '{sparse[0]}'"
        options = [
            {key: said for key, said in group.items() if key != "params" and not isinstance(said, Tensor)}
            for group in self.param_groups
        ]
        brought = tuple(describe(f"gradient of {each.name}", each.gradient, strides=False) for each in work)
        claim = Claim(f"Muon.step with {options}", () if problem else brought, problem)
        for group in (self._world.group if self._world.size > 1 else None, self._replicas):
            if group is not None:
                agree(claim, group)
        if problem is not None:
            claim.refuse()

    def _planned(self) -> FullMatrices:
        """Plan the exchange of all matrices."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._positions = {parameter: position for position, parameter in enumerate(parameters)}
        shards = [self._shards[parameter][1] for parameter in parameters]
        costs = [multiplications(shard.shape) for shard in shards]
        self._exchange = FullMatrices(shards, costs, self._world.group, self._replicas, self._round_bytes)
        return self._exchange

    def _direction(self, work: _MatrixStep) -> Tensor:
        """Update the momentum by the gradient; return the matrix to orthogonalize."""
        state, options, gradient = self.state[work.shard.tensor], work.options, work.gradient
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum: Tensor = state[MOMENTUM]
        momentum.lerp_(gradient, 1 - options["momentum"])
        return gradient.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum

    def _require_matrix(self, parameter: Tensor) -> None:
        """Raise, before any communication, unless a parameter fits: torch checks the first groups only."""
        known = self._shards.get(parameter)
        if known is None:
            raise ValueError(
                f"Muon: expected parameters of `model`, got another tensor {tuple(parameter.shape)}; "
                "build the optimizer after the model has its final parameters"
            )
        name, shard = known
        if parameter.ndim != 2 or parameter.is_complex():
            raise ValueError(
                f"Muon: expected real matrices, but '{name}' is {tuple(parameter.shape)} {parameter.dtype}; "
                "leave it to another optimizer, as tpkernels.optim.hidden_matrices does"
            )
        attributes = Attributes.of(parameter)
        ranks = attributes.tensor_parallel_ranks
        if shard.dim is not None and (attributes.expert_tp or ranks not in ((), self._world.ranks)):
            raise ValueError(
                f"Muon: '{name}' is sharded over other ranks than the tensor-parallel group; use one Muon "
                "for each group, and pass its `state`"
            )


def keep_momentum(muon: Muon, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restore the momentum in its saved dtype: torch's `load_state_dict` casts it to the parameter's.

    It has the gradient's dtype, which may be that of an fp32 main_grad of a narrower parameter.
    optimizer: the optimizer that has loaded; it has muon's parameters among its own
    """
    own = {parameter for group in muon.param_groups for parameter in group["params"]}
    saved, loaded = (
        [p for group in groups for p in group["params"]]
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    for number, parameter in zip(saved, loaded, strict=True):
        momentum = state_dict["state"].get(number, {}).get(MOMENTUM)
        if momentum is not None and parameter in own:
            muon.state[parameter][MOMENTUM] = momentum.to(parameter.device)


def _orthogonalized(work: _MatrixStep, full: Tensor) -> Tensor:
    """Orthogonalize a full matrix, with `split_stacked` each of its weights separately."""
    options, dim = work.options, work.shard.dim or 0
    return torch.cat(
        [
            orthogonalize(
                weight,
                ns_coefficients=options["ns_coefficients"],
                ns_steps=options["ns_steps"],
                eps=options["eps"],
            )
            for weight in full.split([size for size, _ in _stacked(work)], dim)
        ],
        dim,
    )


def _update(work: _MatrixStep, result: Tensor) -> None:
    """Apply weight decay and the step by this rank's shard of the orthogonal matrix, not to padding."""
    lr, options, dim = work.options["lr"], work.options, work.shard.dim or 0
    lr = lr.item() if isinstance(lr, Tensor) else lr
    stacked = _stacked(work)
    held = [length for _, length in stacked]
    own = _held(work.shard, work.shard.tensor)
    own.mul_(1 - lr * options["weight_decay"])
    for (size, _), weight, step in zip(stacked, own.split(held, dim), result.split(held, dim), strict=True):
        shape = [*work.shard.shape]
        shape[dim] = size
        weight.add_(step, alpha=-lr * _adjustment(shape, options["adjust_lr_fn"]))


def _stacked(work: _MatrixStep) -> list[tuple[int, int]]:
    """Return sizes of the parameter's matrices along its split dimension, full and on this rank."""
    shard = work.shard
    if shard.dim is None:
        return [(shard.shape[0], shard.shape[0])]
    own = shard.ranges[shard.rank]
    if not work.options["split_stacked"]:
        return [(shard.shape[shard.dim], sum(map(len, own)))]
    return [(sum(len(ranges[i]) for ranges in shard.ranges), len(own[i])) for i in range(len(own))]


def _adjustment(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _held(shard: TensorShard, tensor: Tensor) -> Tensor:
    """Return a tensor of the shard's shape without vocabulary padding."""
    if shard.dim is None:
        return tensor
    return tensor.narrow(shard.dim, 0, sum(len(each) for each in shard.ranges[shard.rank]))


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of hidden layers, for Muon, and all other trainable parameters, for AdamW.

    Others are vectors, tensors of more dimensions, parameters of modules with Embedding in their class name,
    and heads: with a sharded vocabulary, or from `get_output_embeddings` of `transformers`. A plain nn.Linear
    as head of a model without `get_output_embeddings` is not recognised: move it to the others.
    """
    tables: set[nn.Parameter] = set()
    for module in model.modules():
        is_table = isinstance(getattr(module, "split", None), VocabularySplit)
        if is_table or "Embedding" in type(module).__name__:
            tables.update(module.parameters(recurse=False))
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            tables.update(head.parameters(recurse=False))
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():  # tied parameters once
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and parameter not in tables else others).append(parameter)
    return matrices, others


@torch.no_grad()
def orthogonalize(
    matrix: Tensor,
    *,
    ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    ns_steps: int = NS_STEPS,
    eps: float = EPS,
) -> Tensor:
    """Return approximately U Vᵀ of a full matrix U S Vᵀ, by Newton-Schulz in bfloat16, bit for bit as torch.

    eps: the least Frobenius norm to divide by
    """
    if matrix.ndim != 2:
        raise ValueError(f"orthogonalize: expected a matrix, got a tensor {tuple(matrix.shape)}")
    first, third, fifth = ns_coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x  # x xᵀ is the smaller product
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x


def multiplications(shape: tuple[int, ...]) -> int:
    """Return the number of multiplications in a step of Newton-Schulz for a matrix of this shape."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


class CombinedOptimizer(Optimizer):
    """Combines optimizers over different parameters: one `step`, one list of parameter groups, one state.

    Parameter groups are those of the optimizers, in their order. The optimizers share this one's state.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("CombinedOptimizer: expected one optimizer or more, got none")
        owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(set(owned)) < len(owned):
            raise ValueError(
                "CombinedOptimizer: expected different parameters in each optimizer, got some twice"
            )
        self.optimizers = optimizers
        self._counts = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            state.update(optimizer.state)
        self.state = state
        self._share()

    def _share(self) -> None:
        """Give each optimizer its groups, and all optimizers one state."""
        start = 0
        for optimizer, count in zip(self.optimizers, self._counts, strict=True):
            optimizer.param_groups = self.param_groups[start : start + count]
            optimizer.state = self.state
            start += count

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all optimizers; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for all optimizers."""
        super().load_state_dict(state_dict)
        self._share()
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                keep_momentum(optimizer, self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, because groups belong to the combined optimizers."""
        if len(self.param_groups) >= sum(self._counts):
            raise ValueError(
                "CombinedOptimizer: add the group to one of the optimizers before they are combined"
            )
        super().add_param_group(param_group)


def require_elementwise(optimizer: Optimizer, model: nn.Module, *, state: State = None) -> None:
    """Raise unless the optimizer is known to be right on shards of matrices.

    No effect on one tensor-parallel rank, or for replicated parameters only. Subclasses of known optimizers
    under other names are unknown. The first step of an optimizer over our layers raises the same error if it
    is known to be wrong, and warns if it is unknown.

    state: as the model was built with; by default found in its layers
    """
    if world_of(model, state).size == 1:
        return
    split = {shard.tensor: name for name, shard in shards_of(model, state).items() if shard.dim is not None}
    for each in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        owned = [split[p] for group in each.param_groups for p in group["params"] if p in split]
        if problem := problem_on_shards(each, [f"'{name}'" for name in owned]):
            raise ValueError(f"require_elementwise: {problem}")
