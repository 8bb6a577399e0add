"""The shapes an Atlas can have: each a few lines of numbers for an architecture that transformers knows.

None of them says that a layer sees only what is near: training hides the rest (see `recipe.regularised`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from atlas.recipe import Recipe


def llama(recipe: Recipe, ids: Mapping[str, Any]) -> PreTrainedConfig:
    """RMSNorm, rotary positions, SwiGLU, heads that share keys and values."""
    return LlamaConfig(**ids, **_rotary(recipe))


def mixtral(recipe: Recipe, ids: Mapping[str, Any]) -> PreTrainedConfig:
    """The same with sparse experts, each of them a SwiGLU of `memory` memories."""
    return MixtralConfig(**ids, **_rotary(recipe), num_local_experts=recipe.experts, num_experts_per_tok=recipe.chosen)


def _rotary(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe.width,
        "intermediate_size": recipe.memory,
        "num_hidden_layers": recipe.local + recipe.whole,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.groups,
        "head_dim": recipe.head,
        "max_position_embeddings": recipe.context,
        "initializer_range": recipe.scale,
        "tie_word_embeddings": True,
    }


def gpt2(recipe: Recipe, ids: Mapping[str, Any]) -> PreTrainedConfig:
    """LayerNorm, learned positions, biases, GELU."""
    return GPT2Config(
        **ids,
        n_embd=recipe.width,
        n_inner=recipe.memory,
        n_layer=recipe.local + recipe.whole,
        n_head=recipe.heads,
        n_positions=recipe.context,
        initializer_range=recipe.scale,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def gpt_neo(recipe: Recipe, ids: Mapping[str, Any]) -> PreTrainedConfig:
    """The same with attention that is not scaled, and every second layer sees the last `window` tokens only."""
    layers = recipe.local + recipe.whole
    return GPTNeoConfig(
        **ids,
        hidden_size=recipe.width,
        intermediate_size=recipe.memory,
        num_layers=layers,
        attention_types=[[["global", "local"], layers // 2]],
        window_size=recipe.window,
        num_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.scale,
    )


def gpt_neox(recipe: Recipe, ids: Mapping[str, Any]) -> PreTrainedConfig:
    """Attention and feed-forward layer side by side, both on the same residual stream; embeddings of its own."""
    return GPTNeoXConfig(
        **ids,
        hidden_size=recipe.width,
        intermediate_size=recipe.memory,
        num_hidden_layers=recipe.local + recipe.whole,
        num_attention_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.scale,
        use_parallel_residual=True,
    )


SHAPES: Mapping[str, Callable[[Recipe, Mapping[str, Any]], PreTrainedConfig]] = {
    "llama": llama,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
}


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A fresh model, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in special}}
    config = SHAPES[recipe.shape](recipe, ids)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attention or None)
    for embedding in model.modules():
        if isinstance(embedding, nn.Embedding):
            nn.init.normal_(embedding.weight, std=recipe.scale)
    return model
