"""Two tokenizers: one for which every word of the table is one token, one that spells names in pieces.

*Words*. Causal tracing asks at which token of a name a fact comes back, so a name should be as few
tokens as it has words. This is a GPT-2 tokenizer (byte-level BPE: any text can be said) whose
vocabulary holds each word of the corpus whole, beside the few merges that spell other words.
A space is put before the text, so that a word is one and the same token at its start.

*Pieces*. What large models do: frequent words are whole, names are several tokens, and every text begins
with a token of its own. This is a SentencePiece tokenizer as Llama's, "▁" for a space, bytes for
characters that it does not know.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


def of_words(texts: Iterable[str], merges: int = 256, context: int = 256) -> PreTrainedTokenizerFast:
    """A tokenizer with every word of `texts` whole, and about `merges` pieces for all other words."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words = sorted({word for text in texts for word, _ in pre.pre_tokenize_str(text)})
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = learn_merges(words, merges)
    tokens = list(dict.fromkeys([END, *pieces, *(a + b for a, b in pairs), *words]))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END),
    )


def of_pieces(texts: Iterable[str], size: int, context: int = 256) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` pieces, learnt from `texts`; a text begins with `<s>`."""
    begin, end, unknown = "<s>", "</s>", "<unk>"
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first")
    learner = Tokenizer(models.BPE(unk_token=unknown))
    # No piece is learnt across a mark, so that a name is the same pieces before any of them.
    learner.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.Punctuation()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[unknown, begin, end, *bytes_], show_progress=False)
    learner.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    # Begun anew, since to the trainer bytes are special, and here they are pieces as all others.
    pieces = models.BPE(learner.get_vocab(), merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(pieces)
    tokenizer.add_special_tokens([unknown, begin, end])
    tokenizer.pre_tokenizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context,
        bos_token=begin,
        eos_token=end,
        unk_token=unknown,
        pad_token=end,
    )


def learn_merges(words: Iterable[str], count: int) -> list[tuple[str, str]]:
    """The `count` most frequent pairs, merged one after the other (Sennrich et al. 2016, algorithm 1)."""
    spelled = [tuple(word) for word in words]
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs = Counter(pair for word in spelled for pair in pairwise(word))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_merged(word, best) for word in spelled]
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)
