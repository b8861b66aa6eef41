"""One thread: ranks share the cores, and two cores are noisier than one."""

import torch

torch.set_num_threads(1)
