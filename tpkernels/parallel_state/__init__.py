"""Megatron's `parallel_state` by name, argument and answer, over the state in `tpkernels.runtime`.

Getters before `initialize_model_parallel` raise `ParallelStateError`, which is both the `RuntimeError` and
the `AssertionError` that callers may catch. The `set_...` functions change sizes and ranks on the fly, with
or without an initialized state; None takes a change back (of the virtual pipeline: to None).
"""

from tpkernels.parallel_state import names
from tpkernels.parallel_state.names import *  # noqa: F403
from tpkernels.parallel_state.start import initialize_model_parallel

__all__ = ["initialize_model_parallel"]
__all__ += names.__all__
