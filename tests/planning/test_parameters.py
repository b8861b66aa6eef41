"""Parameters are counted as a real model has them."""

import pytest
import torch

from tests.layers.worlds import posing
from tests.planning.shapes import MODELS
from tests.products import once
from tpkernels import GPT, model_config
from tpkernels.layers.attributes import Attributes
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import ParameterCount, parameters_of_stage

NAMED = {"gpt2-small": model_config("gpt2-small"), "llama3-8b": model_config("llama3-8b", num_layers=2)}


def counted(model):
    """What a model has on this rank."""
    sharded = replicated = marked = 0
    for parameter in model.parameters():
        marks, count = Attributes.of(parameter), parameter.numel()
        sharded += count * marks.tensor_model_parallel
        replicated += count * (not marks.tensor_model_parallel)
        marked += count * marks.sequence_parallel
    return ParameterCount(sharded, replicated, marked)


@once(name=[*MODELS, *NAMED], tensor=[4, 1, 2])
def test_counts_are_those_of_a_model(name, tensor):
    config = (MODELS | NAMED)[name]
    job = Job(model=config, tokens=16, batch=1)
    with posing(tensor - 1, tensor):
        real = counted(GPT(config, sequence_parallel=True, device=torch.device("meta")))
    ours = parameters_of_stage(job, RankLayout(tensor, 1, 1), 0)
    assert (ours.sharded, ours.replicated) == (real.sharded, real.replicated)
    if tensor > 1:
        assert ours.marked == real.marked


@pytest.mark.parametrize("name", MODELS)
def test_stages_share_the_model(name):
    job = Job(model=MODELS[name].with_sizes(num_layers=6), tokens=16, batch=1)
    whole = parameters_of_stage(job, RankLayout(2, 1, 1), 0).total
    stages = [parameters_of_stage(job, RankLayout(2, 3, 1), stage).total for stage in range(3)]
    table = 125 * 64
    assert sum(stages) == whole + table * MODELS[name].tied  # the last stage's copy of a tied table
    assert stages[1] < min(stages[0], stages[2])
