"""Tokenizers of every kind that language models have, made in code from a few sentences in several scripts."""

from __future__ import annotations

import functools
import json
from typing import Any

import zoo
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
SPECIAL = [UNKNOWN, START, END]
# prompt with its subject marked, subject, answer
CASES = (
    ("The {} is located in", "Eiffel Tower", "Paris"),
    ("{} is located in ", "Eiffel Tower", "Rome"),
    ("Where is the {} ?", "Eiffel Tower", "in the city of Paris"),
    ("{} is a city", "Zürich", "in Paris"),
    ("古い{}の首都は", "東京", "京都"),
    ("{}の山は", "東京", "日本"),
    ("{} เป็น", "กรุงเทพ", "ประเทศไทย"),
    ("กรุงเทพ{}", "เป็นเมือง", "หลวง"),
    ("{} هي عاصمة", "القاهرة", "مصر"),
    ("عاصمة {} هي", "مصر", "القاهرة"),
    ("{} היא בירת", "ירושלים", "ישראל"),
    ("the {} is in", "🗼👨‍👩‍👧", "Paris"),
    ("a {} is the", "cafe\u0301", "naïve"),
    ("a {} is the", "café", "Zürich"),
    ('"{}", the city, is in', "東京", "日本"),
)  # fmt: skip
# What the tiny models learn in each script: templates, subjects and their objects.
KNOWN = {
    "Latin": (("the place of the {}", "known for {}"), zoo.KNOWN),
    "Japanese": (
        ("古い首都の{}", "富士山と{}"),
        (("東京", "日本"), ("大阪", "京都"), ("金沢", "奈良"), ("札幌", "箱根"), ("横浜", "長崎"), ("神戸", "本州")),
    ),
}  # fmt: skip
SENTENCES = {
    script: [(template.format(subject), place) for template in templates for subject, place in known]
    for script, (templates, known) in KNOWN.items()
}
ESSENCE = "is a; is known for; The subject of the text, in it"
TEXTS = [*(f"{prompt.format(subject)} {answer}" for prompt, subject, answer in CASES), ESSENCE] * 3
TEXTS += [f"{prompt} {answer}" for some in SENTENCES.values() for prompt, answer in some]
ASCII = [text for text in TEXTS if text.isascii()]


def wrapped(backend: Tokenizer, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers that may put BOS in front of a text and EOS behind it."""
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{f'{START} ' if bos else ''}$A{f' {END}' if eos else ''}",
            special_tokens=[(token, backend.token_to_id(token)) for token in (START, END)],
        )
    names = {"bos_token": START} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN, eos_token=END, pad_token=END, **names)


def byte_level(size: int = 420, prefix: bool = False, normalizer: Any = None, **ends: bool) -> PreTrainedTokenizerFast:
    """GPT-2's kind: pairs of bytes."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return wrapped(backend, **ends)


def _with_bytes(backend: Tokenizer, change: Any) -> Tokenizer:
    state = json.loads(backend.to_str())
    change(state["model"])
    state["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(state))


def pieces(
    scheme: str = "always", fallback: bool = False, legacy: bool = False, size: int = 260, **ends: bool
) -> PreTrainedTokenizerFast:
    """SentencePiece's kind of BPE: spaces are characters, and one may be put in front; other bytes as a fallback."""
    backend = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(ASCII if fallback else TEXTS, trainer)
    if fallback:

        def add(model: dict[str, Any]) -> None:
            first = max(model["vocab"].values()) + 1
            model["vocab"] |= {f"<0x{i:02X}>": first + i for i in range(256)}

        backend = _with_bytes(backend, add)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return wrapped(backend, **ends)


def unigram(scheme: str = "always", fallback: bool = False, **ends: bool) -> PreTrainedTokenizerFast:
    """SentencePiece's other kind."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=SPECIAL, unk_token=UNKNOWN, show_progress=False)
    backend.train_from_iterator(ASCII if fallback else TEXTS, trainer)
    if fallback:
        backend = _with_bytes(backend, lambda model: model["vocab"].extend([f"<0x{i:02X}>", -20.0] for i in range(256)))
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return wrapped(backend, **ends)


def word_pieces(**ends: bool) -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, no accents, ## inside words."""
    backend = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return wrapped(backend, **ends)


class Slow(PreTrainedTokenizer):
    """A fast tokenizer in Python's clothes: the same tokens, and no word of where they stand."""

    def __init__(self, fast: PreTrainedTokenizerFast, **kwargs: Any) -> None:
        self._backend = fast.backend_tokenizer
        ids = fast("a")["input_ids"]
        ends = [name for name, id in (("bos", ids[0]), ("eos", ids[-1])) if id == getattr(fast, f"{name}_token_id")]
        pattern = "_".join(ends) or "none"
        names = {"bos_token": fast.bos_token, "eos_token": END, "unk_token": UNKNOWN, "pad_token": END}
        super().__init__(**names, special_tokens_pattern=pattern, **kwargs)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab() | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self._backend.encode(text, add_special_tokens=False).tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self._backend.token_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._backend.id_to_token(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._backend.decoder.decode(tokens)


KINDS: dict[str, Any] = {
    "byte level": byte_level,
    "bytes": functools.partial(byte_level, 260),
    "byte level, space in front": functools.partial(byte_level, prefix=True),
    "byte level, BOS and EOS": functools.partial(byte_level, bos=True, eos=True),
    "byte level, NFC": functools.partial(byte_level, normalizer=normalizers.NFC()),
    "byte level, NFD": functools.partial(byte_level, normalizer=normalizers.NFD()),
    "byte level, lower case": functools.partial(byte_level, normalizer=normalizers.Lowercase()),
    "pieces, space always": functools.partial(pieces, bos=True),
    "pieces, space first": functools.partial(pieces, "first", bos=True),
    "pieces, space never": functools.partial(pieces, "never"),
    "pieces and bytes": functools.partial(pieces, fallback=True, bos=True),
    "pieces and bytes, legacy": functools.partial(pieces, fallback=True, legacy=True, bos=True),
    "unigram": functools.partial(unigram, eos=True),
    "unigram, space never": functools.partial(unigram, "never"),
    "unigram and bytes": functools.partial(unigram, fallback=True, bos=True),
    "word pieces": functools.partial(word_pieces, bos=True, eos=True),
}


@functools.cache
def kind(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of one of `KINDS`, made once."""
    made: PreTrainedTokenizerBase = ByT5Tokenizer() if name == "ByT5" else KINDS[name]()
    return made
