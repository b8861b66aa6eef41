"""Linear layers whose weight is split over ranks, with Megatron's names, arguments and answers.

R ranks; each holds of the weight (N, K), out_features by in_features:

    ColumnParallelLinear    (N / R, K)   computes its own output features
    RowParallelLinear       (N, K / R)   computes a partial sum of all output features; ranks add theirs

`forward` returns (output, output_bias): the bias with skip_bias_add, for the caller to add; otherwise None.

The table of a VocabParallelEmbedding is split over ranks, padded to a multiple of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.groups.sizes import InvalidSizes, positive, ranges_of, shard_size, split_vocabulary
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.batches import compare_inputs
from tpkernels.layers.initial import InitMethod, fill_shard, fill_with_nan
from tpkernels.layers.options import DEFAULT, LayerOptions, LinearOptions, SplitOptions, Unpack, takes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.ops.activations import Activation, require_activation
from tpkernels.ops.main_grad import accumulating
from tpkernels.ops.quantize import Recipe, require_recipe
from tpkernels.ops.tensor_parallel.mappings import gather_from_region, scatter_to_region


class _ParallelLinear(ParallelModule):
    """Base class: the weight of a linear layer, split along dimension `dim`, and its bias."""

    weight: nn.Parameter  # None with skip_weight_param_allocation
    bias: nn.Parameter | None
    quantize: Recipe | None = None

    def __init__(
        self,
        dim: int,
        input_size: int,
        output_size: int,
        bias: bool,
        init_method: InitMethod,
        stride: int,
        keep_master_weight_for_test: bool,
        skip_bias_add: bool,
        options: LayerOptions,
        *,
        has_weight: bool = True,
    ) -> None:
        super().__init__(options.state, options.tp_invariant)
        name = type(self).__name__
        device = options.device or torch.get_default_device()
        require_recipe(name, options.quantize, device, self.world.tp_invariant)
        self.input_size = positive(input_size, "input_size")
        self.output_size = positive(output_size, "output_size")
        size_name, size = (("output_size", output_size), ("input_size", input_size))[dim]
        if segments := self.world.segments:
            if stride > 1:
                raise ValueError(
                    f"{name}: expected stride 1 with TP-invariance, got {stride}: segments of "
                    "several weights in one would hold other rows at other sizes; use a layer for each"
                )
            if size % (all_segments := segments * self.world.size):
                raise InvalidSizes(
                    f"{size_name} ({size}) is not divisible by the {all_segments} segments of TP-invariance; "
                    f"choose a multiple of {all_segments}, or fewer segments"
                )
        self.stride = stride
        self.init_method = init_method
        self.keep_master_weight_for_test = keep_master_weight_for_test
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = options.sequence_parallel and self.world.size > 1
        self.gradient_accumulation_fusion = options.gradient_accumulation_fusion
        self.overlap = options.overlap
        self.quantize = options.quantize
        self.master_weight: Tensor | None = None
        self._dim = dim
        self._shard_size = shard_size(size, self.world.size, size_name, stride)
        shape = (output_size, self._shard_size) if dim else (self._shard_size, input_size)
        split = Attributes(tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)
        full_bias = Attributes(sequence_parallel=self.sequence_parallel and skip_bias_add)
        factory: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
        self.add_parameter("weight", shape if has_weight else None, split, **factory)
        self.add_parameter("bias", shape[:1] if bias else None, full_bias if dim else split, **factory)
        if options.perform_initialization:
            self.reset_parameters()
        else:
            for parameter in self.parameters(recurse=False):
                fill_with_nan(parameter)

    def reset_parameters(self) -> None:
        """Draw the weight, the same for every number of ranks, and zero the bias.

        Called at construction; call it after `to_empty` of a layer that was built on the meta device.
        """
        if self.weight is not None:
            full = (self.output_size, self.input_size)
            ranges = ranges_of(
                self.world.rank, size=full[self._dim], ranks=self.world.size, stride=self.stride
            )
            master = fill_shard(self.weight, self.init_method, full=full, dim=self._dim, ranges=ranges)
            if self.keep_master_weight_for_test and master is not None:
                self.master_weight = master.to(self.weight.dtype)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def weight_and_main_grad(self, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The weight to pass to an op, by default the layer's own, and its `main_grad` if that is fused."""
        weight = self.weight if weight is None else weight
        if weight is None:
            raise ValueError(
                f"{type(self).__name__}: expected a weight in forward: the layer was built with "
                "skip_weight_param_allocation=True and has none"
            )
        return weight_and_main_grad(weight, type(self).__name__, self.gradient_accumulation_fusion)

    def extra_repr(self) -> str:
        held = "no weight" if self.weight is None else f"weight {tuple(self.weight.shape)}"
        said = (
            f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, {self.world} holds {held}"
        )
        return with_recipe(said, self.quantize)


