"""Tiny encoders and encoder–decoders, built in code from fixed seeds. Nothing is downloaded."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import torch
import transformers as hf
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel
from zoo import VOCAB, WORDS, words

from ffedit import load_stacks
from ffedit.model.editable import Stack

_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

# name: (model, config, its arguments, parameters)
ENCODERS: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "bert": (hf.BertForMaskedLM, hf.BertConfig, _BERT, 21_505),
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig, {**_BERT, "max_position_embeddings": 66}, 21_569),
    "distilbert": (
        hf.DistilBertForMaskedLM,
        hf.DistilBertConfig,
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
        21_441,
    ),
    "electra": (hf.ElectraForMaskedLM, hf.ElectraConfig, {**_BERT, "embedding_size": 32}, 21_505),
    "modernbert": (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig,
        {**_BERT, **_IDS, "cls_token_id": 0, "sep_token_id": 2},
        21_825,
    ),
}
PAIRS: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, _T5, 40_608),
    "t5_gated": (
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        46_752,
    ),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, {**_BART, **_IDS}, 56_280),
    "marian": (hf.MarianMTModel, hf.MarianConfig, {**_BART, **_IDS}, 56_024),
    "mbart": (hf.MBartForConditionalGeneration, hf.MBartConfig, {**_BART, **_IDS}, 56_408),
}


def model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model in which every bias and norm weight counts. T5 keeps the size it begins with, unlike the others'
    0.02: its attention divides by nothing, and larger weights would multiply float32's rounding a thousandfold."""
    kind, config, arguments, parameters = {**ENCODERS, **PAIRS}[family]
    torch.manual_seed(seed)
    made: PreTrainedModel = kind(config(**arguments, vocab_size=VOCAB)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(1.0 if config is hf.T5Config else 8.0)
        if hasattr(made, "final_logits_bias"):
            made.final_logits_bias.copy_(torch.randn_like(made.final_logits_bias))
    assert made.num_parameters() == parameters, f"{family}: {made.num_parameters()} parameters"
    return made


@functools.cache
def tokenizer() -> Any:
    """One that puts something around every text."""
    made = words()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made._tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return made


@functools.cache
def stack_of(family: str, half: str) -> Stack:
    found = load_stacks((model(family), tokenizer()))
    return next(stack for stack in found if stack.kind == half)


def texts(count: int = 60) -> list[str]:
    rng = Random(0)
    return [" ".join(["the", *rng.choices(WORDS[3:40], k=rng.randint(1, 9))]) for _ in range(count)]
