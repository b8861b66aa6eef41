"""The gate: kernels are compiled, read and computed without a GPU, and held to rules and budgets."""

from tpkernels.gate.user_kernels.table import register as register

__all__ = ["register"]
