"""Which communicators are made, with which backends and options, by which ranks: on stand-ins for NCCL."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.fake_world import each_rank, fake_rank
from tests.interop.megatron_core import test_groups as cases
from tpkernels.checkpoints.shards import require_one_stage
from tpkernels.groups import c10d
from tpkernels.groups.initialize import Listed, create_listed_groups
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.interop.megatron_core import initialize
from tpkernels.interop.megatron_core import parallel_state as ps


@pytest.fixture
def made(monkeypatch):
    """(description, backend, options) of every group that is made."""
    found = []
    make = c10d.new_group

    def new_group(ranks, *, description, backend, options, **named):
        found.append((description.removeprefix("tpkernels "), backend, options))
        return make(ranks, description=description, backend=None, options=None, **named)

    monkeypatch.setattr(c10d, "new_group", new_group)
    return found


def test_groups_that_gloo_does_not_serve_have_twins(made):
    with fake_rank(5, 8):
        ps.initialize_model_parallel(2, context_parallel_size=2)
        twins = [name for name, backend, _ in made if backend == "gloo"]
        assert twins == ["dp_gloo", "dp_cp_gloo", "expert_dp_gloo"]
        for group, twin in (
            (ps.get_data_parallel_group(), ps.get_data_parallel_group_gloo()),
            (ps.get_data_parallel_group(True), ps.get_data_parallel_group_gloo(True)),
            (ps.get_data_parallel_group(True, True), ps.get_data_parallel_group_gloo(True, True)),
            (ps.get_expert_data_parallel_group(), ps.get_expert_data_parallel_group_gloo()),
            (ps.get_expert_data_parallel_group(), ps.get_expert_data_parallel_group_gloo(True)),
        ):
            assert twin is not group
            assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(group)
        ps.destroy_model_parallel()
        assert not c10d.is_alive(twin)
        ps.initialize_model_parallel(2, num_distributed_optimizer_instances=2)
        intra = ps.get_data_parallel_group_gloo(True, True)
        assert dist.get_process_group_ranks(intra) == [5, 7]
        assert dist.get_process_group_ranks(ps.get_data_parallel_group_gloo(True)) == [1, 3, 5, 7]
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(2, create_gloo_process_groups=False)
        with pytest.raises(AssertionError, match="no twin that moves CPU tensors by gloo"):
            ps.get_data_parallel_group_gloo()


class Options(SimpleNamespace):
    def __init__(self, is_high_priority_stream=False):
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())


def test_settings_of_communicators_reach_their_groups(made, monkeypatch, tmp_path):
    pytest.importorskip("yaml", reason="the file of settings is YAML")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(initialize, "is_nccl", lambda backend: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    file = tmp_path / "nccl.yaml"
    file.write_text("tp:\n  max_ctas: 8\nmp: {net_name: Socket}\nintra_ep_dp: {min_ctas: 2}\n")
    with fake_rank(0, 8):
        ps.initialize_model_parallel(
            2,
            2,
            num_distributed_optimizer_instances=2,
            nccl_communicator_config_path=str(file),
            high_priority_stream_groups=["tp", "dp_cp"],
            create_gloo_process_groups=False,
        )
        options = {name: given for name, _, given in made if given is not None}
        assert set(options) == {"tp", "model", "dp_cp", "intra_expert_dp"}
        assert (options["tp"].is_high_priority_stream, options["tp"].config.max_ctas) == (True, 8)
        assert (options["model"].is_high_priority_stream, options["model"].config.net_name) == (
            False,
            "Socket",
        )
        assert options["dp_cp"].is_high_priority_stream
        assert options["intra_expert_dp"].config.min_ctas == 2
    for wrong in ({"tp": {"max_cta": 8}}, {"tp": {"net_name": "tcp"}}):
        with pytest.raises(InvalidSizes, match=r"not known|expected 'IB' or 'socket'"):
            ps.get_nccl_options("tp", wrong)
    assert ps.get_nccl_options("dp", {"tp": {}}) is None


def test_settings_of_communicators_are_for_nccl_alone(monkeypatch):
    """A torch with NCCL knows the settings, whatever moves the data of this group."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with (
        fake_rank(0, 2),
        pytest.raises(InvalidSizes, match="expected NCCL as the default backend"),
    ):
        ps.initialize_model_parallel(2, high_priority_stream_groups=["tp"])


def test_ranks_outside_stand_aside_where_a_communicator_is_split(monkeypatch):
    took_part = []
    monkeypatch.setattr(c10d, "splits_the_world", lambda backend: backend != "gloo")
    monkeypatch.setattr(c10d, "stand_aside", lambda: took_part.append("aside"))
    monkeypatch.setattr(c10d, "default_timeout", lambda: timedelta(seconds=1))
    monkeypatch.setattr(c10d, "new_group", lambda ranks, *, name, **_: took_part.append(name.split("/")[3]))
    wanted = {"a": Listed([[0, 1]]), "b": Listed([[1, 2]]), "c": Listed([[0, 1]], "gloo")}
    found = []
    for _ in each_rank(4):
        took_part.clear()
        create_listed_groups(wanted)
        found.append(list(took_part))
    assert found == [["a", "aside", "c"], ["a", "b", "c"], ["aside", "b"], ["aside", "aside"]]


def time_outs():
    ps.initialize_model_parallel(2)
    group = ps.get_tensor_model_parallel_group()
    dense, experts = ps.create_all_gather_groups(for_expert_parallelism=True)
    sums = [cases.total(dense), cases.total(experts)]
    ps.update_pg_timeout(timedelta(seconds=11), group)
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds()]
    ps.update_pg_timeout(timedelta(seconds=12))
    for each in (group, ps.get_data_parallel_group(), dist.group.WORLD):
        found.append(each._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return [*found, *sums]


def test_time_outs_change_and_second_communicators_move_data(ranks4):
    assert ranks4.run(time_outs) == [
        [11.0, 12.0, 12.0, 12.0, 2.0 * (2 + rank % 2) - 2, 2.0 * (2 + rank % 2) - 2] for rank in range(4)
    ]


def test_a_collection_of_several_stages_is_no_whole_model():
    with fake_rank(1, 4):
        ps.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
        tensor, pipeline = ps.get_tensor_model_parallel_group(), ps.get_pipeline_model_parallel_group()
        require_one_stage(SimpleNamespace(tp=tensor))
        with pytest.raises(ValueError, match="one of 2 pipeline stages"):
            require_one_stage(SimpleNamespace(tp=tensor, pp=pipeline))
