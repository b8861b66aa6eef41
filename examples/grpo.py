"""GRPO of a tiny Llama over tensor-parallel ranks, and the same on one rank: no rank ever holds all logits.

torchrun --standalone --nproc-per-node 2 examples/grpo.py

A policy draws several completions of each prompt, and learns to do more of what the better half did. Its
reward, in place of a judge: the share of even ids. A frozen copy of it holds it back (a KL penalty).
"""

import copy
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels
from tpkernels import linear_logprobs
from tpkernels.models.config import GPTConfig
from tpkernels.models.gpt import GPT

CONFIG = GPTConfig(
    vocab_size=50,  # which two ranks hold 25 of each, and more ranks with padding
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    tied=False,
)
PROMPTS, GROUP = 4, 8  # completions of each prompt
PROMPT, COMPLETION = 3, 6  # ids
STEPS, UPDATES = 10, 2  # of the policy with each batch
TEMPERATURE, CLIP, KL, ENTROPY = 0.9, 0.2, 0.02, 1e-3


def logprobs_of(model: GPT, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of completions: (tokens, sequences), 0 at prompts."""
    targets = ids[:, 1:].t().contiguous()
    targets[: PROMPT - 1] = -100  # not computed: prompts were given
    assert model.head is not None
    logprobs, entropy = linear_logprobs(
        model.hidden(ids[:, :-1]),
        model.head.weight,
        targets,
        temperature=TEMPERATURE,  # that of `generate`: else the policy learns of draws that it did not make
        return_entropy=True,
        vocab_size=CONFIG.vocab_size,
        sequence_parallel=model.sequence_parallel,
    )
    assert entropy is not None
    return logprobs, entropy


def loss_of(now: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, entropy: Tensor) -> Tensor:
    """GRPO's loss: the clipped ratio, and Schulman's estimate of KL(policy || reference)."""
    ratio = (now - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    apart = (reference - now).exp() - (reference - now) - 1
    return (KL * apart - gain - ENTROPY * entropy).sum() / (PROMPTS * GROUP * COMPLETION)


def train(ranks: int) -> Iterator[tuple[float, float]]:
    """Yield the mean reward of each batch, and the loss after its updates. ranks: that share each layer"""
    tpkernels.initialize_model_parallel(ranks)
    tpkernels.manual_seed(1234)
    policy = GPT(CONFIG, sequence_parallel=ranks > 1)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    prompts = torch.randint(CONFIG.vocab_size, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    prompts, drawing = prompts.repeat_interleave(GROUP, 0), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = policy.generate(prompts, COMPLETION, temperature=TEMPERATURE, generator=drawing)
        reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
        spread = reward.std(1, keepdim=True) + 1e-4
        advantage = ((reward - reward.mean(1, keepdim=True)) / spread).flatten()
        with torch.no_grad():
            old, _ = logprobs_of(policy, ids)
        kept, _ = logprobs_of(reference, ids)  # frozen: nothing is saved
        for _ in range(UPDATES):
            now, entropy = logprobs_of(policy, ids)
            loss = loss_of(now, old, kept, advantage, entropy)
            optimizer.zero_grad()
            loss.backward()
            tpkernels.finalize_gradients(policy)  # norms' weights, which saw a part of the tokens each
            optimizer.step()
        yield reward.mean().item(), loss.item()
    tpkernels.destroy_model_parallel()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    over_ranks, alone = list(train(world)), list(train(1))  # each rank trains an unsharded copy of its own
    for step, ((reward, loss), (_, unsharded)) in enumerate(zip(over_ranks, alone, strict=True)):
        if abs(loss - unsharded) > 1e-4:
            raise RuntimeError(f"step {step}: loss {loss} over {world} ranks, {unsharded} on one")
        if dist.get_rank() == 0:
            print(f"step {step}: reward {reward:.3f}, loss {loss:+.5f}, unsharded {unsharded:+.5f}")
    first, last = over_ranks[0][0], over_ranks[-1][0]
    if last < first + 0.2:
        raise RuntimeError(f"the reward did not rise: {first:.3f}, then {last:.3f}")
    if dist.get_rank() == 0:
        print(f"rewards rose from {first:.3f} to {last:.3f}, on {world} ranks as on one")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 2 examples/grpo.py")
    main()
