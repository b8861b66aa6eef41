"""Products and transfers are counted as torch counts them in a real step."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.counts import Operators
from tests.layers.worlds import posing
from tests.ops.transport_cases import under
from tests.planning.shapes import LLAMA, MODELS
from tests.products import once, pairwise
from tpkernels import GPT, create_parallel_state, initialize_model_parallel, model_config, plan_groups
from tpkernels.comm import calls
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import parameters_of_stage
from tpkernels.planning.step_time import (
    FlopsOfBlock,
    block_backward,
    block_forward,
    embedding_work,
    gradient_bytes,
    head_work,
    marked_bytes,
    update_bytes,
)
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import Trainer

TOKENS, BATCH = 32, 4


def wire():
    """Counts what this rank sends. Whole numbers are descriptions, which ranks compare: they do not count."""
    return Operators(torch.Tensor.is_floating_point)


def counted(function, *args):
    """Memory that ranks share sends nothing, and rows that travel with descriptions are not counted."""
    with patch.object(calls, "EAGER_BYTES", 0):
        return under("c10d", "torch", function, *args)


def job_of(model, **options):
    return Job(**{"model": model, "tokens": TOKENS, "batch": BATCH, "micro_batch": BATCH, **options})


def of_a_micro_batch(job, tensor):
    """All work of a whole model."""
    blocks = (block_forward(job, tensor, 132) + block_backward(job, tensor, 132)) * job.model.num_layers
    return blocks + embedding_work(job, tensor) + head_work(job, tensor)


def sent_and_predicted(name, options):
    """Bytes of a forward and backward."""
    ranks = torch.distributed.get_world_size()
    initialize_model_parallel(ranks)
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    model = GPT(MODELS[name], **options)
    with wire() as counting:
        model(ids, ids).backward()
    works = of_a_micro_batch(job_of(MODELS[name], element=4, **options), ranks)
    return counting.sent.total(), sum(work.sent for work in works)


@pairwise(
    ranks=[4, 2],  # on four a head of llama is shared
    name=["llama", "gpt2"],
    sequence_parallel=[False, True],
    recompute=["selective", "full", "none"],
)
def test_a_micro_batch_sends_what_is_predicted(ranks, name, sequence_parallel, recompute, request):
    options = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    for sent, predicted in request.getfixturevalue(f"ranks{ranks}").run(
        counted, sent_and_predicted, name, options
    ):
        assert sent == predicted


def sent_by_a_step(sizes, options, text):
    state = create_parallel_state(plan_groups(world_size=2, **sizes))
    config = TrainConfig(
        model=LLAMA.with_sizes(vocab_size=256),
        data=text,
        steps=3,
        batch=BATCH,
        tokens=TOKENS,
        accumulate=2,
        dtype=torch.bfloat16,
        **options,
    )
    trainer = Trainer(config, state, torch.device("cpu"))
    trainer.step()  # in which buckets learn their order
    with wire() as counting:
        trainer.step()
    return counting.sent.total()


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [({"tensor": 2}, True), ({"tensor": 2}, False), ({"tensor": 1}, False)],
    ids=["tp2_split", "tp2", "dp2"],
)
def test_a_step_sends_what_is_predicted(sizes, sequence_parallel, ranks2, tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 120)) * 20)
    layout = RankLayout(sizes["tensor"], 1, 2 // sizes["tensor"])
    job = job_of(
        LLAMA.with_sizes(vocab_size=256),
        sequence_parallel=sequence_parallel,
        micro_batch=BATCH // layout.data // 2,
    )
    parameters = parameters_of_stage(job, layout, 0)
    assert job.micro_batches(layout) == 2
    expected = 2 * sum(work.sent for work in of_a_micro_batch(job, layout.tensor))
    expected += marked_bytes(job, layout, parameters)
    expected += gradient_bytes(layout, parameters) + update_bytes(job, layout, parameters)
    options = {"sequence_parallel": sequence_parallel}
    for sent in ranks2.run(counted, sent_by_a_step, sizes, options, str(tmp_path / "text")):
        assert 0 <= sent - expected <= 1024  # norms and losses, 8 bytes each; ends of buckets


# torch counts the product that makes a new tensor, but not the one that adds to an old one
IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}


@once(name=[*MODELS], recompute=["none", "selective", "full"])
def test_products_are_those_that_torch_counts(name, recompute):
    model, ids = MODELS[name], torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    job = job_of(model, recompute=recompute)
    with posing(0, 1), sdpa_kernel(SDPBackend.MATH):
        real = GPT(model, recompute=recompute)
        with FlopCounterMode(display=False) as forward:
            real.hidden(ids)
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as step:
            real(ids, ids).backward()
    of_attention = FlopsOfBlock.of(job, 1).attention * model.num_layers
    scores = forward.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert scores == 2 * of_attention  # torch counts scores that are masked, too
    times = {"none": 3.5, "selective": 4.5, "full": 4.5}[recompute]
    products = step.get_flop_counts()["Global"]
    dense = sum(count for op, count in products.items() if "mm" in str(op) and "bmm" not in str(op))
    assert dense == sum(work.flops for work in of_a_micro_batch(job, 1)) - times * of_attention


def test_ranks_share_the_products():
    job = job_of(LLAMA.with_sizes(vocab_size=256))
    alone, shared = (sum(work.flops for work in of_a_micro_batch(job, ranks)) for ranks in (1, 4))
    assert shared == alone / 4


def alone(work):
    return work.products_alone, work.transfers_alone


def test_rounds_are_those_that_the_library_makes():
    """As counted in docs/launches.md: 8192 tokens, 8 ranks, 4096 features, 14336 between, 132 processors."""
    job = job_of(model_config("llama3-8b"), tokens=8192, micro_batch=1)
    qkv, attention, output, up, down = block_forward(job, 8, 132)
    assert [alone(work) for work in (qkv, up)] == [(1, 1)] * 2  # one: halves would not fill the GPU
    assert [alone(work) for work in (output, down)] == [(1 / 2, 3 / 7)] * 2  # two, of four ranks each
    assert attention.sent == 0
    dy, x, _, dx, dy_of_output, _, _, x_of_qkv, dx_of_qkv = block_backward(job, 8, 132)
    assert [alone(work) for work in (dy, dy_of_output)] == [(1, 1)] * 2
    assert [alone(work) for work in (x, dx, x_of_qkv, dx_of_qkv)] == [(0, 0)] * 4  # beside another product
    *_, down = block_forward(replace(job, sequence_parallel=False), 8, 132)
    assert alone(down) == (1 / 2, 5 / 7)  # sums are gathered at the end
    *_, down = block_forward(job, 8, 16)
    assert alone(down) == (1 / 4, 1 / 7)  # a smaller GPU is filled by smaller products


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_small_sums_of_all_tokens_travel_at_once(sequence_parallel):
    job = replace(job_of(LLAMA), sequence_parallel=sequence_parallel)
    *_, down = block_forward(job, 4, 132)
    full = TOKENS * BATCH * LLAMA.hidden_size * 2
    assert (down.sent, alone(down)) == (full * 3 / 4 if sequence_parallel else full * 3, (1, 1))
