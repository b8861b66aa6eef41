"""Small models of both shapes, and others that layers allow."""

from tpkernels import GPTConfig

LLAMA = GPTConfig(
    vocab_size=250,
    hidden_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    ffn_hidden_size=192,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    tied=False,
)
GPT2 = GPTConfig(vocab_size=250, hidden_size=64, num_layers=2, num_heads=8, max_positions=64)
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "llama_tied_with_biases": LLAMA.with_sizes(tied=True, bias=True, norm="layer_norm"),
    "gpt2_untied_relu": GPT2.with_sizes(tied=False, activation="relu", bias=False, num_kv_heads=4),
}
