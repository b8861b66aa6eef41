"""Types find what trains on other gradients, and nothing else; gradients of two real ranks are the judge."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tests.fake_world import fake_rank
from tests.interop.architectures import inputs_of, model_of
from tests.interop.typed_programs import CASES, FAULTS, NOT_SEEN, weights_of
from tests.on_ranks import on_ranks
from tpkernels import (
    GPT,
    GPTConfig,
    Recipe,
    initialize_model_parallel,
    manual_seed,
    ops,
    parallelize,
    typecheck,
)
from tpkernels.cli.typecheck import told
from tpkernels.comm.transports import c10d
from tpkernels.layers.replicas import finalize_gradients
from tpkernels.ops.tensor_parallel import mappings

spmd_types = pytest.importorskip("spmd_types", reason="the checker of types is not installed")
checker = pytest.importorskip("spmd_types.checker", reason="the checker of types is not installed")


@contextmanager
def rank_of_two():
    """Rank 0 of a world whose other rank sends what it sends."""
    with patch.object(c10d, "processors_of", lambda device: 1), fake_rank(0, 2):
        initialize_model_parallel(2)
        manual_seed(1)
        yield dist.group.WORLD


def verdict(program, fault):
    """What the command says of one forward and backward; nothing if it finds no fault."""
    with rank_of_two() as group:
        alone = dist.new_group([0])
        weights = weights_of(program, fault, 0, 2)
        try:
            with typecheck(group):
                program(weights, group, alone, fault).backward()
        except spmd_types.SpmdTypeError as error:
            return told(error)
    return ""


def names(cases):
    return [f"{program.__name__}-{fault or 'right'}".replace(" ", "_") for program, fault in cases]


@pytest.mark.parametrize(("program", "fault"), CASES, ids=names(CASES))
def test_the_line_of_each_fault_is_named(program, fault):
    said = verdict(program, fault)
    assert bool(said) == bool(fault)
    if fault:
        _, line, *_ = said.splitlines()
        assert line.strip().startswith(FAULTS[program][fault])


@on_ranks(2, 4)
def test_each_of_these_faults_changes_the_loss_or_a_gradient():
    """On real ranks, against one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    initialize_model_parallel(ranks)
    group, alone = dist.group.WORLD, [dist.new_group([each]) for each in range(ranks)][rank]
    for program, fault in CASES:
        split, full = weights_of(program, fault, rank, ranks), weights_of(program, fault, 0, 1)
        loss, expected = program(split, group, alone, fault), program(full, alone, alone, fault)
        loss.backward()
        expected.backward()
        finalize_gradients(split)
        alike = torch.allclose(loss, expected)
        for ours, theirs in zip(split.parameters(), full.parameters(), strict=True):
            gradient = theirs.grad
            if ours.tensor_model_parallel and gradient is not None:
                gradient = gradient.chunk(ranks, ours.partition_dim)[rank]
            alike &= (ours.grad is None) == (gradient is None) and (
                gradient is None or torch.allclose(ours.grad, gradient)
            )
        differs = torch.tensor(float(not alike))
        dist.all_reduce(differs)
        assert bool(differs) == bool(fault), (program.__name__, fault)


def mlp(x, w, group, **options):
    return ops.parallel_mlp(x, w, None, w.t().contiguous(), None, group, **options)


# What each takes and gives, and whether x may be of another type; as docs/typecheck.md has it.
TAKEN = {
    "column_linear": (lambda x, w, g: ops.column_linear(x, w, None, g), "I", "V"),
    "column_linear by tokens": (
        lambda x, w, g: ops.column_linear(x, w, None, g, sequence_parallel=True),
        "V",
        "V",
    ),
    "row_linear": (lambda x, w, g: ops.row_linear(x, w, None, g), "V", "I"),
    "row_linear by tokens": (lambda x, w, g: ops.row_linear(x, w, None, g, sequence_parallel=True), "V", "V"),
    "parallel_mlp": (lambda x, w, g: mlp(x, w, g), "I", "I"),
    "parallel_mlp by tokens": (lambda x, w, g: mlp(x, w, g, sequence_parallel=True), "V", "V"),
    "vocab_cross_entropy": (lambda x, w, g: ops.vocab_cross_entropy(x, torch.arange(4), g), "V", "I"),
    "linear_cross_entropy": (lambda x, w, g: ops.linear_cross_entropy(x, w, torch.arange(4), g), "I", "I"),
    "weighted vocab_cross_entropy": (
        lambda x, w, g: ops.vocab_cross_entropy(x, torch.arange(4), g, class_weight=torch.ones(8)),
        "V",
        "I",
    ),
    "linear_cross_entropy with all terms": (
        lambda x, w, g: ops.linear_cross_entropy(
            x, w, torch.arange(4), g, bias_shard=w[0], softcap=2.0, class_weight=torch.ones(8), z_loss=0.1
        ),
        "I",
        "I",
    ),
    "linear_logprobs": (
        lambda x, w, g: ops.linear_logprobs(x, w, torch.arange(4), g, return_entropy=True)[1],
        "I",
        "I",
    ),
    "linear_logprobs of several": (
        lambda x, w, g: ops.linear_logprobs(x, w, torch.arange(8).view(4, 2), g)[0],
        "I",
        "I",
    ),
    "copy_to_region": (lambda x, w, g: mappings.copy_to_region(x, g), "I", "R"),
    "reduce_from_region": (lambda x, w, g: mappings.reduce_from_region(x, g), "VP", "I"),
    "scatter_to_region": (lambda x, w, g: mappings.scatter_to_region(x, g), "I", "V"),
    "scatter_to_sequence_region": (lambda x, w, g: mappings.scatter_to_sequence_region(x, g), "I", "V"),
    "gather_from_region": (lambda x, w, g: mappings.gather_from_region(x, g), "V", "I"),
    "gather_from_sequence_region": (lambda x, w, g: mappings.gather_from_sequence_region(x, g), "V", "R"),
    "reduce_scatter_to_sequence_region": (
        lambda x, w, g: mappings.reduce_scatter_to_sequence_region(x, g),
        "VP",
        "V",
    ),
}


