"""Configurations of tiny models that see pictures, too: a text decoder of another family beside a vision tower.

The tower is never run here: it is what a checkpoint holds besides, and must keep.
"""

from __future__ import annotations

from typing import Any

import transformers as hf

# Tokens that neither a text of `zoo.words` nor a probe holds.
IMAGE, VIDEO, START, END = 91, 89, 86, 83
_TEXT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1},
}
_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 8},
}
_QWEN = {"depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 8}
_QWEN_3 = {**_QWEN, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16}
_TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_SEEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_LLAMA_4 = {
    **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 32},
    **{"intermediate_size": 24, "intermediate_size_mlp": 48},
}


def _config(cls: Any, text: dict[str, Any], vision: dict[str, Any], **arguments: Any) -> Any:
    """Return a function of the vocabulary's size that makes the configuration."""

    def make(vocab_size: int, **ids: Any) -> Any:
        declared = {**_TEXT, **text, **ids, "vocab_size": vocab_size}
        return cls(text_config=declared, vision_config=vision, **arguments)

    return make


# name: (the configuration, by size of the vocabulary; parameters)
PICTURES: dict[str, tuple[Any, int]] = {
    "gemma3_vision": (
        _config(
            hf.Gemma3Config,
            {"sliding_window": 4},
            {**_TOWER, "vision_use_head": False},
            **{"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4},
        ),
        0,
    ),
    "qwen2_vl": (_config(hf.Qwen2VLConfig, _TURNED, {**_QWEN, "embed_dim": 16}, **_SEEN), 0),
    "qwen2_5_vl": (
        _config(
            hf.Qwen2_5_VLConfig,
            _TURNED,
            {**_QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
            **_SEEN,
        ),
        0,
    ),
    "qwen3_vl": (_config(hf.Qwen3VLConfig, _TURNED, {**_QWEN_3, "deepstack_visual_indexes": [0]}, **_SEEN), 0),
    "qwen3_5": (_config(hf.Qwen3_5Config, _LINEAR, _QWEN_3, **_SEEN), 0),
    "llava": (
        _config(
            hf.LlavaConfig, {"model_type": "llama"}, {**_TOWER, "model_type": "clip_vision_model"}, image_token_id=IMAGE
        ),
        0,
    ),
    "mistral3": (
        _config(
            hf.Mistral3Config,
            {"model_type": "mistral"},
            {**_TOWER, "model_type": "pixtral", "head_dim": 8},
            image_token_id=IMAGE,
        ),
        0,
    ),
    "llama4_vision": (
        _config(
            hf.Llama4Config,
            _LLAMA_4,
            {**_TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
            **{"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
        ),
        0,
    ),
    "smolvlm": (_config(hf.SmolVLMConfig, {"model_type": "llama"}, _TOWER, image_token_id=IMAGE, scale_factor=2), 0),
    "paligemma": (
        _config(
            hf.PaliGemmaConfig,
            {"model_type": "gemma"},
            {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
            **{"image_token_id": IMAGE, "projection_dim": 32, "hidden_size": 32},
        ),
        0,
    ),
    "internvl": (
        _config(
            hf.InternVLConfig,
            {"model_type": "qwen2"},
            {**_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
            image_token_id=IMAGE,
        ),
        0,
    ),
}
