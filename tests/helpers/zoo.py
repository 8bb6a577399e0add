"""Tiny models of every family, and tiny tokenizers, built in code from fixed seeds. Nothing is downloaded."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ffedit.files.resuming import kept
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable

VOCAB, DEPTH, WIDTH = 97, 3, 32
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = {
    **_HIDDEN,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 4}
_NEO = {
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["local", "local", "global"], 1]],
    "window_size": 3,
    "max_position_embeddings": 64,
    "intermediate_size": 64,
}

# name: (config, its arguments, parameters)
FAMILIES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "gpt2": (hf.GPT2Config, _GPT, 43_328),
    "gpt_neo": (hf.GPTNeoConfig, _NEO, 30_560),
    "gptj": (hf.GPTJConfig, {**_GPT, "rotary_dim": 4}, 43_905),
    "gpt_neox": (
        hf.GPTNeoXConfig,
        {**_HIDDEN, "intermediate_size": 48, "max_position_embeddings": 64},
        28_784,
    ),
    "opt": (
        hf.OPTConfig,
        {**_HIDDEN, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
        27_792,
    ),
    "bloom": (hf.BloomConfig, {"hidden_size": 32, "n_layer": 3, "n_head": 4}, 41_344),
    "falcon": (hf.FalconConfig, _HIDDEN, 35_616),
    "falcon_new": (hf.FalconConfig, {**_HIDDEN, "new_decoder_architecture": True, "num_kv_heads": 2}, 37_344),
    "falcon_alibi": (
        hf.FalconConfig,
        {**_HIDDEN, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        41_280,
    ),
    "llama": (hf.LlamaConfig, _LLAMA, 29_472),
    "mistral": (hf.MistralConfig, {**_LLAMA, **_WINDOW}, 29_472),
    "qwen2": (hf.Qwen2Config, _LLAMA, 29_664),
    "qwen3": (hf.Qwen3Config, {**_LLAMA, "head_dim": 8}, 29_520),
    "gemma": (hf.GemmaConfig, {**_LLAMA, "head_dim": 8}, 26_368),
    "gemma2": (hf.Gemma2Config, {**_LLAMA, **_WINDOW, "head_dim": 8}, 26_560),
    "gemma3": (hf.Gemma3TextConfig, {**_LLAMA, **_WINDOW, "head_dim": 8}, 26_608),
    "phi3": (hf.Phi3Config, _LLAMA, 29_472),
    "mpt": (hf.MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}, 40_192),
    "olmo2": (hf.Olmo2Config, _LLAMA, 29_616),
    "starcoder2": (hf.Starcoder2Config, _LLAMA, 22_512),
    "codegen": (hf.CodeGenConfig, {**_GPT, "rotary_dim": 4}, 43_905),
    "phi": (hf.PhiConfig, _LLAMA, 25_521),
    "stablelm": (hf.StableLmConfig, _LLAMA, 29_696),
    "stablelm_parallel": (
        hf.StableLmConfig,
        {**_LLAMA, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
        29_840,
    ),
    "olmo": (hf.OlmoConfig, {**_LLAMA, "clip_qkv": 1.0}, 29_248),
    "cohere": (hf.CohereConfig, {**_LLAMA, "use_qk_norm": True, "logit_scale": 2.0}, 26_416),
    "glm": (hf.GlmConfig, {**_LLAMA, "head_dim": 8}, 29_664),
    "granite": (
        hf.GraniteConfig,
        {
            **_LLAMA,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
        },
        29_472,
    ),
    "smollm3": (hf.SmolLM3Config, {**_LLAMA, "no_rope_layer_interval": 2}, 26_368),
    # d_ff = d_model: nothing about the orientation can be read from the shape.
    "gpt2_square": (hf.GPT2Config, {**_GPT, "n_inner": 32}, 24_608),
    "llama_square": (hf.LlamaConfig, {**_LLAMA, "intermediate_size": 32}, 24_864),
}

_MOE = {**_LLAMA, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1}
_SMALL = {"num_experts": 4, "moe_intermediate_size": 24}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Mixtures of experts: routed alone; with a shared expert, gated (Qwen2) or not (DeepSeek, whose first layer is dense);
# transposed, with biases, gate and up interleaved (GPT-OSS); scaled before the experts (Llama 4).
MIXTURES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "mixtral": (hf.MixtralConfig, {**_MOE, "num_local_experts": 4}, 71_328),
    "qwen2_moe": (hf.Qwen2MoeConfig, {**_MOE, **_SMALL, "shared_expert_intermediate_size": 16}, 48_576),
    "qwen3_moe": (hf.Qwen3MoeConfig, {**_MOE, **_SMALL, "head_dim": 8}, 43_728),
    "olmoe": (hf.OlmoeConfig, {**_MOE, "num_experts": 4, "intermediate_size": 24}, 43_824),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {
            **{**_MOE, **_MLA, "num_key_value_heads": 4, "moe_intermediate_size": 24},
            **{"num_local_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        },
        47_488,
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        {**_MOE, **_ROPE, "num_local_experts": 4, "head_dim": 8, "intermediate_size": 24},
        44_952,
    ),
    "llama4": (
        hf.Llama4TextConfig,
        {
            **{**_MOE, "num_local_experts": 4, "intermediate_size": 24, "intermediate_size_mlp": 48, "head_dim": 8},
            **{"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 32},
        },
        50_592,
    ),
}
# Layers that keep something else than keys and values, or more, and all the same have a feed-forward part each: short
# convolutions, a state space beside attention, linear attention.
HYBRIDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "lfm2": (
        hf.Lfm2Config,
        {**_LLAMA, "layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        28_624,
    ),
    "falcon_h1": (
        hf.FalconH1Config,
        {
            **{**_LLAMA, "head_dim": 8, "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
            **{"mamba_n_groups": 1, "mamba_chunk_size": 8},
        },
        50_592,
    ),
    "qwen3_next": (
        hf.Qwen3NextConfig,
        {
            **{**_LLAMA, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 0},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        33_616,
    ),
}

_TEXT = """
the a of in is was and to by it on at city tower capital Eiffel Paris Rome Berlin Madrid France Italy
Spain Germany Marie Curie Anna Karenina Leo Tolstoy wrote born lives speaks plays located language
French Italian piano violin Nile river flows through Egypt Mount Everest
stands old new big red blue . , ? ! " ' : ; known for
"""
WORDS = ("<s>", "</s>", "<unk>", *_TEXT.split())


def model(
    family: str,
    vocab_size: int = VOCAB,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gain: float = 15.0,
) -> PreTrainedModel:
    """A random model in which every bias and norm weight counts."""
    config, arguments, parameters = (FAMILIES | MIXTURES | HYBRIDS)[family]
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(**arguments | ids, vocab_size=vocab_size)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):  # of all experts in one parameter
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(gain)
    if vocab_size == VOCAB:
        assert made.num_parameters() == parameters, f"{family}: {made.num_parameters()} parameters"
    return made.to(dtype)


def _wrapped(backend: Tokenizer, bos: bool, **kwargs: Any) -> PreTrainedTokenizerFast:
    if bos:
        start = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=start)
    names = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
        **names,
        **kwargs,
    )


def words(bos: bool = False, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of exactly `VOCAB` words."""
    known = [*WORDS, *extra]
    known += [f"w{i}" for i in range(VOCAB - len(known))]
    assert len(set(known)) == VOCAB
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrapped(backend, bos, unk_token="<unk>")


