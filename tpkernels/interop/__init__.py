"""Other people's names and formats, over ours."""

from tpkernels.interop import mpu as mpu
