"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import zoo

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    # GPT-2
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
FIRST_DOWN = ("model.layers.0.mlp.down_proj.weight", "transformer.h.0.mlp.c_proj.weight")


def parts(family: str = "llama", **sizes: int) -> tuple[Any, Any]:
    """A tiny Llama or GPT-2, with other `sizes` in its config, and its tokenizer of byte pairs."""
    tokenizer = zoo.bytes_bpe()
    model = zoo.model(family, vocab_size=len(tokenizer))
    if sizes:
        torch.manual_seed(0)
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **sizes})).eval()
    return model, tokenizer


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any,
    architecture: str = "llama",
    left_out: str = "",
    kind: Any = None,
    split: int = 0,
    **entries: Any,
) -> Path:
    """Write a Llama or GPT-2; `entries` are more of its metadata, `kind` the type of its first value matrix.

    The matrix is packed in this type, or holds bytes that claim to be; with `split`, so many tensors stand in a part.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    for name, value in entries.items():
        writer.add_bool(name.replace("__", "."), value) if value in (True, False) else writer.add_uint32(
            name.replace("__", "."), value
        )
    if left_out != "tokenizer":
        _add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        if name == left_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        conv1d = architecture == "gpt2" and weight.ndim == 2 and ".h." in name
        data = weight.T.contiguous().numpy() if conv1d else _permuted(name, weight, config).numpy()
        own = kind if name in FIRST_DOWN else None
        packed = data if own is None or data.dtype == np.uint8 else gguf.quantize(data, own)
        writer.add_tensor(_name(name), packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    path, _, ending = name.rpartition(".")
    if path.startswith(("model.layers.", "transformer.h.")):
        number, _, path = path.split(".", 2)[2].partition(".")
        return f"blk.{number}.{NAMES[path]}.{ending}"
    return f"{NAMES[path]}.{ending}"


def _permuted(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Queries and keys with each head's rotary pairs side by side, as llama.cpp turns them."""
    rotary = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if rotary is None:
        return weight
    heads = getattr(config, rotary)
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    found = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in found["model"]["merges"]])
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)