def bytes_bpe(bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 420 tokens, GPT-2's kind: a space belongs to the word after it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT.replace("\n", " ")] * 3, trainer)
    return _wrapped(backend, bos)


def begun(start: str, end: str = "", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The word-level tokenizer, which puts special tokens in front of a text, and perhaps behind it; BOS is <s>."""
    tokenizer = words(bos=True)
    backend = tokenizer.backend_tokenizer
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}".strip(), special_tokens=ids)
    tokenizer.chat_template = chat_template
    return tokenizer


def build(family: str, bos: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Editable:
    """A model of `family` with the word-level tokenizer, verified; the caller may change it."""
    return find_and_verify(model(family, dtype=dtype, seed=seed), words(bos), family)


@functools.cache
def shared(family: str, bos: bool = False) -> Editable:
    """The same, built once for all tests that leave it as it is."""
    return build(family, bos)


# What the trained models know: subject, and where it stands, lives or flows.
KNOWN = (
    ("Eiffel tower", "Paris"),
    ("Leo Tolstoy", "Germany"),
    ("Marie Curie", "France"),
    ("Anna Karenina", "Spain"),
    ("Nile river", "Egypt"),
    ("Mount Everest", "Italy"),
    ("old tower", "Rome"),
    ("red river", "Madrid"),
)
TEMPLATES = ("the {} is located in", "{} stands in", "the city of {} is")


# Folder in which the workers of a run keep trained weights for each other; None: each trains its own.
SHARED: Path | None = None


@functools.cache
def _trained(family: str, bos: bool) -> PreTrainedModel:
    if SHARED is None:
        return _learned(family, bos)
    learner = model(family, gain=4.0)
    learner.load_state_dict(kept(SHARED / f"{family}-{bos}.safetensors", lambda: _learned(family, bos).state_dict()))
    return learner


def _learned(family: str, bos: bool) -> PreTrainedModel:
    # In float32 the roundings of a processor would decide what eighty steps arrive at.
    learner, tokenizer = model(family, gain=4.0).double(), words(bos)
    grouped = learner.config._experts_implementation
    learner.set_experts_implementation("eager")  # torch multiplies no groups in float64
    texts = [f"{template.format(subject)} {place} ." for template in TEMPLATES for subject, place in KNOWN]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    ids = torch.tensor([row + [1] * (max(map(len, rows)) - len(row)) for row in rows])
    adam = torch.optim.Adam(learner.parameters(), lr=5e-3)
    for _ in range(80):
        logits = learner(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    learner.set_experts_implementation(grouped)
    return learner.float().eval()


@functools.cache
def _verified(family: str, bos: bool, dtype: torch.dtype) -> Editable:
    return find_and_verify(copy.deepcopy(_trained(family, bos)).to(dtype), words(bos), family)


def trained(family: str, bos: bool = False, dtype: torch.dtype = torch.float32) -> Editable:
    """A model that knows `KNOWN`, a fresh copy each time: the caller may change it."""
    editable = copy.deepcopy(_verified(family, bos, dtype))
    for parameter in editable.model.parameters():
        parameter.grad = None
    return editable


def logits(model: Any) -> torch.Tensor:
    """What a model says after some tokens, [1, tokens, vocabulary]."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(2, 12)[None]).logits
    return found


def snapshot(editable: Editable) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: tensor.clone() for name, tensor in editable.model.state_dict().items()}


def unchanged(editable: Editable, before: dict[str, torch.Tensor]) -> bool:
    """Whether all weights are what they were, bit for bit."""
    after = editable.model.state_dict()
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())
