"""Architectures of `transformers` at tiny sizes, and inputs from which each computes a loss.

Sizes leave two ranks something to get wrong: two heads of keys and values for four of queries, a vocabulary
that is not a multiple of the ranks, experts of which a token takes two of four. Dropout is off, and noise is
added to all weights, because zeros and ones hide what is added or multiplied too often.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Sizes = Mapping[str, Any]

VOCABULARY, TOKENS, BATCH = 61, 9, 3
NOISE = 0.02

# Of all architectures; a config takes what it knows of these names.
COMMON: Sizes = {
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "type_vocab_size": 2, "num_labels": 5},
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"], 48),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"], 2),
    **dict.fromkeys(["decoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "rotary_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 32),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_group", "topk_group"], 1),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 24),
    **dict.fromkeys(["expert_ffn_hidden_size", "shared_intermediate_size"], 24),
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"qk_head_dim": 16, "v_head_dim": 8, "first_k_dense_replace": 1},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"image_size": 16, "patch_size": 8},
}
LATENT: Sizes = {"num_key_value_heads": 4}  # keys and values are made from a latent vector, for every head
MAMBA: Sizes = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_dt_rank": 4},
    **{"use_mamba_kernels": False},
}
TEXT_TOWER: Sizes = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 16, "projection_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 60},
}
IMAGE_TOWER: Sizes = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 8, "projection_dim": 32},
}


def architectures(suffix: str, *rows: str | Mapping[str, Sizes]) -> Mapping[str, Sizes]:
    """By class, and after a comma what is special: what differs from COMMON.

    rows: names without the suffix, unless they end in Model or GenerationDecoder; a string's have no special
    """
    found: dict[str, Sizes] = {}
    for row in rows:
        for name, sizes in ({name: {} for name in row.split()} if isinstance(row, str) else row).items():
            cls, comma, special = name.partition(",")
            is_full = cls.endswith(("Model", "GenerationDecoder"))
            found[cls + ("" if is_full else suffix) + comma + special] = sizes
    return found


DECODERS = architectures(
    "ForCausalLM",
    {
        "Llama": {},
        "Llama, tied": {"tie_word_embeddings": True},
        "Llama, biases": {"attention_bias": True, "mlp_bias": True},
        "Llama, one KV head": {"num_key_value_heads": 1},
    },
    "Mistral Ministral Ministral3 Qwen2 Qwen3 Gemma Gemma2 Gemma3 VaultGemma Phi Phi3 Olmo Olmo2 Olmo3 "
    "Cohere Cohere2 Granite GraniteSWA Starcoder2 StableLm",
    {"StableLm, norms of heads": {"qk_layernorm": True}},
    "Persimmon Nemotron SmolLM3 Exaone4 Glm Glm4 Apertus Arcee SeedOss Ernie4_5 HunYuanDenseV1 Helium "
    "BitNet Cwm DiffLlama HyperCLOVAX Jais2 NanoChat",
    {
        "MiniCPM3": LATENT,
        "Youtu": LATENT,
        "GPT2LMHeadModel": {},
        "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
    },
    "GPTJ GPTNeoX",
    {"GPTBigCode": {"multi_query": False}, "GPTBigCode, one KV head": {}},
    "OpenAIGPTLMHeadModel CodeGen OPT Bloom Mpt",
    {"Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2}, "Falcon, one KV head": {}},
    "BioGpt XGLM ModernBertDecoder",
    {"AXK1": LATENT},
    "Bart Beam BertGenerationDecoder BertLMHeadModel Blenderbot",
    {"CTRLLMHeadModel": {"n_positions": 32, "dff": 48}},
    "Emu3 Flint Gemma4Unified GPTNeoXJapanese HrmText Moshi TrOCR",
    {"XLNetLMHeadModel": {"d_inner": 48}},
)
EXPERTS = architectures(
    "ForCausalLM",
    "Mixtral Qwen2Moe Qwen3Moe Phimoe Olmoe FlexOlmo GraniteMoe GraniteMoeShared GptOss",
    {"DeepseekV2": LATENT, "DeepseekV3": LATENT, "Glm4Moe": {}, "Glm4MoeLite": LATENT},
    "Dots1 Ernie4_5_Moe ExaoneMoe HunYuanMoEV1 MiniMaxM2 SolarOpen Afmoe AriaText JetMoe",
    {"LongcatFlash": {**LATENT, "zero_expert_num": 2}},
    "Doge Cohere2Moe",
    {"DeepseekV32": LATENT, "DeepseekV4": {}, "GlmMoeDsa": LATENT},
    "GraniteMoeSWA HYV3 HYV4 Inkling Kolibri1 Laguna Mellum MiMoV2Flash MiniMaxM3VL",
    {
        "Llama4": {"intermediate_size_mlp": 48},
        "Dbrx": {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    },
)
HYBRIDS = architectures(
    "ForCausalLM",
    {
        "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"]},
        "Qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
        "OlmoHybrid": {"layer_types": ["linear_attention", "full_attention"]},
        "MiniMax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        "Lfm2": {"layer_types": ["conv", "full_attention"]},
        "Lfm2Moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "Jamba": {**MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2},
        "Bamba": {**MAMBA, "attn_layer_indices": [1]},
        "GraniteMoeHybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
        "Lfm3": {"layer_types": ["conv", "full_attention"]},
        "NemotronH": {
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
            **{"chunk_size": 8},
            **{"layers_block_type": ["mamba", "attention"], "use_mamba_kernels": False},
        },
    },
    "Mamba FalconMamba",
    {
        "Rwkv": {"attention_hidden_size": 32},
        "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
        "RecurrentGemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    },
)
ENCODERS = architectures(
    "ForMaskedLM",
    "Bert Roberta XLMRoberta Camembert Electra DistilBert Albert Deberta DebertaV2 MPNet ModernBert "
    "EuroBert RoFormer MegatronBert NomicBert Esm BigBird ConvBert Data2VecText Ernie",
    {
        "Esmc": {"num_key_value_heads": 4},
        "FNet": {},
        "Funnel": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48},
    },
    "Gte IBert JinaEmbeddingsV3",
    {
        "Longformer": {"attention_window": 4},
        "MobileBert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
        "Nystromformer": {},
        "RemBert": {"input_embedding_size": 32, "output_embedding_size": 32},
    },
    "RobertaPreLayerNorm SqueezeBert Ultrabert XLMRobertaXL Yoso",
)
ENCODER_DECODERS = architectures(
    "ForConditionalGeneration",
    {"T5": {}, "T5, gated": {"feed_forward_proj": "gated-gelu"}},
    "MT5 UMT5 SwitchTransformers Bart MBart Pegasus MarianMTModel Blenderbot M2M100 BigBirdPegasus "
    "BlenderbotSmall",
    {
        "FSMT": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
        "LED": {"attention_window": 4, "max_encoder_position_embeddings": 32},
    },
    "LongT5 Mvp NllbMoe PegasusX PLBart",
    {
        "ProphetNet": {
            **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
            **dict.fromkeys(["num_encoder_layers", "num_decoder_layers"], 2),
        }
    },
)
SPEECH: Mapping[str, Sizes] = {
    "WhisperForConditionalGeneration": {
        **{"num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16},
        **{"begin_suppress_tokens": None, "suppress_tokens": None},
    },
    "Speech2TextForConditionalGeneration": {
        **{"input_feat_per_channel": 12, "conv_channels": 16, "max_source_positions": 32},
        **{"max_target_positions": 16},
    },
}
IMAGES = architectures(
    "ForImageClassification",
    "ViT DeiT Beit Dinov2 Dinov2WithRegisters Data2VecVision IJepa",
    {
        "Siglip": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
        "Swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 2, "window_size": 4},
        "ViTMSN": {},
        "CLIP": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
    },
)
PAIRS: Mapping[str, Sizes] = {
    "CLIPModel": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 32},
    "SiglipModel": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
    "AltCLIPModel": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 32},
    "BlipModel": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 32},
}
KINDS: Mapping[str, Mapping[str, Sizes]] = {
    "Decoders": DECODERS,
    "Decoders with experts": EXPERTS,
    "Decoders with recurrent layers": HYBRIDS,
    "Encoders": ENCODERS,
    "Encoders with decoders": ENCODER_DECODERS,
    "Speech": SPEECH,
    "Images": IMAGES,
    "Images with texts": PAIRS,
}
ARCHITECTURES: Mapping[str, Sizes] = {name: sizes for kind in KINDS.values() for name, sizes in kind.items()}


def model_of(name: str) -> nn.Module:
    """The unsharded model, the same on all ranks, in float32."""
    cls = getattr(import_module("transformers"), name.partition(",")[0])
    config = config_of(cls.config_class, ARCHITECTURES[name])
    torch.manual_seed(2)
    model: nn.Module = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    return model


def inputs_of(name: str) -> dict[str, Any]:
    """Arguments by name, from which the model computes a loss."""
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 7 % (VOCABULARY - 3) + 3
    if name in IMAGES:
        return {"pixel_values": _features(BATCH, 3, 16, 16), "labels": torch.arange(BATCH)}
    if name in PAIRS:
        return {"pixel_values": _features(BATCH, 3, 16, 16), "input_ids": ids, "return_loss": True}
    if name in SPEECH:
        return {"input_features": _features(BATCH, 8, 12), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def _features(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).cos().view(shape)


def config_of(cls: Any, special: Sizes) -> Any:
    known = set(cls.__dataclass_fields__) | {"num_labels", "decoder_start_token_id"}
    config = cls(**{name: value for name, value in COMMON.items() if name in known} | dict(special))
    for each in (config, *(getattr(config, tower, None) for tower in ("text_config", "vision_config"))):
        for name, value in vars(each).items() if each is not None else ():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(each, name, 0.0)
    return config
