"""AdamW's step in operations that are rounded once each, as IEEE 754 says.

torch's own step multiplies and adds in one kernel, where a compiler may round once (fma) or twice. A kernel's
vectors and the elements left over at its end are compiled apart, so that what an element becomes may depend
on where it lies: in a shard whose length depends on the tensor-parallel size. Here it cannot.
"""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def exact_step(adam: torch.optim.AdamW) -> None:
    """As `adam.step()`, with the same states: of an optimizer without weight decay, amsgrad and maximize."""
    for group in adam.param_groups:
        (beta1, beta2), eps, rate = group["betas"], group["eps"], group["lr"]
        for parameter in group["params"]:
            gradient, state = parameter.grad, adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            steps = state["step"].item()
            state["exp_avg"].mul_(beta1).add_(gradient * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
            spread = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**steps)).add_(eps)
            parameter.sub_((state["exp_avg"] / spread).mul_(rate / (1 - beta1**steps)))