def weight_and_main_grad(weight: Tensor, owner: str, is_fused: bool) -> tuple[Tensor, Tensor | None]:
    """The weight to pass to an op, and the `main_grad` that its gradient is added to if that is fused."""
    if is_fused and weight.requires_grad and torch.is_grad_enabled():
        return accumulating(weight, owner)
    return weight, None


def with_recipe(said: str, quantize: Recipe | None) -> str:
    """Append the recipe, if there is one, to what a layer's `extra_repr` says."""
    return said if quantize is None else f"{said}, quantize={quantize}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer Y = act(X Aᵀ + b) with A split along out_features: each rank computes its columns of Y.

    gather_output: all ranks get the full Y, of all tokens; otherwise each gets its columns
    init_method: fills the full (output_size, input_size) weight; the bias starts at zero
    stride: the number of weights that are concatenated in this one: see `groups/sizes.py`
    keep_master_weight_for_test: keep the full initial weight as `master_weight`
    skip_bias_add: return the bias instead of adding it
    skip_weight_param_allocation: have no weight; it is passed to `forward`
    activation: applied to Y in the same kernel: gelu, gelu_tanh, silu, relu or relu2
    sequence_parallel: X is this rank's tokens (dimension 0), and is gathered
    Others as in `LayerOptions`.
    """

    @takes(LinearOptions)
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        skip_weight_param_allocation: bool = False,
        activation: Activation | None = None,
        options: LayerOptions = DEFAULT,
        **_: Unpack[LinearOptions],
    ) -> None:
        require_activation("ColumnParallelLinear", activation or "none")
        if skip_bias_add and bias and activation not in (None, "none"):
            raise ValueError(
                f"ColumnParallelLinear: expected no activation with skip_bias_add, got {activation!r}: it "
                "would be applied before the bias; apply it after adding the bias"
            )
        seeds = bias, init_method, stride, keep_master_weight_for_test, skip_bias_add
        super().__init__(
            0, input_size, output_size, *seeds, options, has_weight=not skip_weight_param_allocation
        )
        self.gather_output = gather_output
        self.activation = activation
        self.output_size_per_partition = self._shard_size
        if not self.sequence_parallel:
            compare_inputs(self, self.world, until_activations=True)

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (output, output_bias).

        input_: (tokens, ..., input_size), or this rank's tokens of dimension 0 if sequence_parallel
        weight: (output_size_per_partition, input_size), to be used in place of the layer's own
        output: (tokens, ..., output_size_per_partition), or output_size if gather_output
        """
        if input_.ndim < 1 or input_.shape[-1] != self.input_size:
            self.require_features(input_, self.input_size, "every rank needs all features")
        if weight is not None:
            self._require_shard(weight)
        own: Tensor = self.weight
        main_grad: Tensor | None = None
        if weight is not None or own is None or self.gradient_accumulation_fusion:
            own, main_grad = self.weight_and_main_grad(weight)
        group = self.world.group
        output = ops.column_linear(
            input_,
            own,
            None if self.skip_bias_add else self.bias,
            group,
            activation=self.activation,
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
            main_grad=main_grad,
            quantize=self.quantize,
            tp_invariant=self.world.tp_invariant,
        )
        if self.gather_output:
            output = gather_from_region(output, group)
        return output, self.bias if self.skip_bias_add else None

    def _require_shard(self, weight: Tensor) -> None:
        """Raise unless a weight that is passed to `forward` is this rank's shard."""
        expected = self.output_size_per_partition, self.input_size
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"ColumnParallelLinear: expected a weight {expected} in forward, this rank's shard, got "
                f"{tuple(weight.shape)}"
            )
        if self.gradient_accumulation_fusion:  # the weight's other use has a gradient, too
            weight.zero_out_wgrad = True  # type: ignore[attr-defined]