@pytest.mark.parametrize("op", TAKEN, ids=[op.replace(" ", "_") for op in TAKEN])
def test_spmd_types_knows_types_of_each_op(op):
    """Without `typecheck`: rules are found on the autograd functions."""
    call, taken, given = TAKEN[op]
    for kind in "IRVP":
        with rank_of_two() as group, spmd_types.set_current_mesh([group]):
            x, w = torch.zeros(4, 4, requires_grad=True), torch.zeros(4, 4, requires_grad=True)
            with checker.typecheck(local=True):
                spmd_types.assert_type(x, {group: getattr(spmd_types, kind)})
                spmd_types.assert_type(w, {group: spmd_types.V})
                if kind in taken:
                    y = call(x, w, group)
                    assert spmd_types.get_axis_local_type(y, group) is getattr(spmd_types, given)
                else:
                    with pytest.raises(spmd_types.SpmdTypeError):
                        call(x, w, group)


LLAMA = {"activation": "swiglu", "norm": "rms_norm", "bias": False, "tied": False, "num_kv_heads": 2}
GPT2 = {"max_positions": 16}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (GPT2, {}),
        (LLAMA, {"sequence_parallel": True}),
        (GPT2, {"sequence_parallel": True, "dropout": 0.1, "recompute": "full"}),
        (LLAMA, {"recompute": "selective", "quantize": Recipe.rowwise()}),
    ],
    ids=["gpt2", "llama_by_tokens", "gpt2_recomputed", "llama_in_fp8"],
)
def test_the_own_models_have_no_fault(shape, options):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
    ids = torch.arange(32).view(2, 16)
    with rank_of_two():
        model = GPT(GPTConfig(**sizes, **shape), **options)
        with typecheck():
            model(ids, ids).backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_lost_mark_is_found_in_a_model(compiled):
    ids = torch.arange(32).view(2, 16)
    with rank_of_two():
        config = GPTConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, **LLAMA)
        model = GPT(config, sequence_parallel=True)
        norm = next(p for name, p in model.named_parameters() if "norm" in name)
        assert norm.sequence_parallel
        norm.sequence_parallel = False
        model = torch.compile(model, backend="eager") if compiled else model
        with pytest.raises(spmd_types.SpmdTypeError, match="Invariant"), typecheck():
            model(ids, ids).backward()


def test_marks_are_read_anew_in_each_check():
    with rank_of_two() as group:
        weight = torch.nn.Parameter(torch.ones(4))
        with pytest.raises(spmd_types.SpmdTypeError, match="Invariant"), typecheck(group):
            mappings.scatter_to_sequence_region(torch.ones(4, 4), group).mul(weight)
        weight.sequence_parallel = True
        with typecheck(group):
            mappings.scatter_to_sequence_region(torch.ones(4, 4), group).mul(weight)


def test_what_local_types_do_not_tell_is_not_found():
    """docs/typecheck.md says so."""
    for program, faults in NOT_SEEN.items():
        assert not any(verdict(program, fault) for fault in faults)


def test_dtensors_are_refused():
    with rank_of_two() as group:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        parameter = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
        with (
            pytest.raises(TypeError, match="expected parameters that are tensors, got a DTensor"),
            typecheck(group),
        ):
            parameter.mul(2)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_models_of_transformers_that_are_split_have_no_fault(name):
    pytest.importorskip("transformers", reason="make check-transformers installs it")
    with rank_of_two():
        model = parallelize(model_of(name))
        with typecheck():
            model(**inputs_of(name)).loss.backward()
