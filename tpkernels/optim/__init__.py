"""Optimizers that are right on sharded parameters, where torch's take a shard for the full parameter."""

from __future__ import annotations

from tpkernels.optim.muon import CombinedOptimizer as CombinedOptimizer
from tpkernels.optim.muon import Muon as Muon
from tpkernels.optim.muon import hidden_matrices as hidden_matrices
from tpkernels.optim.muon import orthogonalize as orthogonalize
from tpkernels.optim.muon import require_elementwise as require_elementwise

__all__ = ["CombinedOptimizer", "Muon", "hidden_matrices", "orthogonalize", "require_elementwise"]
