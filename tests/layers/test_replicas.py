"""Copies of parameters stay equal, are counted once, and tell when they are not equal."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.checks import error_of
from tests.layers.small import Block, K, N, built, cut_of, drawn, tokens
from tests.layers.worlds import posing
from tests.on_ranks import equal_on_all, on_ranks
from tests.ops.parallel_cases import close
from tpkernels import (
    GradientBuckets,
    RMSNorm,
    check_replicas,
    clip_grad_norm_,
    finalize_gradients,
    initialize_model_parallel,
    parallel_state,
)
from tpkernels.layers.attributes import Attributes

EACH_WORLD = pytest.mark.parametrize("world", ["ranks1", "ranks4"])


def whole_after_backward() -> dict[str, Tensor]:
    """Parameters and gradients of the unsharded `Block`, in plain torch and float64."""
    torch.manual_seed(7)
    shapes = {"up": (N, K), "down": (K, N), "mlp.up": (N, K), "mlp.gate": (N, K), "mlp.down": (K, N)}
    p = {f"{name}.weight": nn.init.xavier_normal_(torch.empty(shape)) for name, shape in shapes.items()}
    p |= {"norm.weight": torch.ones(K), "up.bias": torch.zeros(N)}
    p |= {"down.bias": torch.zeros(K), "mlp.down.bias": torch.zeros(K)}
    p = {name: value.double().requires_grad_() for name, value in p.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    x = drawn((8, 3, K), 1).double()
    x = x + linear(F.gelu(linear(F.rms_norm(x, (K,), p["norm.weight"], 1e-5), "up")), "down")
    y = x + linear(F.silu(linear(x, "mlp.gate")) * linear(x, "mlp.up"), "mlp.down")
    y.square().mean().backward()
    return p


def backward(model: nn.Module) -> None:
    (model(tokens()).square().mean() / dist.get_world_size()).backward()


def require_gradients(block: Block, expected: dict[str, Tensor], but: tuple[str, ...] = ()) -> None:
    """All are whole, but these are not."""
    for name, p in block.named_parameters():
        is_whole = close([p.grad.double()], [cut_of(p)(expected[name].grad)], 1e-5)
        assert is_whole == (name not in but), name


@EACH_WORLD
@on_ranks()
def test_finalizing_makes_gradients_whole_and_so_do_buckets():
    block, expected = built(), whole_after_backward()
    backward(block)
    require_gradients(block, expected, but=("norm.weight",) if dist.get_world_size() > 1 else ())
    finalize_gradients(block)
    require_gradients(block, expected)
    group = parallel_state.get_tensor_model_parallel_group()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets(block, alone, tensor_parallel_group=group)
    for _ in range(2):
        buckets.zero()
        backward(block)
        buckets.finish()
    require_gradients(block, expected)


@EACH_WORLD
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@on_ranks()
def test_norm_is_that_of_the_whole_model(max_norm):
    """And clipped gradients are those that torch clips."""
    block = built()
    backward(block)
    finalize_gradients(block)
    whole = whole_after_backward()
    expected = float(torch.nn.utils.clip_grad_norm_(whole.values(), max_norm))
    assert float(clip_grad_norm_(block.parameters(), max_norm)) == pytest.approx(expected, rel=1e-5)
    require_gradients(block, whole)
    again = clip_grad_norm_(list(block.parameters()), max_norm)
    assert float(again) == pytest.approx(min(max_norm, expected), rel=1e-3)


@on_ranks(4)
def test_norm_counts_stages_and_shares_once():
    """Over 2 tensor ranks x 2 stages: a shard of 3s, a copy of 4s, and one that is shared."""
    initialize_model_parallel(2, 2)
    shard, copy, shared = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    Attributes(True, 0, 1).put_on(shard)
    for parameter, value in ((shard, 3.0), (copy, 4.0), (shared, 100.0)):
        parameter.grad = torch.tensor([value])
    shared.shared = True
    norm = math.sqrt(2 * (2 * 3**2 + 4**2))
    assert float(clip_grad_norm_([shard, copy, shared, shard], 1.0)) == pytest.approx(norm)
    assert float(shard.grad) == pytest.approx(3 / norm)
    assert float(shared.grad) == pytest.approx(100 / norm)


@on_ranks(4)
def test_forgotten_finalizing_is_told_on_all_ranks():
    """By clipping, and by checking."""
    block = built()
    backward(block)
    kind, text = equal_on_all(error_of(clip_grad_norm_, block.parameters(), 1.0))
    assert kind == "RuntimeError"
    told = "ranks hold copies of parameter 0 of those given, (24,), but different gradients"
    assert text.startswith(f"clip_grad_norm_: tensor-parallel {told}. Likeliest is a sum that is missing: ")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter -= 0.1 * parameter.grad
    assert "check_replicas: 'norm.weight' differs" in equal_on_all(error_of(check_replicas, block))[1]


class Described(nn.Module):
    """As modules of Megatron describe their parameters for checkpoints."""

    def __init__(self, ranks):
        super().__init__()
        self.offset = nn.Parameter(torch.full((2,), float(dist.get_rank())))
        self.ranks = ranks

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {"offset": SimpleNamespace(local_shape=(2,), global_shape=(2 * self.ranks,))}


@on_ranks(2)
def test_an_unmarked_shard_that_its_module_describes_is_no_replica():
    initialize_model_parallel(2)
    check_replicas(nn.ModuleDict({"attention": Described(2)}))
    kind, text = equal_on_all(error_of(check_replicas, nn.ModuleDict({"attention": Described(1)})))
    assert (kind, "'attention.offset' differs" in text) == ("RuntimeError", True)


@on_ranks(4)
def test_no_stage_waits_for_one_that_refuses():
    """Copies of the second stage of two have gradients that differ."""
    initialize_model_parallel(2, 2)
    weight = nn.Parameter(torch.zeros(2))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    before = torch.full((2,), 1.0 + stage * dist.get_rank())
    weight.grad = before.clone()
    words = "refused on pipeline stage 1, whose ranks say why; nothing is clipped"
    if stage == 1:
        words = r"copies of parameter 0 of those given, \(2,\), but different gradients. Likeliest is other"
    with pytest.raises(RuntimeError, match=words):
        clip_grad_norm_([weight], 0.1)
    assert weight.grad.equal(before)


PLANTS = {  # what happens to a copy; what is told: of which parameter, and more
    "one bit": (lambda block: block.down.bias[3].fill_(1e-45), "down.bias", "on rank 3 from rank 0"),
    "minus zero": (lambda block: block.down.bias[3].fill_(-0.0), "down.bias", "on rank 3 from rank 0"),
    "two parameters": (
        lambda block: (block.norm.weight.mul_(1.5), block.mlp.down.bias.add_(1)),
        "norm.weight",
        "so do 1 more of 3 parameters",
    ),
    "a shard": (lambda block: block.up.weight.zero_(), "", ""),  # of which ranks hold different parts anyway
}


@on_ranks(2)
def test_norms_of_gradients_that_are_infinite_or_nan_on_one_rank():
    block = built()
    block.norm.weight.grad = torch.full((K,), torch.inf)
    assert float(clip_grad_norm_(block.parameters(), 1.0)) == math.inf
    block.zero_grad()
    block.up.weight.grad = torch.full_like(block.up.weight, torch.nan if dist.get_rank() == 0 else 1.0)
    assert math.isnan(clip_grad_norm_(block.parameters(), 1.0))


@on_ranks(4)
def test_copies_may_lie_otherwise_in_memory_on_one_rank():
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(5)
    values, gradient = torch.randn(7, 5), torch.randn(7, 5)
    if dist.get_rank() == 1:
        values, gradient = values.t().contiguous().t(), gradient.t().contiguous().t()
    module = nn.ParameterDict({"matrix": nn.Parameter(values), "marked": nn.Parameter(values.clone())})
    Attributes(sequence_parallel=True).put_on(module["marked"])
    module["matrix"].grad, module["marked"].grad = gradient, gradient / dist.get_world_size()
    assert module["matrix"].stride() == ((1, 7) if dist.get_rank() == 1 else (5, 1))
    finalize_gradients(module)
    whole = gradient.contiguous()
    torch.testing.assert_close(module["marked"].grad, whole, rtol=1e-6, atol=1e-8)
    norms = [torch.empty(())] * dist.get_world_size()
    dist.all_gather_object(norms, clip_grad_norm_(module.parameters(), 1.0))
    assert len({float(norm) for norm in norms}) == 1
    for parameter in module.parameters():
        torch.testing.assert_close(parameter.grad, whole / (2**0.5 * whole.norm()), rtol=1e-5, atol=1e-8)
    check_replicas(module)
    with torch.no_grad():
        module["matrix"][3, 1] += dist.get_rank()
    assert error_of(check_replicas, module)[0] == "RuntimeError"


@pytest.mark.parametrize("drifting", [False, True])
@on_ranks(4)
def test_replicas_under_fully_shard_are_summed_and_compared(drifting):
    """It makes new parameters: those of our norms say again that their gradients are partial."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, other = RMSNorm(8, sequence_parallel=True), torch.nn.LayerNorm(8)
    other.weight.sequence_parallel = True
    for module in (model, other):
        fully_shard(module, mesh=mesh["dp"])
    tokens = torch.arange(16.0).view(2, 8).sin() + mesh.get_local_rank("tp")
    (model(tokens) * tokens).sum().backward()
    group = mesh.get_group("tp")
    if drifting:
        with torch.no_grad():
            model.weight.to_local().add_(mesh.get_local_rank("tp"))
    with pytest.raises(RuntimeError, match=r"call finalize_gradients\(model\) after each backward"):
        clip_grad_norm_(model.parameters(), 1.0, state=group)
    finalize_gradients(model, state=group)
    clip_grad_norm_(model.parameters(), 1.0, state=group)
    told = pytest.raises(RuntimeError, match="check_replicas: 'weight' differs")
    with told if drifting else nullcontext():
        check_replicas(model, state=group)
    with pytest.raises(TypeError, match="which has lost its attributes"):
        finalize_gradients(other, state=group)


