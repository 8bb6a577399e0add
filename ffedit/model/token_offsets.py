"""The characters that each token stands for.

Tokenizers of the `tokenizers` library give offsets. Others (written in Python) do not, and one kind is too coarse:
Unigram with byte fallback gives a whole run of unknown characters to each of its bytes. There the tokens are *read
back*: each token stands for the characters by which the decoded text grows. That is exact, or it fails, since every
prefix must decode to a prefix of the text; then it is refused, since a guess would edit the wrong token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from ffedit.errors import FactError

Spans: TypeAlias = list[tuple[int, int]]
# Decoders write this for bytes that are no whole character yet.
UNFINISHED = "\ufffd"


def tokenised(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = True) -> tuple[list[int], Spans]:
    """Return the token ids of `text` and the characters (start, end) of each; special tokens around it have none.

    A token of some bytes of a character stands for the whole character.

    Args:
        tokenizer: any.
        text: the text to be tokenised.
        special: with the special tokens that the tokenizer puts around a text.

    Raises:
        FactError: the tokenizer gives no offsets, and its tokens do not read back as the text.
    """
    options = {"add_special_tokens": special, "verbose": False}
    if not tokenizer.is_fast:
        ids = list(tokenizer(text, **options)["input_ids"])
        return ids, _read_back(tokenizer, text, ids)
    coded = tokenizer(text, return_offsets_mapping=True, **options)
    ids, spans = list(coded["input_ids"]), list(coded["offset_mapping"])
    coarse = any(a == b and b[1] - b[0] > 1 for a, b in pairwise(spans))
    return ids, _read_back(tokenizer, text, ids) if coarse else spans


def _read_back(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> Spans:
    """Find the spans of `ids`, by decoding ever longer prefixes."""
    own = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    first = next((i for i in range(len(ids) - len(own) + 1) if list(ids[i : i + len(own)]) == own), None)
    if first is None:
        raise FactError(f"{text!r} falls into other tokens between special ones; a fast tokenizer is needed")
    ends = [_reached(tokenizer, text, own[:count]) for count in range(1, len(own) + 1)]
    spans, start = [], 0
    for i, end in enumerate(ends):
        # A token of some bytes belongs to those that complete the character; until then, fewer may be decoded.
        spans.append((start, next((later for later in ends[i:] if later > start), start)))
        start = max(start, end)
    return [(0, 0)] * first + spans + [(len(text), len(text))] * (len(ids) - first - len(own))


def _reached(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> int:
    """Count the characters of `text` that the tokens `ids` complete; decoders do not preserve all white space."""
    said = str(tokenizer.decode(list(ids)))
    at = 0
    for i, character in enumerate(said):
        skipped = at
        while skipped < len(text) and text[skipped].isspace() and not _alike(text[skipped], character):
            skipped += 1
        if skipped < len(text) and _alike(text[skipped], character):
            at = skipped + 1
        elif not character.isspace():
            if said[i:].strip(UNFINISHED):
                raise FactError(
                    f"{type(tokenizer).__name__} gives no character offsets and reads tokens of {text!r} back as "
                    f"{said!r}, so that its tokens cannot be told apart; use a fast tokenizer, or other words"
                )
            break
    return at


def _alike(one: str, other: str) -> bool:
    """Return True if two characters are equal but for case and width."""
    return one == other or _plain(one) == _plain(other)


def _plain(character: str) -> str:
    return unicodedata.normalize("NFKC", character).casefold()
