"""Megatron's row-parallel layer, computed by our ops."""

from __future__ import annotations

from megatron.core.tensor_parallel import layers as theirs
from torch import Tensor, is_grad_enabled

from tpkernels import ops
from tpkernels.interop.megatron_core import linear
from tpkernels.interop.megatron_core.limits import require_own_main_grad, require_supported
from tpkernels.ops.main_grad import accumulating
from tpkernels.ops.tensor_parallel.mappings import scatter_to_region


class RowParallelLinear(theirs.RowParallelLinear):  # type: ignore[misc] # Megatron is not typed
    """Megatron's, with its constructor, parameters, initial weights, attributes and checkpoints.

    The product and its sum over ranks are one op. The bias is added after it, by each rank to its tokens, so
    that its gradient is partial under sequence parallelism, as its attribute says.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, output_bias)

        input_: (tokens, ..., input_size_per_partition), or input_size unless input_is_parallel
        """
        require_supported(self)
        name = type(self).__name__
        if self.explicit_expert_comm and not self.skip_bias_add:
            raise ValueError(
                f"{name}: expected skip_bias_add=True for an expert whose outputs the token dispatcher sums"
            )
        if not self.input_is_parallel and self.tp_group.size() > 1:
            input_ = scatter_to_region(input_, self.tp_group)
        if self.explicit_expert_comm or self.tp_group is None or self.tp_group.size() == 1:
            output = linear.linear_with_grad_accumulation_and_async_allreduce(
                input_, self.weight, None, self.gradient_accumulation_fusion, False, False
            )
        else:
            output = self._sum_over_ranks(name, input_)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def backward_dw(self) -> None:
        """Nothing is left to do: backward computes the weight's gradient, `delay_wgrad_compute` or not."""

    def _sum_over_ranks(self, name: str, x: Tensor) -> Tensor:
        weight, main_grad = self.weight, None
        if self.gradient_accumulation_fusion and weight.requires_grad and is_grad_enabled():
            require_own_main_grad(name, weight)
            weight, main_grad = accumulating(weight, name)
        return ops.row_linear(
            x, weight, None, self.tp_group, sequence_parallel=self.sequence_parallel, main_grad=main_grad
        )
