"""What ranks run in tests of how layers behave, beside the numbers that they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.checks import error_of
from tests.layers.parity import K, N, cut, cut_of, drawn
from tpkernels import (
    ColumnParallelLinear,
    GradientBuckets,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    create_parallel_state,
    initialize_model_parallel,
    plan_groups,
    reduce_from_tensor_model_parallel_region,
)
from tpkernels.comm import schedule
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.layers.world import State


class Block(nn.Module):
    """Everything that layers have, once."""

    def __init__(self, *, fused: bool = False, sequence_parallel: bool = True) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "gradient_accumulation_fusion": fused}
        self.norm = RMSNorm(K, sequence_parallel=sequence_parallel)
        self.up = ColumnParallelLinear(K, N, gather_output=False, activation="gelu", **options)
        self.down = RowParallelLinear(N, K, input_is_parallel=True, **options)
        self.mlp = ParallelMLP(K, N, activation="swiglu", **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(self.norm(x))[0])[0]
        return x + self.mlp(x)[0]


def built(*, fused: bool = False, sequence_parallel: bool = True) -> Block:
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(7)
    return Block(fused=fused, sequence_parallel=sequence_parallel)


def tokens(seed: int = 1) -> Tensor:
    return cut(0)(drawn((8, 3, K), seed, torch.float32))


def outcome(model: Callable[[Tensor], Tensor], module: nn.Module, *batches: Tensor) -> list[Tensor]:
    """Outputs, and gradients of inputs and parameters, summed over the batches."""
    module.zero_grad()
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results += [y.detach(), x.grad]
    return results + [p.grad.clone() for p in module.parameters() if p.grad is not None]


def equal(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(map(torch.equal, ours, expected))


def close(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return len(ours) == len(expected) and all(
        float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in zip(ours, expected, strict=True)
    )


def compiled_equals_eager(sequence_parallel: bool) -> bool:
    block = built(sequence_parallel=sequence_parallel)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (8, 16):
        x = cut(0)(drawn((rows, 3, K), rows, torch.float32)) if sequence_parallel else tokens()
        if not close(outcome(compiled, block, x), outcome(block, block, x), 1e-6):
            return False
    return True


def compiled_ends_equal_eager() -> bool:
    """Layers that gather and cut features themselves, and regions of the current state."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    pair = nn.ModuleList([ColumnParallelLinear(K, N, activation="gelu"), RowParallelLinear(N, K)])

    def run(x: Tensor) -> Tensor:
        h, _ = pair[0](copy_to_tensor_model_parallel_region(x))
        return reduce_from_tensor_model_parallel_region(pair[1](h)[0])

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    x = drawn((4, K), 1, torch.float32)
    return equal(outcome(compiled, pair, x), outcome(run, pair, x))


def checkpointed_equals_plain() -> bool:
    block = built()
    plain = outcome(block, block, tokens())
    return all(
        equal(outcome(lambda x, way=way: checkpoint(block, x, use_reentrant=way), block, tokens()), plain)
        for way in (False, True)
    )


def accumulates() -> bool:
    """Gradients of two backwards are the sum of each one's."""
    block = built()
    one, two = (outcome(block, block, tokens(seed))[2:] for seed in (1, 2))
    both = outcome(block, block, tokens(1), tokens(2))[4:]
    return close(both, [a + b for a, b in zip(one, two, strict=True)], 1e-6)


def without_gradients() -> bool:
    block = built()
    expected = outcome(block, block, tokens())[0]
    block.eval()
    with torch.no_grad():
        plain = block(tokens())
    with torch.inference_mode():
        inferred = block(tokens())
    return equal([plain, inferred], [expected, expected]) and plain.grad_fn is None


def autocast_is_bfloat16() -> bool:
    """Products in bfloat16, parameters' gradients in fp32, close to fp32 throughout."""
    block = built()
    expected = outcome(block, block, tokens())

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            assert block.up(x)[0].dtype == torch.bfloat16
            return block(x)

    ours = outcome(cast, block, tokens())
    return close(ours, expected, 0.05) and all(p.grad.dtype == torch.float32 for p in block.parameters())


