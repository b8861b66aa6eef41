"""The same model whatever the number of ranks: loss, logits, gradients, and the text it writes."""

import re
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.layers.small import cut_of, gradient_of
from tests.layers.test_block import step
from tests.layers.worlds import posing
from tests.models.small import CONFIGS, IDS, TARGETS
from tests.on_ranks import on_ranks
from tests.products import once
from tpkernels import GPT, TransformerBlock, initialize_model_parallel, model_config
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import parameters_of_stage


def built(shape, **options):
    torch.manual_seed(4)
    return GPT(CONFIGS[shape], **{"dtype": torch.float64, **options})


@cache
def alone(shape):
    """Loss, logits, gradients and text of one rank."""
    with posing(0, 1):
        model = built(shape)
        loss = model(IDS, TARGETS)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return loss.detach(), model(IDS).detach(), gradients, written(model)


def written(model):
    """Greedy, and drawn."""
    greedy = model.generate(IDS[:, :3], 5, top_k=1)
    drawn = model.generate(
        IDS[:, :3], 5, temperature=1.5, top_p=0.9, generator=torch.Generator().manual_seed(1)
    )
    return greedy.tolist(), drawn.tolist()


def assert_same(shape, options, expected):
    """As the model on one rank."""
    initialize_model_parallel(torch.distributed.get_world_size())
    model = built(shape, **options)
    loss, logits, gradients, text = expected
    ours = model(IDS, TARGETS)
    ours.backward()
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)
    close(ours.detach(), loss)
    close(model(IDS).detach(), logits)
    assert written(model) == text
    for name, parameter in model.named_parameters():
        full = gradients[name]
        if name in ("embedding.weight", "head.weight"):  # with padding
            full = F.pad(full, (0, 0, 0, parameter.shape[0] * model.world.size - full.shape[0]))
        close(gradient_of(parameter), cut_of(parameter)(full), msg=lambda text, name=name: f"{name}: {text}")


WAYS = {
    "sequence_parallel": {"sequence_parallel": True},
    "recomputed": {"sequence_parallel": True, "overlap": False, "recompute": "full"},
    "plain": {},
    "selective": {"recompute": "selective"},
}


@once(ranks=[4, 2], shape=[*CONFIGS], options=WAYS)
def test_ranks_do_not_change_the_model(ranks, shape, options, request):
    pool = request.getfixturevalue(f"ranks{ranks}")
    pool.run(assert_same, shape, options, alone(shape))


@pytest.mark.parametrize("shape", CONFIGS)
def test_loss_is_that_of_the_logits(shape):
    with posing(0, 1):
        model = built(shape)
        targets = TARGETS.clone()
        targets[0, :3] = -100
        logits = model(IDS)
        assert logits.shape == (2, 8, 37)
        torch.testing.assert_close(
            model(IDS, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )
        greedy = model.generate(IDS[:, :3], 1, top_k=1)
        assert greedy[:, 3].tolist() == model(IDS[:, :3])[:, -1].argmax(-1).tolist()


@pytest.mark.parametrize("shape", CONFIGS)
def test_no_token_sees_a_later_one(shape):
    with posing(0, 1):
        model = built(shape)
        changed = IDS.clone()
        changed[:, 5] = 0
        before, after = model(IDS), model(changed)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.equal(before[:, 5:], after[:, 5:])


def test_meta_device_then_materialised_is_the_same_model():
    with posing(0, 1):
        model = built("gpt2", device="meta")
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(4)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, parameter in built("gpt2").named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name


def assert_as_exact(shape, dtype, options, truth, own):
    """Errors of loss and logits in `dtype` are at most twice those of one rank."""
    initialize_model_parallel(torch.distributed.get_world_size())
    (true_loss, true_logits), (own_loss, own_logits) = truth, own
    model = built(shape, dtype=dtype, **options)
    off = (model(IDS).double() - true_logits).norm()
    assert off < 2 * (own_logits - true_logits).norm() + 1e-6 * true_logits.norm()
    off = (model(IDS, TARGETS) - true_loss).abs()
    assert off < max(2 * (own_loss - true_loss).abs(), torch.finfo(dtype).eps * true_loss)


def results_alone(shape, dtype, weights=None):
    """Loss and logits of one rank, as float64; of another model's weights where they are given."""
    with posing(0, 1):
        model = built(shape, dtype=dtype)
        if weights is not None:
            model.load_state_dict(weights)
        state = {name: value.double() for name, value in model.state_dict().items()}
        with torch.no_grad():
            return (model(IDS, TARGETS).double(), model(IDS).double()), state


@once(
    shape=[*CONFIGS],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    options=[{"sequence_parallel": True}, {"overlap": False}],
    ranks=[2, 4],
)
def test_every_dtype_is_as_exact_as_on_one_rank(shape, dtype, options, ranks, request):
    own, rounded_weights = results_alone(shape, dtype)
    truth, _ = results_alone(shape, torch.float64, rounded_weights)
    pool = request.getfixturevalue(f"ranks{ranks}")
    pool.run(assert_as_exact, shape, dtype, options, truth, own)


@on_ranks(2)
def test_accumulation_evaluation_and_autocast():
    initialize_model_parallel(torch.distributed.get_world_size())
    model = built("llama", sequence_parallel=True, dtype=torch.float32)
    parameters = list(model.parameters())
    loss = model(IDS, TARGETS)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS, TARGETS), loss)
        assert not model(IDS).requires_grad
    with torch.inference_mode():
        assert torch.equal(model(IDS, TARGETS), loss)
    model.train()
    for row in range(2):  # accumulation, a row at a time
        (model(IDS[row : row + 1], TARGETS[row : row + 1]) / 2).backward()
    torch.testing.assert_close([p.grad for p in parameters], list(gradients), rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(IDS, TARGETS)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, loss, rtol=1e-2, atol=0)
    assert not torch.equal(cast, loss)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(cast, parameters))


