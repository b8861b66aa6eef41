from tpkernels.interop.megatron_core.groups import from_megatron as from_megatron
from tpkernels.interop.megatron_core.import_hook import install as install
from tpkernels.interop.megatron_core.import_hook import installed as installed
from tpkernels.interop.megatron_core.import_hook import uninstall as uninstall
from tpkernels.interop.megatron_core.linear import ColumnParallelLinear as ColumnParallelLinear
from tpkernels.interop.megatron_core.linear import RowParallelLinear as RowParallelLinear
from tpkernels.interop.megatron_core.linear import VocabParallelEmbedding as VocabParallelEmbedding
from tpkernels.interop.megatron_core.linear import (
    linear_with_frozen_weight as linear_with_frozen_weight,
)
from tpkernels.interop.megatron_core.linear import (
    linear_with_grad_accumulation_and_async_allreduce as linear_with_grad_accumulation_and_async_allreduce,
)
from tpkernels.interop.megatron_core.replace import LayerNorm as LayerNorm
from tpkernels.interop.megatron_core.replace import RMSNorm as RMSNorm
from tpkernels.interop.megatron_core.replace import build_norm as build_norm
from tpkernels.interop.megatron_core.replace import layers as layers
from tpkernels.interop.megatron_core.replace import spec_provider as spec_provider
