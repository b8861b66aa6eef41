"""Models of torch's own layers compute the same when ranks share them, alone and inside FSDP2 and DDP."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.interop import buffer_cases, partial_cases, verify_cases
from tests.interop.refused import refused_alike
from tests.interop.torch_models import PLAN, Toy, assert_alike, assert_gradients_alike, toy
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tpkernels import check_replicas, initialize_model_parallel, parallelize
from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.interop.parallelize.plan import Divided, Split


def split_alike(tensor):
    """Every way to build and to split, against the whole model."""
    state = initialize_model_parallel(tensor)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("dp", "tp"))
    for tied in (False, True):
        every = (None, state, mesh, mesh["tp"], state.process_group("tp"))
        for where in every if tensor == dist.get_world_size() == 2 and not tied else (mesh,):
            whole = toy(tied=tied, bias=not tied)
            names = [name for name, _ in whole.named_parameters()]
            split = parallelize(deepcopy(whole), where, plan=PLAN)
            assert_alike(split, whole)
            assert [name for name, _ in split.named_parameters()] == names
            assert not tied or split.head.weight is split.embed.weight
            assert not split.blocks[1].down.weight.requires_grad
            assert split.blocks[1].down.bias.requires_grad
            check_replicas(split, state=where)
    gathered = full_state_dict(split)
    for name, value in gathered.items():
        assert torch.equal(value, whole.state_dict()[name]), name
    drawn = toy(seed=dist.get_rank() % tensor)
    first = toy(seed=0)
    assert_alike(parallelize(drawn, plan=PLAN, weights="broadcast"), first)
    with torch.device("meta"):
        later = Toy(bias=False).double()
    later = parallelize(later, plan=PLAN).to_empty(device="cpu")
    whole = toy(bias=False)
    load_full_state_dict(later, whole.state_dict())
    assert_alike(later, whole)


def compiled_and_rounded():
    """Also under autocast, and in bfloat16."""
    initialize_model_parallel(2)
    whole = toy()
    del whole.blocks[1]  # a second block takes as long to trace, and shows no more
    split = parallelize(deepcopy(whole), plan=PLAN)
    assert_alike(torch.compile(split, backend="aot_eager", fullgraph=True), whole)
    assert_gradients_alike(split, whole)
    single, half = toy().float(), toy().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert_rounded_alike(parallelize(deepcopy(single), plan=PLAN), single)
    assert_rounded_alike(parallelize(deepcopy(half), plan=PLAN), half)


def assert_rounded_alike(split, whole):
    torch.testing.assert_close(split(IDS), whole(IDS), rtol=0, atol=0.03)


@on_ranks(4)
def test_memory_of_the_whole_is_freed():
    initialize_model_parallel(4)
    split = parallelize(toy(), plan=PLAN)
    held = sum(parameter.nbytes for parameter in split.parameters())
    assert held == sum(parameter.untyped_storage().nbytes() for parameter in split.parameters())
    assert held < sum(parameter.nbytes for parameter in toy().parameters()) / 2


def refuse():
    """What does not fit is refused, and nothing is swapped."""
    initialize_model_parallel(2)
    rank = dist.get_rank()
    model = toy()
    before = [type(module) for module in model.modules()]
    hooked, bare = toy(), toy(tied=True)
    hooked.head.register_forward_hook(lambda *_: None)
    torch.manual_seed(1)
    odd = nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.Embedding(4, 2, max_norm=1.0)})
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    single = nn.ModuleDict({"a": nn.Linear(4, 8)})
    parallelize(single, plan={"a": "column"})
    outer = DistributedDataParallel(toy())
    of_outer = {f"module.{pattern}": entry for pattern, entry in PLAN.items()}
    unlike = (model, {"head": "head"}) if rank else (odd, {"a": "head"})
    divides = "that 2 ranks x unit 1 x stacked 1 = 2 divides, got"
    values = [
        (model, {}, "plan: expected at least one pattern"),
        (model, {"blocks.*.gates": "column"}, "'blocks.*.gates' fits no module; there are embed, blocks"),
        (model, {"*.up": "column", "*.0.up": "row"}, "'blocks.0.up' fits both '*.up' and '*.0.up'"),
        (model, {"*.up": "columns"}, "'*.up': expected one of column, row, row_of_full, head, embedding"),
        (model, {"*.up": Split("row", stacked=2)}, "a positive unit, and stacked > 1 for a column only"),
        (odd, {"a": "column"}, f"'a': expected out_features {divides} 7"),
        (odd, {"a": "row"}, f"'a': expected in_features {divides} 5"),
        (odd, {"b": "embedding"}, "'b': expected an nn.Embedding without max_norm"),
        (model, {"*.out": Split("row", unit=16)}, "'blocks.0.out': expected in_features that 2 ranks x"),
        (model, {"blocks.?": Divided("height")}, "'blocks.0.height': expected a number that 2 ranks"),
        (hooked, PLAN, "'head': expected a module without hooks or"),
        (bare, {"embed": "embedding"}, "'head' shares a weight with 'embed', and must be split like it"),
        (toy(seed=rank), PLAN, "'embed.weight': expected the same weights on all tensor-parallel ranks"),
        (outer, of_outer, "expected a model that DistributedDataParallel has not wrapped; call parallelize"),
        (model, PLAN if rank else {"head": "head"}, "ranks disagree"),
        (*unlike, "ranks disagree"),
    ]
    kinds = [
        (model, {"blocks.0.*": "column"}, "'blocks.0.norm': expected an nn.Linear for 'column', got"),
        (model, {"embed": "head"}, "'embed': expected an nn.Linear for 'head', got Embedding"),
        (single, {"a": "column"}, "for 'column', got ColumnLinear; it is split already"),
        (encoder, {"0.linear?": "column"}, "expected a module that its parent calls, but '0', an nn.Tr"),
    ]
    for kind, cases in (("ValueError", values), ("TypeError", kinds)):
        for each, plan, part in cases:
            refused_alike(kind, part, parallelize, each, plan=plan)
    refused_alike("ValueError", "got 'ignore'", parallelize, model, plan=PLAN, weights="ignore")
    assert [type(module) for module in model.modules()] == before
    parallelize(model, plan=PLAN)


@on_ranks(2)
def test_an_optimizer_of_parameters_that_were_replaced_is_refused_in_its_step():
    """Also one that has stepped before, with others of its parameters in place."""
    initialize_model_parallel(2)
    other, model = parallelize(toy(), plan=PLAN), toy()
    old, new = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    old.step()
    parallelize(model, plan=PLAN)
    with pytest.raises(ValueError, match=r"^SGD: the optimizer has 'embed.weight', which parallelize has"):
        old.step()
    new.step()


BESIDE_COPIES = pytest.param(4, 2, marks=pytest.mark.sweep)  # as in the wrappers' test


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 2), (4, 4), BESIDE_COPIES])
def test_split_model_is_the_whole_one(ranks, tensor, request):
    pool = request.getfixturevalue(f"ranks{ranks}")
    pool.run(split_alike, tensor)


@pytest.mark.parametrize(
    "case",
    [
        compiled_and_rounded,
        verify_cases.refused_though_right,
        buffer_cases.tied_again,
        buffer_cases.carried_over,
        *(refuse, verify_cases.refused_and_unchanged, verify_cases.faults_seen, partial_cases.refusals),
        *(partial_cases.declared, verify_cases.in_float32, verify_cases.told_when_not_compared),
    ],
)
def test_split_model_is_the_whole_one_or_refused(case, ranks2):
    ranks2.run(case)


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_data_parallel_wrappers_take_it(wrapper, ranks4):
    ranks4.run(partial_cases.data_parallel, wrapper)


WAYS = ["checkpointed", "copied", "accumulated", "frozen", "buckets", "finalized"]
ALSO = [pytest.param(how, marks=pytest.mark.sweep) for how in ("plain", "reentrant", "compiled", "pickled")]


@pytest.mark.parametrize("how", WAYS + ALSO)
def test_adamw_does_what_it_does_unsharded(how, ranks2):
    ranks2.run(partial_cases.trained_alike, how, timeout=120)


@pytest.mark.sweep  # whose gradients are compared above
def test_adamw_on_four_ranks(ranks4):
    ranks4.run(partial_cases.trained_alike, "plain")


@pytest.mark.parametrize("kind", ["reset", "configured", "told"])
def test_buffers_are_computed_again(kind, ranks2):
    ranks2.run(buffer_cases.computed_again, kind)


@pytest.mark.parametrize("kind", ["alone", "half"])
def test_buffers_that_nobody_can_compute_are_named(kind, ranks2):
    ranks2.run(buffer_cases.set_by_hand, kind)