@on_ranks(2)
def test_compiles_whole():
    initialize_model_parallel(torch.distributed.get_world_size())
    torch._dynamo.reset()
    torch.manual_seed(4)
    model = GPT(CONFIGS["llama"].with_sizes(num_layers=1), sequence_parallel=True)
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        loss = call(IDS, TARGETS)
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_mistakes_are_told():
    with posing(0, 1):
        model = built("gpt2")
        with pytest.raises(ValueError, match=r"ids: expected \(batch, tokens\), got \(8,\)"):
            model(IDS[0])
        with pytest.raises(ValueError, match=r"targets: expected \(2, 8\) like ids, got \(2, 7\)"):
            model(IDS, TARGETS[:, :7])
        with pytest.raises(ValueError, match="expected at most 8 tokens, as many as positions, got 9"):
            model(torch.zeros(1, 9, dtype=torch.long))
        with pytest.raises(ValueError, match="at least one token to continue from"):
            model.generate(IDS[:, :0], 1)
    with posing(0, 2), pytest.raises(ValueError, match=r"that the 2 tensor-parallel ranks divide, got 7"):
        built("llama", sequence_parallel=True)(IDS[:, :7])
    with pytest.raises(ValueError, match=r"model: expected one of gpt2-small, .* got 'gpt5'"):
        model_config("gpt5")
    with pytest.raises(ValueError, match=r"depth: a model has no such size; it has vocab_size, hidden_size"):
        model_config("gpt2-small", depth=3)
    for sizes, said in (
        ({"num_layers": 0}, "num_layers: expected a whole number of at least 1, got 0"),
        ({"rotary_base": 0}, "rotary_base: expected a number above 0, got 0"),
        ({"rotary_base": "10"}, "rotary_base: expected a number above 0, got '10'"),
        ({"norm_eps": -1e-5}, "norm_eps: expected a number of 0 or more, got -1e-05"),
        ({"norm_eps": None}, "norm_eps: expected a number of 0 or more, got None"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            model_config("llama3-8b", **sizes)


# Of their model cards: base of the rotation, vocabulary, parameters in millions.
PUBLISHED = {
    "gpt2-small": (10_000.0, 50257, 124),
    "gpt2-xl": (10_000.0, 50257, 1558),
    "mistral-7b": (1_000_000.0, 32768, 7248),
    "llama3-8b": (500_000.0, 128256, 8030),
    "llama3-70b": (500_000.0, 128256, 70554),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_numbers(name):
    """Of a model that is built, and of its arithmetic."""
    config = model_config(name)
    planned = parameters_of_stage(Job(model=config, tokens=1, batch=1), RankLayout(1, 1, 1), 0).total
    with posing(0, 1):
        built = sum(parameter.numel() for parameter in GPT(config, device="meta").parameters())
    assert (config.rotary_base, config.vocab_size, round(built / 1e6)) == PUBLISHED[name]
    assert built == planned


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_blocks_end_in_the_norm_that_follows(sequence_parallel):
    """Two of each block, with the bits of norms that are called; not where a hook is between."""
    initialize_model_parallel(2)
    for shape in CONFIGS:
        model = built(shape, dtype=torch.float32, sequence_parallel=sequence_parallel)
        ended, expected = step(model, IDS, TARGETS)
        with patch.object(TransformerBlock, "_norm_behind", return_value=None):
            none, called = step(model, IDS, TARGETS)
        assert (ended, none) == (4, 0)
        assert all(map(torch.equal, expected, called))
        hook = model.blocks[1].register_forward_pre_hook(lambda *_: None)
        assert step(model, IDS, TARGETS)[0] == 2
        hook.remove()
        model.blocks[0].recompute = "full"
        assert step(model, IDS, TARGETS)[0] == 3
