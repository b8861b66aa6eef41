"""The names of activations and gated units, for callers of ops, which do not see kernels."""

from __future__ import annotations

from tpkernels.kernels.activations import ACTIVATIONS as ACTIVATIONS
from tpkernels.kernels.activations import GATE_OF as GATE_OF
from tpkernels.kernels.activations import Activation as Activation
from tpkernels.kernels.activations import Glu as Glu
from tpkernels.kernels.activations import require_activation as require_activation
