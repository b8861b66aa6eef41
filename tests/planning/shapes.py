"""Small models of both shapes, and others that layers allow."""

from tests.models import small

SIZES = {"vocab_size": 250, "hidden_size": 64, "num_heads": 8}
LLAMA = small.LLAMA.with_sizes(**SIZES, ffn_hidden_size=192)
GPT2 = small.GPT2.with_sizes(**SIZES, max_positions=64)
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "llama_tied_with_biases": LLAMA.with_sizes(tied=True, bias=True, norm="layer_norm"),
    "gpt2_untied_relu": GPT2.with_sizes(tied=False, activation="relu", bias=False, num_kv_heads=4),
}
