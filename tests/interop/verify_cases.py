"""Plans that change what a model computes, and what is left of the model when they are refused."""

import warnings
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.checks import error_of
from tests.interop.refused import refused_alike
from tests.interop.torch_models import PLAN, Toy, toy
from tests.models.small import IDS
from tpkernels import initialize_model_parallel, ops, parallelize
from tpkernels.interop.parallelize import trial
from tpkernels.interop.parallelize.hf_modules import RowLinear
from tpkernels.interop.parallelize.plan import Divided, Split


class Folding(nn.Module):
    """Heads are counted by an attribute, and tokens are what is left: half of the heads fold into tokens."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.norm = nn.BatchNorm1d(16)
        self.qkv = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (layer(h).view(len(x), -1, self.heads, 4).transpose(1, 2) for layer in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), x.shape[1], -1)
        return {"none": torch.arange(3), "y": x + self.drop(self.out(mixed))}


FOLDING = {"qkv.?": Split("column", unit=4), "out": Split("row", unit=4), "norm": "replicated"}


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Folding()

    def forward(self, x):
        return self.inner(x)


def plan_of(divided):
    plan = {f"inner.{name}": said for name, said in FOLDING.items()}
    return plan | ({"inner": Divided("heads")} if divided else {})


def held():
    torch.manual_seed(4)
    model = Held()
    model.inner.norm(torch.randn(5, 16, 3))  # statistics
    model.inner.out.bias.requires_grad_(False)
    model.inner.norm.weight.grad = torch.ones(16)
    model.inner.drop.eval()
    return model


def state_of(model):
    """All that may not change: numbers, kinds, modes, gradients, attributes, hooks."""
    found = [torch.get_rng_state().sum().item()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if tensor.grad is None else tensor.grad.tolist()
        found.append((name, id(tensor), tensor.dtype, tensor.requires_grad, tensor._version, tensor.tolist()))
        found.append(grad)
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, int | str)}
        found.append((name, id(module), type(module), module.training, plain, len(module._forward_hooks)))
        found.append(len(module._forward_pre_hooks))
    return found


def refused_and_unchanged():
    """What is said of wrong plans and inputs; each leaves the model as it was."""
    initialize_model_parallel(2)
    even, odd = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)), torch.ones(2, 3, 16)
    by_values = (
        "the first module whose output differs is 'inner.out', and the last before it that agrees is "
        "'inner.qkv.2' (1e-05 is allowed, in torch.float64)"
    )
    no_inputs = "verify: expected example inputs (a tensor, a tuple, or a mapping"
    wrong = [
        ("ValueError", "auto", "'inner' does not take this rank's features, though it takes all of"),
        ("ValueError", even, by_values),
        ("ValueError", {"x": even}, by_values),
        ("ValueError", (even,), by_values),
    ]
    right = [
        ("ValueError", even + dist.get_rank(), "expected the same inputs on all tensor-parallel ranks"),
        ("ValueError", odd if dist.get_rank() else even, "ranks disagree"),
        ("NotCompared", torch.ones(2, 3), "the unsharded model does not run with these inputs"),
        ("TypeError", "always", no_inputs),
        ("TypeError", True, no_inputs),
    ]
    for plan, cases in ((plan_of(divided=False), wrong), (plan_of(divided=True), right)):
        for kind, verify, part in cases:
            model = held()
            before = state_of(model)
            said = refused_alike(kind, part, parallelize, model, plan=plan, verify=verify)
            assert state_of(model) == before, said
    model = held()
    before = state_of(model)
    parallelize(model, plan=plan_of(divided=True))
    assert (model.inner.calls, state_of(model)[0]) == (0, before[0])  # the trial's copy was called


def told_when_not_compared():
    """On the first rank, except where it was not asked for."""
    initialize_model_parallel(2)
    single, most = (lambda: nn.ModuleDict({"a": nn.Linear(4, 8)}), {"a": "column"}), 2**27
    for (made, plan), numbers, verify, said in (
        (single, most, "auto", "was not compared with the unsharded one: no inputs with which it runs"),
        (single, most, False, None),
        ((toy, PLAN), 100, "auto", "a smaller Toy does not stand for it: it has no config; pass verify="),
        ((toy, PLAN), 100, IDS, None),
    ):
        with (
            patch.object(trial, "VERIFIED_PARAMETERS", numbers),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            parallelize(made(), plan=plan, verify=verify, weights="broadcast")
        told = [str(warning.message) for warning in caught]
        assert len(told) == (said is not None and dist.get_rank() == 0)
        assert not told or said in told[0]


def added_twice(layer, x):
    return ops.row_linear(x, layer.weight, layer.bias, layer.world.group) + layer.bias


def faults_seen():
    """A bias that is added twice, and is zero; plans of models on the meta device."""
    initialize_model_parallel(2)
    model = toy()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    first = "the first module whose output differs is"
    with patch.object(RowLinear, "forward", added_twice):
        refused_alike("ValueError", f"{first} 'blocks.0.out', and the last", parallelize, model, plan=PLAN)
    even = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
    wrong, right = plan_of(divided=False), plan_of(divided=True)
    with torch.device("meta"):
        refused_alike("ValueError", f"{first} 'inner.out'", parallelize, Held(), plan=wrong, verify=even)
        refused_alike("ValueError", "'inner' does not take this rank's f", parallelize, Held(), plan=wrong)
        parallelize(Held(), plan=right, verify=even)
        parallelize(Toy(), plan=PLAN)


class Single(nn.Linear):
    """Runs in float32 at most."""

    def forward(self, x):
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float, got Double")
        return super().forward(x)


def in_float32():
    """Errors of a right and of a wrong plan; copies that are compared share no weights with a model."""
    initialize_model_parallel(2)
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8), Single(8, 8))
        for between in (nn.ReLU(), nn.Softmax(-1))
    ]
    plan = {"0": "column", "2": "row"}
    before = [model[3].weight.clone() for model in models]
    right, wrong = (error_of(parallelize, model, plan=plan, weights="broadcast")[1] for model in models)
    assert right == ""
    assert "(1e-03 is allowed, in torch.float32)" in wrong
    assert all(model[3].weight.equal(weight) for model, weight in zip(models, before, strict=True))


def refused_though_right():
    """Right plans of models in bfloat16, tied, frozen."""
    initialize_model_parallel(2)
    models = [toy().bfloat16(), toy(tied=True, bias=False), toy().requires_grad_(False)]
    for model in models:
        parallelize(model, plan=PLAN)
