"""`interop/mpu.py`: the older spellings, the clamping, and the layer counts."""

from types import SimpleNamespace

import pytest

from tests.fake_world import fake_rank, pretend
from tests.oracle import Classic
from tpkernels import parallel_state as ps
from tpkernels.groups.state import ParallelStateError, use
from tpkernels.interop import mpu


def test_mpu_has_every_name_of_parallel_state():
    for name in set(ps.__all__) - {"initialize_model_parallel"}:
        assert getattr(mpu, name) is getattr(ps, name)


def test_mpu_takes_arguments_with_a_trailing_underscore():
    with fake_rank(5, 16):
        assert mpu.is_unitialized()
        mpu.initialize_model_parallel(
            tensor_model_parallel_size_=2,
            pipeline_model_parallel_size_=4,
            virtual_pipeline_model_parallel_size_=2,
            pipeline_model_parallel_split_rank_=2,
        )
        assert not mpu.is_unitialized()
        for function, arguments, expected in Classic(16, 2, 4, 2, 2, 5).answers(virtual_rank=0):
            assert getattr(mpu, function)(*arguments) == expected
        mpu.destroy_model_parallel()
        assert mpu.is_unitialized()


@pytest.mark.parametrize(("tensor", "pipeline"), [(8, 1), (1, 64)])
def test_mpu_cuts_sizes_down_to_the_world_with_a_warning(tensor, pipeline):
    words = r"(tensor|pipeline)_model_parallel_size_ \d+ is larger than the world: using 4"
    with fake_rank(3, 4):
        with pytest.warns(UserWarning, match=words):
            mpu.initialize_model_parallel(tensor, pipeline)
        assert mpu.get_tensor_model_parallel_world_size() == min(tensor, 4)
        assert mpu.get_pipeline_model_parallel_world_size() == min(pipeline, 4)


def test_mpu_refuses_what_clamping_does_not_mend():
    with pytest.raises(ParallelStateError, match="init_process_group"):
        mpu.initialize_model_parallel(8)
    with fake_rank(0, 4):
        for caught in (AssertionError, RuntimeError):  # the older source asserts divisibility
            with pytest.raises(caught, match="is not divisible by"):
                mpu.initialize_model_parallel(3)
        with pytest.warns(UserWarning, match="larger"), pytest.raises(AssertionError, match="not divisible"):
            mpu.initialize_model_parallel(8, 2)


def counted(layers, stages, split, standalone, stage):
    """What mpu counts for a stage, in a model and in its decoder of twice the depth."""
    args = SimpleNamespace(
        num_layers=layers,
        num_layers_decoder=2 * layers,
        transformer_pipeline_model_parallel_size=stages - standalone,
        pipeline_model_parallel_split_rank=split,
        standalone_embedding_stage=standalone,
    )
    with use(pretend(stages, 1, stages, None, split, stage)):
        counts = []
        for count in (mpu.get_num_layers, mpu.get_num_layers_decoder):
            try:
                counts.append(count(args, split is not None))
            except AssertionError as error:
                assert "must be divisible by" in str(error)  # noqa: PT017
                counts.append(None)
        return counts


def dealt(layers, stages, split, standalone):
    """Layers of each stage, dealt out one by one: an independent count. None: they don't come out even."""
    counts = [0] * stages
    encoder = [s for s in range(stages) if not (standalone and s == 0)]
    rows = [encoder] if split is None else [[s for s in encoder if s < split], list(range(split, stages))]
    for row in rows:
        if not row or layers % len(row):
            return [None] * stages
        for i in range(layers):
            counts[row[i % len(row)]] += 1
    return counts


@pytest.mark.parametrize("layers", [12, 24, 30])
@pytest.mark.parametrize("standalone", [False, True], ids=["plain", "standalone_embedding"])
def test_layer_counts_of_every_stage(standalone, layers):
    for stages in range(2, 9):
        for split in [None, *range(1, stages)]:
            models, decoders = (dealt(depth, stages, split, standalone) for depth in (layers, 2 * layers))
            for stage in range(stages):
                expected = [models[stage], decoders[stage]]
                assert counted(layers, stages, split, standalone, stage) == expected, (stages, split, stage)


def test_one_stage_holds_all_layers_and_two_models_need_a_split_rank():
    assert counted(24, 1, None, False, 0) == [24, 48]
    args = SimpleNamespace(
        num_layers=24,
        transformer_pipeline_model_parallel_size=4,
        pipeline_model_parallel_split_rank=None,
        standalone_embedding_stage=False,
    )
    with (
        use(pretend(4, 1, 4, None, None, 0)),
        pytest.raises(AssertionError, match=r"needs args\.pipeline_model_parallel_split_rank"),
    ):
        mpu.get_num_layers(args, True)
