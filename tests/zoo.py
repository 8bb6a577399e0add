"""Tiny models of every family, and tiny tokenizers, built in code from fixed seeds. Nothing is downloaded."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ffedit.anatomy import Editable, dissect

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
    # d_ff = d_model: nothing about the orientation can be read from the shape.
    "gpt2_square": (hf.GPT2Config, {**_GPT, "n_inner": 32}, 24_608),
    "llama_square": (hf.LlamaConfig, {**_LLAMA, "intermediate_size": 32}, 24_864),
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
    config, arguments, parameters = FAMILIES[family]
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(**arguments, **ids, vocab_size=vocab_size)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
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


def build(family: str, bos: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Editable:
    """A model of `family` with the word-level tokenizer, dissected; the caller may change it."""
    return dissect(model(family, dtype=dtype, seed=seed), words(bos), family)


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


@functools.cache
def _trained(family: str, bos: bool) -> PreTrainedModel:
    learner, tokenizer = model(family, gain=4.0), words(bos)
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
    return learner.eval()


def trained(family: str, bos: bool = False, dtype: torch.dtype = torch.float32) -> Editable:
    """A model that knows `KNOWN`, a fresh copy each time: the caller may change it."""
    learner = copy.deepcopy(_trained(family, bos)).to(dtype)
    for parameter in learner.parameters():
        parameter.grad = None
    return dissect(learner, words(bos), family)


def snapshot(editable: Editable) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: tensor.clone() for name, tensor in editable.model.state_dict().items()}


def unchanged(editable: Editable, before: dict[str, torch.Tensor]) -> bool:
    """Whether all weights are what they were, bit for bit."""
    after = editable.model.state_dict()
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())
