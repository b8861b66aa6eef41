"""A small model of each kind, and what to feed it."""

import torch

from tpkernels import GPTConfig

LLAMA = GPTConfig(
    vocab_size=37,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=24,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    tied=False,
)
GPT2 = GPTConfig(vocab_size=37, hidden_size=16, num_layers=2, num_heads=4, max_positions=8)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}
IDS = torch.arange(16).view(2, 8) * 5 % 37
TARGETS = (IDS * 3 + 1) % 37