@on_ranks(4)
def test_gradients_are_summed_in_fp32_where_they_are():
    """In bfloat16, in `main_grad`, and nowhere."""
    initialize_model_parallel(dist.get_world_size())
    module = nn.ParameterList([torch.ones(3, dtype=torch.bfloat16), torch.ones(2), torch.ones(2)])
    for parameter in module:
        Attributes(sequence_parallel=True).put_on(parameter)
    module[0].grad = torch.full((3,), 1 + 2**-7, dtype=torch.bfloat16)
    module[1].main_grad = torch.arange(2.0)
    finalize_gradients(module)
    assert module[0].grad.equal(torch.full((3,), 4 * (1 + 2**-7)).bfloat16())
    assert module[1].main_grad.equal(4 * torch.arange(2.0))
    assert module[2].grad is None


@pytest.mark.parametrize("plant", PLANTS)
@on_ranks(4)
def test_a_planted_drift_is_named_on_all_ranks(plant):
    block = built()
    check_replicas(block)  # nothing to tell yet
    drift, name, words = PLANTS[plant]
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            drift(block)
    kind, text = error_of(check_replicas, block)
    assert kind == ("RuntimeError" if name else "nothing")
    assert not name or f"'{name}' differs between tensor-parallel ranks" in text
    assert words in text


@on_ranks(2)
def test_models_that_differ_are_an_error_not_a_hang():
    block = built()
    if dist.get_rank() == 0:
        block.down.bias = None
        del block.norm.weight
    clip = partial(clip_grad_norm_, block.parameters(), 1.0)
    for call in (partial(check_replicas, block), partial(finalize_gradients, block), clip):
        kind, text = equal_on_all(error_of(call))
        assert kind == "ValueError"
        assert "ranks disagree" in text


def test_a_rank_alone_has_nothing_to_compare():
    with posing(0, 1):
        norm = RMSNorm(4, sequence_parallel=True)
        norm.weight.grad = norm.weight.detach().clone()
        finalize_gradients(norm)
        check_replicas(norm)
        assert float(clip_grad_norm_(norm.weight, 1.0)) == pytest.approx(2.0)
        assert float(norm.weight.grad.norm()) == pytest.approx(1.0)
        assert float(clip_grad_norm_([], 1.0)) == 0.0
        for max_norm in (-1.0, math.nan):
            with pytest.raises(ValueError, match="expected max_norm of 0 or more"):
                clip_grad_norm_(norm.weight, max_norm)
