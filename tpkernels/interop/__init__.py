"""Other people's names and formats, over ours."""

from tpkernels.interop import dcp as dcp
from tpkernels.interop import dtensor as dtensor
from tpkernels.interop import huggingface as huggingface
from tpkernels.interop import megatron as megatron
from tpkernels.interop import mpu as mpu
from tpkernels.interop import safetensors as safetensors
