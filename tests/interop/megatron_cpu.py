"""What Megatron-Core asks of CUDA, answered by the CPU: in ranks that end with their test, for it stays so.

asked                                           answer
the current device; a device called "cuda"      the CPU
`tensor.cuda()`, `tensor.type()`                the tensor; its type as it would be there
streams, synchronize                            nothing
the generator of random numbers                 the CPU's
coalesced collectives, which gloo has not       one after the other
apex's product that adds to main_grad           torch's
"""

import sys
import warnings
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


_mode = _OnCpu()
_type = Tensor.type


@cache
def stand_in_for_cuda():
    """Called in a rank before it imports Megatron."""
    warnings.simplefilter("ignore")  # of what is not installed, and of what Megatron deprecates
    _mode.__enter__()
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    tensor = Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.type = lambda self, *to: _type(self, *to) if to else "torch.cuda." + _type(self).split(".")[-1]
    torch.nn.Module.cuda = lambda self, *_: self
    sys.modules["fused_weight_gradient_mlp_cuda"] = _wgrad()

    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # which 0.16 reads, and does not define
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    param_and_grad_buffer._coalescing_manager = _one_by_one


def _wgrad():
    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.__spec__ = SimpleNamespace(name=module.__name__)  # for those who ask whether it is installed

    def add(x, dy, main_grad):
        main_grad.addmm_(dy.flatten(0, -2).t(), x.flatten(0, -2))  # as the real one: a GEMM that adds

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add
    return module


@contextmanager
def _one_by_one(*_, **__):
    yield SimpleNamespace(wait=lambda: None)


@contextmanager
def parallel_state_of(tp, pp=1, vpp=None):
    """Megatron's own parallel state, of this rank."""
    stand_in_for_cuda()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=vpp)
    try:
        yield parallel_state
    finally:
        parallel_state.destroy_model_parallel()
