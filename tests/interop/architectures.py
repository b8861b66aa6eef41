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

# Class, and after a comma what is special; what differs from COMMON.
DECODERS: Mapping[str, Sizes] = {
    "LlamaForCausalLM": {},
    "LlamaForCausalLM, tied": {"tie_word_embeddings": True},
    "LlamaForCausalLM, biases": {"attention_bias": True, "mlp_bias": True},
    "LlamaForCausalLM, one KV head": {"num_key_value_heads": 1},
    "MistralForCausalLM": {},
    "MinistralForCausalLM": {},
    "Ministral3ForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "VaultGemmaForCausalLM": {},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "GraniteForCausalLM": {},
    "GraniteSWAForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "StableLmForCausalLM": {},
    "StableLmForCausalLM, norms of heads": {"qk_layernorm": True},
    "PersimmonForCausalLM": {},
    "NemotronForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "Exaone4ForCausalLM": {},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "SeedOssForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "HeliumForCausalLM": {},
    "BitNetForCausalLM": {},
    "CwmForCausalLM": {},
    "DiffLlamaForCausalLM": {},
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {},
    "NanoChatForCausalLM": {},
    "MiniCPM3ForCausalLM": LATENT,
    "YoutuForCausalLM": LATENT,
    "GPT2LMHeadModel": {},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GPTJForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "GPTBigCodeForCausalLM": {"multi_query": False},
    "GPTBigCodeForCausalLM, one KV head": {},
    "OpenAIGPTLMHeadModel": {},
    "CodeGenForCausalLM": {},
    "OPTForCausalLM": {},
    "BloomForCausalLM": {},
    "MptForCausalLM": {},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "FalconForCausalLM, one KV head": {},
    "BioGptForCausalLM": {},
    "XGLMForCausalLM": {},
    "ModernBertDecoderForCausalLM": {},
    "AXK1ForCausalLM": LATENT,
    "BartForCausalLM": {},
    "BeamForCausalLM": {},
    "BertGenerationDecoder": {},
    "BertLMHeadModel": {},
    "BlenderbotForCausalLM": {},
    "CTRLLMHeadModel": {"n_positions": 32, "dff": 48},
    "Emu3ForCausalLM": {},
    "FlintForCausalLM": {},
    "Gemma4UnifiedForCausalLM": {},
    "GPTNeoXJapaneseForCausalLM": {},
    "HrmTextForCausalLM": {},
    "MoshiForCausalLM": {},
    "TrOCRForCausalLM": {},
    "XLNetLMHeadModel": {"d_inner": 48},
}
EXPERTS: Mapping[str, Sizes] = {
    "MixtralForCausalLM": {},
    "Qwen2MoeForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "PhimoeForCausalLM": {},
    "OlmoeForCausalLM": {},
    "FlexOlmoForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "GraniteMoeSharedForCausalLM": {},
    "GptOssForCausalLM": {},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "Glm4MoeForCausalLM": {},
    "Glm4MoeLiteForCausalLM": LATENT,
    "Dots1ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {},
    "ExaoneMoeForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {},
    "MiniMaxM2ForCausalLM": {},
    "SolarOpenForCausalLM": {},
    "AfmoeForCausalLM": {},
    "AriaTextForCausalLM": {},
    "JetMoeForCausalLM": {},
    "LongcatFlashForCausalLM": {**LATENT, "zero_expert_num": 2},
    "DogeForCausalLM": {},
    "Cohere2MoeForCausalLM": {},
    "DeepseekV32ForCausalLM": LATENT,
    "DeepseekV4ForCausalLM": {},
    "GlmMoeDsaForCausalLM": LATENT,
    "GraniteMoeSWAForCausalLM": {},
    "HYV3ForCausalLM": {},
    "HYV4ForCausalLM": {},
    "InklingForCausalLM": {},
    "Kolibri1ForCausalLM": {},
    "LagunaForCausalLM": {},
    "MellumForCausalLM": {},
    "MiMoV2FlashForCausalLM": {},
    "MiniMaxM3VLForCausalLM": {},
    "Llama4ForCausalLM": {"intermediate_size_mlp": 48},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
HYBRIDS: Mapping[str, Sizes] = {
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3_5ForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "OlmoHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "MiniMaxForCausalLM": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "JambaForCausalLM": {**MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2},
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "NemotronHForCausalLM": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
        **{"layers_block_type": ["mamba", "attention"], "use_mamba_kernels": False},
    },
    "MambaForCausalLM": {},
    "FalconMambaForCausalLM": {},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"], "lru_width": 32},
}
ENCODERS: Mapping[str, Sizes] = {
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "XLMRobertaForMaskedLM": {},
    "CamembertForMaskedLM": {},
    "ElectraForMaskedLM": {},
    "DistilBertForMaskedLM": {},
    "AlbertForMaskedLM": {},
    "DebertaForMaskedLM": {},
    "DebertaV2ForMaskedLM": {},
    "MPNetForMaskedLM": {},
    "ModernBertForMaskedLM": {},
    "EuroBertForMaskedLM": {},
    "RoFormerForMaskedLM": {},
    "MegatronBertForMaskedLM": {},
    "NomicBertForMaskedLM": {},
    "EsmForMaskedLM": {},
    "BigBirdForMaskedLM": {},
    "ConvBertForMaskedLM": {},
    "Data2VecTextForMaskedLM": {},
    "ErnieForMaskedLM": {},
    "EsmcForMaskedLM": {"num_key_value_heads": 4},
    "FNetForMaskedLM": {},
    "FunnelForMaskedLM": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48},
    "GteForMaskedLM": {},
    "IBertForMaskedLM": {},
    "JinaEmbeddingsV3ForMaskedLM": {},
    "LongformerForMaskedLM": {"attention_window": 4},
    "MobileBertForMaskedLM": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "NystromformerForMaskedLM": {},
    "RemBertForMaskedLM": {"input_embedding_size": 32, "output_embedding_size": 32},
    "RobertaPreLayerNormForMaskedLM": {},
    "SqueezeBertForMaskedLM": {},
    "UltrabertForMaskedLM": {},
    "XLMRobertaXLForMaskedLM": {},
    "YosoForMaskedLM": {},
}
ENCODER_DECODERS: Mapping[str, Sizes] = {
    "T5ForConditionalGeneration": {},
    "T5ForConditionalGeneration, gated": {"feed_forward_proj": "gated-gelu"},
    "MT5ForConditionalGeneration": {},
    "UMT5ForConditionalGeneration": {},
    "SwitchTransformersForConditionalGeneration": {},
    "BartForConditionalGeneration": {},
    "MBartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {},
    "MarianMTModel": {},
    "BlenderbotForConditionalGeneration": {},
    "M2M100ForConditionalGeneration": {},
    "BigBirdPegasusForConditionalGeneration": {},
    "BlenderbotSmallForConditionalGeneration": {},
    "FSMTForConditionalGeneration": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "LEDForConditionalGeneration": {"attention_window": 4, "max_encoder_position_embeddings": 32},
    "LongT5ForConditionalGeneration": {},
    "MvpForConditionalGeneration": {},
    "NllbMoeForConditionalGeneration": {},
    "PegasusXForConditionalGeneration": {},
    "PLBartForConditionalGeneration": {},
    "ProphetNetForConditionalGeneration": {
        **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
        **dict.fromkeys(["num_encoder_layers", "num_decoder_layers"], 2),
    },
}
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
IMAGES: Mapping[str, Sizes] = {
    "ViTForImageClassification": {},
    "DeiTForImageClassification": {},
    "BeitForImageClassification": {},
    "Dinov2ForImageClassification": {},
    "Dinov2WithRegistersForImageClassification": {},
    "Data2VecVisionForImageClassification": {},
    "IJepaForImageClassification": {},
    "SiglipForImageClassification": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
    "SwinForImageClassification": {
        **{"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 2, "window_size": 4},
    },
    "ViTMSNForImageClassification": {},
    "CLIPForImageClassification": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
}
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
    config = _config(cls.config_class, ARCHITECTURES[name])
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


def _config(cls: Any, special: Sizes) -> Any:
    known = set(cls.__dataclass_fields__) | {"num_labels", "decoder_start_token_id"}
    config = cls(**{name: value for name, value in COMMON.items() if name in known} | dict(special))
    for each in (config, *(getattr(config, tower, None) for tower in ("text_config", "vision_config"))):
        for name, value in vars(each).items() if each is not None else ():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(each, name, 0.0)
    return config
