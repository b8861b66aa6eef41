"""Megatron's groups, ranks and sizes for many sizes and orders: listed here, and asked of Megatron itself."""

from itertools import product

import pytest
import torch.distributed as dist

from tests.fake_world import each_rank, fake_rank
from tests.interop.megatron_core.megatrons_groups import answers
from tests.oracle import listed
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.groups.state import ParallelStateError, current
from tpkernels.interop.megatron_core import parallel_state as ps

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp", "cp-tp-dp-ep-pp", "tp-ep-dp-pp")


def sizes_of(*sizes_and_order, **more):
    *sizes, order = sizes_and_order
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    named = {f"{name}_parallel_size": size for name, size in zip(names, sizes, strict=True)}
    return {**named, "order": order, "create_gloo_process_groups": False, **more}


CASES = [
    *(sizes_of(*each, order) for each in product((1, 2), repeat=5) for order in ORDERS[1:]),
    sizes_of(2, 1, 2, 2, 1, ORDERS[0], num_distributed_optimizer_instances=2),
    sizes_of(1, 2, 1, 1, 2, ORDERS[0], num_distributed_optimizer_instances=2),
    sizes_of(2, 2, 1, 1, 2, ORDERS[0], virtual_pipeline_model_parallel_size=3),
    sizes_of(1, 2, 2, 2, 1, ORDERS[0], create_all_gather_group=True),
    sizes_of(1, 1, 2, 1, 1, ORDERS[0], hybrid_context_parallel=True),
    sizes_of(2, 4, 1, 1, 2, ORDERS[0], hybrid_context_parallel=True),
    sizes_of(1, 4, 1, 1, 1, ORDERS[0], get_embedding_ranks=lambda ranks: [ranks[1], ranks[3]]),
    sizes_of(1, 4, 1, 1, 1, ORDERS[0], get_position_embedding_ranks=lambda ranks: ranks),
    sizes_of(3, 1, 1, 1, 1, ORDERS[0]),
    sizes_of(4, 4, 1, 1, 1, ORDERS[0]),
    sizes_of(1, 1, 1, 8, 2, ORDERS[0]),
    sizes_of(2, 1, 1, 1, 2, "pp-dp"),
]


def said(sizes):
    return "-".join(
        str(value if isinstance(value, int | str) else name)
        for name, value in sizes.items()
        if name != "create_gloo_process_groups"
    )


@pytest.mark.parametrize("sizes", CASES, ids=said)
def test_answers_are_megatrons(sizes):
    theirs = pytest.importorskip("megatron.core.parallel_state", reason="needs megatron-core to compare with")
    if sizes.get("num_distributed_optimizer_instances"):
        pytest.importorskip("einops", reason="Megatron makes such groups by einops")
    for rank in (0, 6):
        with fake_rank(rank, 8):
            expected = answers(theirs, sizes)
        with fake_rank(rank, 8):
            found = answers(ps, sizes)
        if "refused" in expected or "refused" in found:
            assert found.get("refused") == expected.get("refused"), (found, expected)
        else:
            assert found == expected


# Without Megatron: ranks of a grid by listing its places, as an independent way.


def ranks_of(name, *arguments, **options):
    return dist.get_process_group_ranks(getattr(ps, f"get_{name}_group")(*arguments, **options))


