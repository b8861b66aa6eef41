"""Models with buffers that no checkpoint holds, built on the meta device."""

from copy import deepcopy
from types import SimpleNamespace

import torch
from torch import nn

from tests.interop.refused import refused
from tests.interop.torch_models import PLAN, Toy, assert_alike
from tests.models.small import IDS
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.checkpoints.full_state_dict import load_full_state_dict

WIDTH = 16


def factors(width):
    return 1 + torch.arange(width) / width


class Scaled(nn.Module):
    """Its buffers are made by its constructor alone."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.register_buffer("factors", factors(width), persistent=False)
        self.register_buffer("shift", torch.tensor(3), persistent=False)

    def forward(self, x):
        return x * self.factors + self.shift


class Reset(Scaled):
    def reset_parameters(self):
        self.factors.copy_(factors(self.width))
        self.shift.fill_(3)


class Half(Scaled):
    """What it says that it resets is not all."""

    def reset_parameters(self):
        self.factors.copy_(factors(self.width))


class Configured(Scaled):
    def __init__(self, config):
        super().__init__(config.width)
        self.config = config


class Turned(Toy):
    def __init__(self, kind, tied=False):
        super().__init__(tied, bias=not tied)
        made = {"alone": Scaled, "reset": Reset, "half": Half, "told": Scaled}
        self.scaled = made[kind](WIDTH) if kind in made else Configured(SimpleNamespace(width=WIDTH))
        if kind == "told":
            self._init_weights = self.tell

    def tell(self, module):
        if isinstance(module, Scaled):
            module.factors.copy_(factors(module.width))
            module.shift.fill_(3)

    def forward(self, ids):
        x = self.scaled(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole_and_split(kind, tied=False):
    """One on the CPU; one from the meta device with its weights, as `safetensors.load` would load them."""
    torch.manual_seed(3)
    whole = Turned(kind, tied).double()
    with torch.device("meta"):
        split = Turned(kind, tied).double()
    parallelize(split, plan=PLAN)
    split.to_empty(device="cpu")
    load_full_state_dict(split, whole.state_dict())
    return whole, split


def computed_again(kind):
    initialize_model_parallel(2)
    whole, split = whole_and_split(kind)
    assert_alike(split, whole)
    assert_alike(deepcopy(split), whole)


def carried_over():
    """Only parameters are on the meta device, as `accelerate` builds models; there are no other numbers."""
    initialize_model_parallel(2)
    torch.manual_seed(3)
    whole = Turned("alone").double()
    split = deepcopy(whole)
    for owner in split.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                owner._parameters[name] = meta
    parallelize(split, plan=PLAN)
    for model in (split, deepcopy(split)):
        model.to_empty(device="cpu")
        load_full_state_dict(model, whole.state_dict())
        assert_alike(model, whole)


def tied_again():
    """Under one name in the file, and one tensor in memory."""
    initialize_model_parallel(2)
    whole, split = whole_and_split("reset", tied=True)
    assert_alike(split, whole)
    assert_alike(deepcopy(split).to(torch.float64), whole)
    for model in (split, deepcopy(split)):
        assert model.head.weight is model.embed.weight
    split.head.weight = nn.Parameter(split.head.weight.detach().clone())
    assert split.double().head.weight is not split.embed.weight


def set_by_hand(kind):
    """What differs once all buffers have numbers; until then it is refused, however it is called."""
    initialize_model_parallel(2)
    whole, split = whole_and_split(kind)
    both = "expected the numbers of 'scaled.factors', 'scaled.shift', which the model was built"
    refused("RuntimeError", both, split, IDS)
    refused("RuntimeError", both, split.scaled, torch.ones(WIDTH))
    refused("RuntimeError", both, split.double(), IDS)
    refused("RuntimeError", both, deepcopy(split), IDS)
    split.scaled.factors.copy_(whole.scaled.factors)
    refused("RuntimeError", "expected the numbers of 'scaled.shift', which", split, IDS)
    split.scaled.shift = torch.tensor(3)
    assert_alike(split, whole)
