"""torch's `parallelize_module` with our styles: outputs and gradients are those of torch's own."""

from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as theirs

from tests.interop.refused import refused_alike
from tests.on_ranks import on_ranks
from tpkernels import check_replicas, clip_grad_norm_, finalize_gradients
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.interop import parallel_styles as ours

TOKENS, WIDTH = (2, 4), 8


class Model(nn.Module):
    """A table, a block, and a head."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH, padding_idx=3)
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def whole_sequence(styles):
    return {
        "embed": styles.RowwiseParallel(input_layouts=Replicate()),
        "up": styles.ColwiseParallel(),
        "down": styles.RowwiseParallel(),
        "head": styles.ColwiseParallel(output_layouts=Replicate()),
    }


def own_tokens(styles, dim):
    """As torchtitan has it: tokens are split between the products."""
    tokens = Shard(dim)
    return {
        "embed": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": styles.SequenceParallel(sequence_dim=dim, use_local_output=True),
        "up": styles.ColwiseParallel(input_layouts=tokens, use_local_output=False),
        "down": styles.RowwiseParallel(output_layouts=tokens),
        "head": styles.ColwiseParallel(
            input_layouts=tokens, output_layouts=Replicate(), use_local_output=False
        ),
    }


PLANS = {
    "whole sequence": whole_sequence,
    "tokens of dimension 0": lambda styles: own_tokens(styles, 0),
    "tokens of dimension 1": lambda styles: own_tokens(styles, 1),
}


def built(styles, plan, mesh, norm):
    torch.manual_seed(dist.get_rank() // mesh.size())  # styles send the first rank's weights
    return theirs.parallelize_module(Model(getattr(nn, norm)).double(), mesh, PLANS[plan](styles))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weighted(output):
    return (output * torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output)).sum()


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def run(model):
    """Output and gradients."""
    output = full(model(torch.arange(8).view(TOKENS) * 5 % 13))
    weighted(output).backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **gradients}


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("plan", PLANS)
@on_ranks(2)
def test_plans_compute_what_torch_does(plan, norm):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    assert_same(*(run(built(styles, plan, mesh, norm)) for styles in (ours, theirs)))


LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(2), Shard(-1))


def one_layout(styles, style, given, wanted, as_dtensor, mesh):
    """Output and gradients of a linear layer."""
    torch.manual_seed(1)
    linear, x = nn.Linear(WIDTH, 12).double(), torch.randn(2, 4, WIDTH, dtype=torch.float64)
    options = {"input_layouts": given, "output_layouts": wanted, "use_local_output": not as_dtensor}
    theirs.parallelize_module(linear, mesh, getattr(styles, style)(**options))
    local = distribute_tensor(x, mesh, [given]).to_local().requires_grad_()
    output = linear(DTensor.from_local(local, mesh, [given], run_check=False) if as_dtensor else local)
    output = output if as_dtensor else DTensor.from_local(output, mesh, [wanted], run_check=False)
    output = output.full_tensor()
    weighted(output).backward()
    gradients = {name: full(p.grad) for name, p in linear.named_parameters()}
    return {"output": output.detach(), "input": local.grad, **gradients}


@pytest.mark.parametrize("as_dtensor", [False, True])
@pytest.mark.parametrize(
    ("style", "inputs", "outputs"),
    [
        ("ColwiseParallel", LAYOUTS, (Replicate(), Shard(2), Shard(-1))),
        ("RowwiseParallel", (Replicate(), Shard(2), Shard(-1)), (Replicate(), Shard(0), Shard(1))),
    ],
)
@on_ranks(2)
def test_layouts_are_computed_as_torch_does_or_refused(style, inputs, outputs, as_dtensor):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for given, wanted in product(LAYOUTS, LAYOUTS):
        case = style, given, wanted, as_dtensor, mesh
        if given in inputs and wanted in outputs:
            assert_same(one_layout(ours, *case), one_layout(theirs, *case))
        else:
            with pytest.raises(ValueError, match=rf"^{style}: .*_layouts: expected .* use torch's own style"):
                one_layout(ours, *case)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@on_ranks(2)
def test_other_modules_and_layouts_are_refused_by_name():
    """Modules stay as they were."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    table = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    column, row, tokens = ours.ColwiseParallel(), ours.RowwiseParallel(), ours.SequenceParallel()
    of_all = ours.RowwiseParallel(input_layouts=Replicate())
    taken = theirs.parallelize_module(nn.Linear(4, 4), mesh, ours.ColwiseParallel())
    divide = "expected features that the 2 ranks divide, got Linear"
    linear = "expected an nn.Linear with its own forward"
    norm = "expected an nn.LayerNorm or nn.RMSNorm with its own"
    one_dimension = "expected a mesh of one dimension, such as mesh['tp']"
    calls = [
        ("ValueError", f"ColwiseParallel: {divide}(in_features=4", column, nn.Linear(4, 5), mesh),
        ("ValueError", f"RowwiseParallel: {divide}(in_features=5", row, nn.Linear(5, 4), mesh),
        ("ValueError", one_dimension, column, nn.Linear(4, 4), table),
        ("TypeError", f"{linear}, got Scaled", column, Scaled(4, 4), mesh),
        ("TypeError", f"{linear}, got Embedding", column, nn.Embedding(4, 4), mesh),
        ("ValueError", "expected Replicate() for an nn.Embedding, got S(-1)", row, nn.Embedding(4, 4), mesh),
        ("ValueError", "an nn.Embedding without max_norm", of_all, nn.Embedding(4, 4, max_norm=1.0), mesh),
        ("TypeError", f"{norm} forward, got Dropout", tokens, nn.Dropout(), mesh),
        ("ValueError", "a norm over one dimension that has a weight", tokens, nn.LayerNorm((4, 4)), mesh),
        ("TypeError", "nn.Embedding with its own forward, got ColwiseLinear", row, taken, mesh),
    ]
    for kind, part, style, module, where in calls:
        before = (type(module), [type(parameter) for parameter in module.parameters()])
        refused_alike(kind, part, theirs.parallelize_module, module, where, style)
        assert before == (type(module), [type(parameter) for parameter in module.parameters()])
    partial = "ColwiseParallel: input_layouts: expected Replicate() or Shard(dim), got P(sum)"
    refused_alike("ValueError", partial, ours.ColwiseParallel, input_layouts=Partial())


@on_ranks(4)
def test_styles_go_under_fully_shard():
    """Gradients, norms of both clippings and saved weights are the unsharded model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Model().double()
    model = theirs.parallelize_module(deepcopy(whole), mesh["tp"], own_tokens(ours, 1))
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    ids = torch.arange(16).view(4, 4) * 5 % 13
    own = slice(mesh.get_local_rank("dp") * 2, mesh.get_local_rank("dp") * 2 + 2)
    whole(ids).square().mean().backward()
    full_output = model(ids[own])
    (full_output.to_local() if isinstance(full_output, DTensor) else full_output).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    check_replicas(model, state=mesh)
    norms = [torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).full_tensor()]
    norms += [clip_grad_norm_(model.parameters(), 0.5, state=mesh)]
    for norm in norms:
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=0, atol=1e-7, msg=name)
    for name, value in full_state_dict(model, state=mesh).items():
        assert torch.equal(value, whole.state_dict()[name]), name
    with pytest.raises(TypeError, match="after fully_shard, set its attribute sequence_parallel"):
        finalize_gradients(model, state=mesh)