def frozen_weights() -> bool:
    """Only what is not frozen receives gradients, and the others' are as before."""
    block = built(fused=True)
    for layer in (block.up, block.down, block.mlp.up, block.mlp.gate, block.mlp.down):
        layer.weight.requires_grad_(False)
        layer.weight.main_grad = torch.full_like(layer.weight, torch.nan)  # never to be touched
    frozen = outcome(block, block, tokens())
    untouched = all(p.main_grad.isnan().all() for p in block.parameters() if hasattr(p, "main_grad"))
    reference = Block()
    reference.load_state_dict(block.state_dict())
    full = outcome(reference, reference, tokens())
    trainable = [p.requires_grad for p in block.parameters()]
    full[2:] = [grad for grad, wanted in zip(full[2:], trainable, strict=True) if wanted]
    return untouched and close(frozen, full, 1e-6)


def tied_head() -> bool:
    """A head that computes with another layer's weight gives both uses' gradients to it."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    owner = ColumnParallelLinear(K, N, bias=False)
    head = ColumnParallelLinear(K, N, bias=False, skip_weight_param_allocation=True)
    x = drawn((5, K), 1, torch.float32)
    owner(x)[0].sum().backward()
    once = owner.weight.grad.clone()
    (owner(x)[0].sum() + head(x, owner.weight)[0].sum()).backward()
    return close([owner.weight.grad], [3 * once], 1e-6)


def groups_of_any_kind() -> list[str]:
    """Layers over a second state, a process group and a mesh, interleaved: which differ from the whole."""
    initialize_model_parallel(1)  # the current state is none of them
    ranks = dist.get_world_size()
    places: dict[str, State] = {
        "state": create_parallel_state(plan_groups(world_size=ranks, tensor=ranks // 2)),
        "group": dist.group.WORLD,
        "mesh": init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp")),
    }
    torch.manual_seed(5)
    pairs = {
        name: (ColumnParallelLinear(K, N, state=place), RowParallelLinear(N, K, state=place))
        for name, place in places.items()
    }
    torch.manual_seed(5)
    wholes = {name: [nn.init.xavier_normal_(torch.empty(s)) for s in ((N, K), (K, N))] for name in pairs}
    x = drawn((4, K), 1, torch.float32)
    ys = {name: down(up(x)[0])[0] for name, (up, down) in pairs.items()}
    return [
        name
        for name, (w_up, w_down) in wholes.items()
        if not close([ys[name]], [x @ w_up.t() @ w_down.t()], 1e-6)
    ]


def fusion_follows_the_protocol() -> list[str]:
    """What is wrong with main_grad and its flags after a backward; nothing, one hopes."""
    wrong = []
    block = built(fused=True)
    reference = Block()
    reference.load_state_dict(block.state_dict())
    names = [name for name, _ in reference.named_parameters()]
    expected = dict(zip(names, outcome(reference, reference, tokens())[2:], strict=True))
    weights = {name: p for name, p in block.named_parameters() if p.ndim == 2}

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    inside = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    ways: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, float]] = {
        "plain": (block, torch.float32, 1e-6),
        "narrow": (block, torch.bfloat16, 0.01),
        "autocast": (cast, torch.float32, 0.05),
        "checkpoint": (lambda x: checkpoint(block, x, use_reentrant=False), torch.float32, 1e-6),
        "reentrant": (lambda x: checkpoint(block, x, use_reentrant=True), torch.float32, 1e-6),
        "compiled": (compiled, torch.float32, 1e-6),
        "compiled, narrow": (compiled, torch.bfloat16, 0.01),
        "compiled checkpoint": (inside, torch.float32, 1e-6),
        "checkpoint of compiled": (
            lambda x: checkpoint(compiled, x, use_reentrant=False),
            torch.float32,
            1e-6,
        ),
        "reentrant of compiled": (lambda x: checkpoint(compiled, x, use_reentrant=True), torch.float32, 1e-6),
    }
    for way, (run, dtype, tolerance) in ways.items():
        block.zero_grad()
        for name, weight in weights.items():
            weight.main_grad = torch.zeros_like(weight, dtype=dtype)
            if "mlp" in name:
                weight.grad_added_to_main_grad = False
                weight.zero_out_wgrad = "gate" in name
        run(tokens().requires_grad_()).square().sum().backward()
        for name, weight in weights.items():
            if not close([weight.main_grad.float()], [expected[name]], tolerance):
                wrong.append(f"{way}: main_grad of {name}")
            if "mlp" in name:
                if weight.grad_added_to_main_grad is not True or weight.grad.shape != weight.shape:
                    wrong.append(f"{way}: no gradient for form's sake of {name}")
                if weight.zero_out_wgrad and weight.grad.any():
                    wrong.append(f"{way}: not zeros of {name}")
            elif weight.grad is not None:
                wrong.append(f"{way}: a gradient beside main_grad of {name}")
    return wrong


def buckets_take_fused_gradients(compiled: bool = False) -> bool:
    """`GradientBuckets(main_grad=True)` over fused layers holds what plain layers have in `grad`."""
    block = built(fused=True)
    reference = copy.deepcopy(block)
    for module in reference.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = False
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets(block, alone, main_grad=True)
    torch._dynamo.reset()
    run = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    for _ in range(3):
        buckets.zero()
        run(tokens()).square().sum().backward()
        if buckets.finish():
            return False
    expected = outcome(reference, reference, tokens())[2:]
    return close([p.main_grad for p in block.parameters()], expected, 1e-6)


def buckets_take_fused_gradients_of_compiled_layers() -> bool:
    return buckets_take_fused_gradients(compiled=True)


def tied_weights_keep_both_gradients() -> bool:
    """A table that is looked up plainly and multiplied by a fused head, in buckets."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    head = ColumnParallelLinear(
        K, N, bias=False, skip_weight_param_allocation=True, gradient_accumulation_fusion=True
    )
    torch.manual_seed(dist.get_rank())
    table = nn.Parameter(torch.randn(N // dist.get_world_size(), K))
    rows = torch.tensor([0, 3, 3])

    def backward(layer: ColumnParallelLinear) -> None:
        layer(nn.functional.embedding(rows, table), table)[0].square().sum().backward()

    backward(ColumnParallelLinear(K, N, bias=False, skip_weight_param_allocation=True))
    expected = table.grad
    table.grad = None
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets([("table", table)], alone, main_grad=True)
    for _ in range(2):
        buckets.zero()
        backward(head)
        buckets.finish()
    return close([table.main_grad], [expected], 1e-6) and table.grad is None


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many transfers were begun inside."""
    count = [0]
    original = Transfers.exchange

    def exchange(self: object, *arguments: object) -> object:
        count[0] += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    Transfers.exchange = exchange  # type: ignore[assignment, method-assign]
    try:
        yield count
    finally:
        Transfers.exchange = original  # type: ignore[method-assign]


def mistakes() -> list[tuple[str, str]]:
    """What bad calls say on this rank, and that nothing was sent before."""
    block = built()
    size = dist.get_world_size()
    calls: list[Callable[[], object]] = [
        lambda: ColumnParallelLinear(K, size + 1),
        lambda: ParallelMLP(K, N, activation="sigmoid"),
        lambda: RowParallelLinear(N, K, init_method=lambda w: w[0]),
        lambda: block.up(torch.randn(4, K + 1)),
        lambda: block.down(torch.randn(size + 1, N // size)),
        lambda: block.mlp(torch.randn(4, K - 1)),
        lambda: block.mlp(torch.randn(4, K).double()),
        lambda: block.norm(torch.randn(4, K - 1)),
    ]
    with counted() as count:
        said = [error_of(call) for call in calls]
        sent = count[0]
        block(tokens())  # the counter counts
        assert count[0] > sent
    return [*said, ("transfers", str(sent))]


def weights_agree(layers: int) -> bool:
    """Each rank's shards are parts of the model that rank 0 would draw alone."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    mlps = [ParallelMLP(K, N, activation="swiglu") for _ in range(layers)]
    torch.manual_seed(3)
    for mlp in mlps:
        for layer, shape in ((mlp.up, (N, K)), (mlp.gate, (N, K)), (mlp.down, (K, N))):
            whole = nn.init.xavier_normal_(torch.empty(shape))
            if not torch.equal(layer.weight, cut_of(layer.weight)(whole)):
                return False
    return True