@pytest.mark.parametrize("expert_tensor", [1, 4])
def test_experts_with_a_tensor_size_of_their_own(expert_tensor):
    dense = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
    experts = {"tp": expert_tensor, "ep": 2, "dp": 16 // (4 * expert_tensor), "pp": 2}
    for rank in each_rank(16):
        ps.initialize_model_parallel(
            2,
            2,
            context_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=False,
        )
        assert ranks_of("tensor_model_parallel") == listed(rank, dense, ["tp"])
        assert ranks_of("data_parallel", True) == listed(rank, dense, ["dp", "cp"])
        assert ranks_of("tensor_and_data_parallel") == listed(rank, dense, ["tp", "dp"])
        for name, along in {
            "expert_tensor_parallel": ["tp"],
            "expert_model_parallel": ["ep"],
            "expert_data_parallel": ["dp"],
            "expert_tensor_and_model_parallel": ["tp", "ep"],
            "expert_tensor_model_pipeline_parallel": ["tp", "ep", "pp"],
        }.items():
            assert ranks_of(name) == listed(rank, experts, along), name
        assert ps.get_expert_tensor_parallel_world_size() == current().size("expert_tp") == expert_tensor
        ps.destroy_model_parallel()


def test_instances_of_the_distributed_optimizer():
    for rank in each_rank(8):
        ps.initialize_model_parallel(
            2, num_distributed_optimizer_instances=2, create_gloo_process_groups=False
        )
        data = [rank % 2 + 2 * i for i in range(4)]
        own = data[:2] if rank < 4 else data[2:]
        assert ranks_of("data_parallel", True) == data
        assert ranks_of("data_parallel", True, True) == own
        assert ranks_of("expert_data_parallel", partial_expert_data_parallel=True) == own
        assert ranks_of("inter_distributed_optimizer_instance") == [rank % 4, rank % 4 + 4]
        assert ranks_of("intra_distributed_optimizer_instance") == [rank // 4 * 4 + i for i in range(4)]
        with pytest.raises(ValueError, match="with_context_parallel=True"):
            ps.get_data_parallel_group(False, True)
        ps.destroy_model_parallel()


def test_hierarchical_context_groups():
    sizes = {"context_parallel_size": 8, "create_gloo_process_groups": False}
    for rank in each_rank(8):
        ps.initialize_model_parallel(hierarchical_context_parallel_sizes=[2, 4], **sizes)
        groups = ps.get_hierarchical_context_parallel_groups()
        inner, outer = (dist.get_process_group_ranks(group) for group in groups)
        assert inner == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert outer == [rank % 2 + 2 * i for i in range(4)]
        ps.destroy_model_parallel()
    with fake_rank(0, 8), pytest.raises(InvalidSizes, match=r"product is 8, got \[2, 2\]"):
        ps.initialize_model_parallel(hierarchical_context_parallel_sizes=[2, 2], **sizes)


def test_what_is_not_supported_is_refused_and_leaves_no_state():
    wrong = {
        "use_sharp": True,
        "sharp_enabled_group": "dp",
        "pipeline_model_parallel_comm_backend": "ucc",
        "gtp_remat_size": 2,
        "rank_offset": 4,
        "high_priority_stream_groups": ["tp"],
    }
    for name, value in wrong.items():
        with fake_rank(0, 4):
            with pytest.raises(InvalidSizes, match=f"{name}|communicator"):
                ps.initialize_model_parallel(2, **{name: value})
            assert not ps.is_initialized()
    with fake_rank(0, 8), pytest.raises(InvalidSizes, match="hybrid_context_parallel"):
        ps.initialize_model_parallel(8, hybrid_context_parallel=True)


def test_before_initialization():
    assert (ps.get_data_parallel_rank(), ps.get_context_parallel_world_size()) == (0, 0)
    assert ps.get_expert_tensor_parallel_world_size() is None
    assert ps._MODEL_PARALLEL_GROUP is None
    assert ps.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(AttributeError, match="_NO_SUCH_GROUP"):
        _ = ps._NO_SUCH_GROUP
    with pytest.raises(AssertionError, match="not initialized"):
        ps.get_tensor_model_parallel_group()
    with fake_rank(0, 2), pytest.raises(ParallelStateError, match="not initialized"):
        ps.get_data_parallel_rank()


def test_virtual_stages_are_asked_for_by_vp_stage():
    with fake_rank(3, 4):
        ps.initialize_model_parallel(1, 4, 2, create_gloo_process_groups=False)
        assert ps.is_pipeline_last_stage()
        assert not ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)
        assert ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)
        assert ps.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=1)
        assert not ps.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=0)
        with pytest.raises(AssertionError, match="vp_stage must be passed"):
            any(ask(ignore_virtual=False) for ask in (ps.is_pipeline_first_stage, ps.is_pipeline_last_stage))
        with pytest.raises(ValueError, match="from 0 to 1, got 2"):
            ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=2)
