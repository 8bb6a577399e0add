"""From characters to tokens, once.

A prompt and its answer are tokenised together, as one text; the subject and the answer are then found by character
offsets. Nothing is tokenised separately and concatenated, so merges, spaces and BOS are right; whether a space stands
between prompt and answer is decided by the text itself.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.errors import FactError
from ffedit.model.chat import turn
from ffedit.model.token_offsets import tokenised

OPENING = "([{<\"'“‘«‹「『（【/\\-–—_"
# Scripts that are written without spaces between words.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "FULLWIDTH", "IDEOGRAPHIC")

# Token at which a fact's key is read, by ROME's parameter names: the subject's last or first token, the prompt's last.
FactToken: TypeAlias = Literal["subject_last", "subject_first", "last"]


@dataclass(frozen=True)
class Encoded:
    """Text in tokens.

    Attributes:
        text: the whole text.
        ids: its token ids, special tokens in front included.
        subject: first token of the subject and the one after its last, or None.
        answer: index of the answer's first token; `len(ids)` where there is no answer.
        fact_token: the token at which the key of its fact is read.
    """

    text: str
    ids: tuple[int, ...]
    answer: int
    subject: tuple[int, int] | None = None
    fact_token: FactToken = "subject_last"

    @property
    def target_ids(self) -> tuple[int, ...]:
        """Token ids of the answer."""
        return self.ids[self.answer :]

    @property
    def subject_last(self) -> int:
        """Position of the subject's last token."""
        assert self.subject is not None
        return self.subject[1] - 1

    @property
    def site(self) -> int:
        """Position where the key is read and a value is written; see `fact_token`."""
        if self.fact_token == "last":
            return self.answer - 1
        assert self.subject is not None
        return self.subject_last if self.fact_token == "subject_last" else self.subject[0]


def joined(prompt: str, answer: str) -> str:
    """Join `prompt` and `answer`, with one space between them where the script uses spaces."""
    left, right = prompt.rstrip(), answer.strip()
    gap = prompt[len(left) :]
    if not left or not right:
        return prompt + right
    if gap:
        return left + gap + right
    if left[-1] in OPENING and not _closes(left):
        return left + right
    if _unspaced(left[-1]) or _unspaced(right[0]):
        return left + right
    return f"{left} {right}"


def _closes(text: str) -> bool:
    """Return True if the mark at the end of `text` closes: a straight quote is even, or follows a letter or digit."""
    last = text[-1]
    if last in "\"'":
        return text.count(last) % 2 == 0 or (last == "'" and text[-2:-1].isalnum())
    return last in ">-–—" and text[-2:-1].isspace()


def _unspaced(character: str) -> bool:
    return unicodedata.name(character, "").startswith(UNSPACED)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    answer: str = "",
    span: tuple[int, int] | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
) -> Encoded:
    """Tokenise `prompt` and `answer` as one text.

    Args:
        tokenizer: any.
        prompt: the text before the answer.
        answer: what follows it; "" for none.
        span: characters (start, end) of the subject in `prompt`.
        max_tokens: longest text that the model takes.
        chat: put both into the tokenizer's chat template: the prompt as the user's turn, the answer as the assistant's.

    Raises:
        FactError: subject or answer give no token or unknown ones, their tokens cannot be told from others, or
            the text is too long.
        ModelError: chat is asked for, and there is no template.
    """
    text, edge = (joined(prompt, answer) if answer else prompt), len(prompt.rstrip())
    if chat:
        asked, text, place = turn(tokenizer, prompt.strip(), answer.strip())
        moved, edge = place - len(prompt) + len(prompt.lstrip()), len(asked)
        span = None if span is None else (span[0] + moved, span[1] + moved)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FactError(f"{text!r} is not valid Unicode text (a lone surrogate)") from error
    # A template writes its special tokens itself.
    ids, offsets = tokenised(tokenizer, text, special=not chat)
    while ids and offsets[-1][0] == offsets[-1][1] and ids[-1] in tokenizer.all_special_ids and len(ids) > 1:
        ids.pop()  # some tokenizers end a text with an EOS
        offsets.pop()
    if not ids:
        raise FactError(f"the prompt {text!r} comes to no token; give some words")
    if max_tokens is not None and len(ids) > max_tokens:
        raise FactError(f"prompt of {len(ids)} tokens, but the model takes {max_tokens}: {text[:40]!r}…; shorten it")
    subject = _tokens_of(offsets, span, text) if span is not None else None
    unknown = tokenizer.unk_token_id
    if subject is not None and span is not None and unknown is not None and unknown in ids[slice(*subject)]:
        name = text[slice(*span)]
        raise FactError(f"the subject {name!r} holds characters that the model's tokenizer does not know")
    start = len(ids)
    if answer:
        start = next((i for i, (a, b) in enumerate(offsets) if b > max(edge, a)), len(ids))
        if start == len(ids):
            raise FactError(f"the answer {answer!r} comes to no token after {prompt!r}; give other words")
        if unknown is not None and unknown in ids[start:]:
            raise FactError(f"the answer {answer!r} holds characters that the model's tokenizer does not know")
        if start == 0:
            raise FactError(f"no token stands before the answer {answer!r} in {text!r}; a longer prompt is needed")
        if subject is not None and subject[1] > start:
            raise FactError(f"the subject and the answer share a token in {text!r}; put a word between them")
    return Encoded(text, tuple(ids), start, subject)


def _tokens_of(offsets: Sequence[tuple[int, int]], span: tuple[int, int], text: str) -> tuple[int, int]:
    """Return the tokens that overlap the characters `span`."""
    inside = [i for i, (a, b) in enumerate(offsets) if a < span[1] and b > span[0] and b > a]
    if not inside:
        raise FactError(f"the subject {text[span[0] : span[1]]!r} comes to no token in {text!r}")
    return inside[0], inside[-1] + 1


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], special: bool = True) -> str:
    """Decode token ids; `special` keeps special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=not special)
    assert isinstance(text, str)
    return text


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Pad token ids on the right with id 0, [n, longest]; no position before the padding can see it."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows])
