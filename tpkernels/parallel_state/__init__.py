"""Megatron's `parallel_state` by name, argument and answer, over the state in `tpkernels.runtime`.

Getters before `initialize_model_parallel` raise `ParallelStateError`, which is both the `RuntimeError` and
the `AssertionError` that callers may catch. The `set_...` functions change sizes and ranks on the fly, with
or without an initialized state; None takes a change back (of the virtual pipeline: to None).
"""

from typing import TYPE_CHECKING

from tpkernels.parallel_state import getters, stages, todays
from tpkernels.parallel_state.getters import *  # noqa: F403
from tpkernels.parallel_state.stages import *  # noqa: F403
from tpkernels.parallel_state.start import initialize_model_parallel as initialize_model_parallel
from tpkernels.parallel_state.todays import *  # noqa: F403
from tpkernels.runtime.initialize import destroy_model_parallel as destroy_model_parallel

if not TYPE_CHECKING:  # a checker goes by the imports
    __all__ = ["destroy_model_parallel", "initialize_model_parallel"]
    __all__ += getters.__all__ + todays.__all__ + stages.__all__
