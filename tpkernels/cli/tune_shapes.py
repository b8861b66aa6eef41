"""What `tune --shapes` names: layers by their sizes, and models whose layers are split over ranks.

    8192x4096x4096                        a layer: tokens x out_features x in_features
    model:llama3-8b,tp:8,tokens:4096      the layers of a model on one of 8 tensor-parallel ranks

Items are separated by commas; `tp:` and `tokens:` are of the model before them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpkernels.models.config import MODELS, GPTConfig

TOKENS = 8192  # of all sequences that a rank computes at once


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> GPTConfig:
    """Return a Qwen of these sizes; that queries, keys and values have biases is BIASED_QKV's matter."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads}
    return MODELS["llama3-8b"].with_sizes(vocab_size=152064, ffn_hidden_size=ffn, norm_eps=1e-6, **sizes)


BIASED_QKV = {"qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944), "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648)}
TUNED = {**MODELS, **BIASED_QKV}


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model whose layers are split over tensor-parallel ranks."""

    name: str
    tensor: int = 1
    tokens: int = TOKENS

    def __str__(self) -> str:
        return f"{self.name} on {self.tensor} tensor-parallel ranks, {self.tokens} tokens at once"


def parsed_shapes(text: str) -> list[tuple[int, int, int] | SplitModel]:
    """Return the layers and models that `--shapes` names, in order."""
    found: list[tuple[int, int, int] | SplitModel] = []
    given: set[str] = set()
    for item in text.split(","):
        word, colon, value = item.partition(":")
        if not colon:
            found.append(_sizes(item))
        elif word == "model":
            if value not in TUNED:
                raise ValueError(f"--shapes: expected model: of {', '.join(TUNED)}; got {value!r}")
            found.append(SplitModel(value))
            given = set()
        elif word in ("tp", "tokens"):
            model = found[-1] if found else None
            if not isinstance(model, SplitModel) or word in given:
                raise ValueError(
                    f"--shapes: expected one {word}: after each model:NAME, such as "
                    f"model:llama3-8b,tp:8,tokens:4096; got {text!r}"
                )
            given.add(word)
            number = _positive(item, value)
            found[-1] = replace(model, tensor=number) if word == "tp" else replace(model, tokens=number)
        else:
            raise ValueError(f"--shapes: expected TxNxK, model:, tp: or tokens:, got {item!r}")
    return found


def _sizes(text: str) -> tuple[int, int, int]:
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"expected --shapes such as 8192x4096x4096 or model:llama3-8b,tp:8, got {text!r}")
    tokens, out_features, in_features = map(int, words)
    return tokens, out_features, in_features


def _positive(item: str, value: str) -> int:
    if not (value.isdecimal() and int(value) > 0):
        raise ValueError(f"--shapes: expected a number of at least 1 in {item!r}")
    return int(value)