class RowParallelLinear(_ParallelLinear):
    """A linear layer Y = X Aᵀ + b with A split along in_features: ranks sum their partial Y.

    input_is_parallel: X is this rank's features; False: X is full, and is split here
    sequence_parallel: Y is this rank's tokens (dimension 0)
    Others as in ColumnParallelLinear.

    The bias is replicated and added once, after the sum; each rank computes its full gradient. With
    skip_bias_add and sequence_parallel the caller adds the bias to this rank's tokens: its gradient is
    partial, and the bias is marked `sequence_parallel`.
    """

    @takes(LinearOptions)
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        options: LayerOptions = DEFAULT,
        **_: Unpack[LinearOptions],
    ) -> None:
        if options.sequence_parallel and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear: expected input_is_parallel=True with sequence_parallel, because the "
                "input has all tokens and this rank's features; pass input_is_parallel=True"
            )
        seeds = bias, init_method, stride, keep_master_weight_for_test, skip_bias_add
        super().__init__(1, input_size, output_size, *seeds, options)
        if options.sequence_parallel and skip_bias_add and bias and self.world.segments:
            raise ValueError(
                "RowParallelLinear: expected no skip_bias_add with sequence_parallel and TP-invariance: the "
                "gradient of a bias that the caller adds depends on the split of tokens; let the layer add it"
            )
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = self._shard_size
        if not input_is_parallel:
            compare_inputs(self, self.world, until_activations=True)

    def forward(
        self, input_: Tensor, *, residual: Tensor | None = None, norm: ops.Norm | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, output_bias); with residual and norm (residual + output, its norm), in one pass.

        input_: (tokens, ..., input_size_per_partition), or input_size unless input_is_parallel
        output, residual: (tokens, ..., output_size), or this rank's tokens of dimension 0 if
            sequence_parallel
        """
        group = self.world.group
        features = self.input_size_per_partition if self.input_is_parallel else self.input_size
        if input_.ndim < 1 or input_.shape[-1] != features:
            takes = "False takes all" if self.input_is_parallel else "True takes this rank's"
            self.require_features(input_, features, f"input_is_parallel={takes} features")
        if not self.input_is_parallel:
            input_ = scatter_to_region(input_, group)
        added = {} if residual is None and norm is None else added_to(self, residual, norm)
        weight: Tensor = self.weight
        main_grad: Tensor | None = None
        if self.gradient_accumulation_fusion:
            weight, main_grad = self.weight_and_main_grad()
        output = ops.row_linear(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            group,
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
            main_grad=main_grad,
            quantize=self.quantize,
            tp_invariant=self.world.tp_invariant,
            **added,
        )
        return output if added else (output, self.bias if self.skip_bias_add else None)


def added_to(layer: nn.Module, residual: Tensor | None, norm: ops.Norm | None) -> dict[str, Any]:
    """Return the options of an op for what a layer adds to its output. layer: with `skip_bias_add`"""
    if layer.skip_bias_add:
        raise ValueError(
            f"{type(layer).__name__}: expected no skip_bias_add with residual and norm, which take the bias; "
            "let the layer add it"
        )
    return {"residual": residual, "norm": norm}


class VocabParallelEmbedding(ParallelModule):
    """An embedding table (num_embeddings, embedding_dim) whose rows are split evenly over ranks.

    init_method: fills the full table, without padding; rows of padding are zero and stay so
    padding_idx: an id whose row starts at zero and gets no gradient
    divisible_by: pad each rank's rows to a multiple of it, Megatron's `make_vocab_size_divisible_by`
    sequence_parallel: the output is this rank's tokens (dimension 0)
    Others as in `LayerOptions`.
    """

    weight: nn.Parameter

    @takes(SplitOptions)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod = nn.init.xavier_normal_,
        padding_idx: int | None = None,
        divisible_by: int = 1,
        options: LayerOptions = DEFAULT,
        **_: Unpack[SplitOptions],
    ) -> None:
        super().__init__(options.state, options.tp_invariant)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: expected a padding_idx from {-num_embeddings} to "
                f"{num_embeddings - 1}, got {padding_idx}"
            )
        if segments := self.world.segments:  # equal segments whose rows fill 16 bytes of any dtype
            divisible_by = segments * math.lcm(divisible_by, 8)
        self.split = split_vocabulary(num_embeddings, ranks=self.world.size, divisible_by=divisible_by)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.num_embeddings_per_partition = self.split.shard_size
        rows = self.split.rows_of(self.world.rank)
        self.vocab_start_index, self.vocab_end_index = rows.start, rows.stop
        self.init_method = init_method
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel = options.sequence_parallel and self.world.size > 1
        split = Attributes(tensor_model_parallel=True, partition_dim=0)
        shape = len(rows), embedding_dim
        self.add_parameter("weight", shape, split, device=options.device, dtype=options.dtype)
        if options.perform_initialization:
            self.reset_parameters()
        else:
            fill_with_nan(self.weight, rows=len(self.split.ids_of(self.world.rank)))

    def reset_parameters(self) -> None:
        """Draw the table, the same for every number of ranks.

        Called at construction; call it after `to_empty` of a layer that was built on the meta device.
        """
        ids = self.split.ids_of(self.world.rank)
        full = (self.num_embeddings, self.embedding_dim)
        fill_shard(self.weight, self.init_method, full=full, dim=0, ranges=[ids])
        if self.padding_idx is not None and self.padding_idx in ids:
            with torch.no_grad():
                self.weight[ids.index(self.padding_idx)].zero_()

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the row of each id.

        input_: (tokens, ...) ids, the same on all ranks
        returns: (tokens, ..., embedding_dim), or this rank's tokens of dimension 0 if sequence_parallel
        """
        return ops.vocab_embedding(
            input_,
            self.weight,
            self.world.group,
            sequence_parallel=self.sequence_parallel,
            padding_idx=self.padding_idx,
            vocab_size=self.num_embeddings,
            tp_invariant=self.world.tp_invariant,
        )

    def extra_repr(self) -> str:
        held = f"{self.world} holds rows {self.vocab_start_index} to {self.vocab_end_index - 1}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {held}"
