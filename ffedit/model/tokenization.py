"""From characters to tokens, once.

A prompt and its answer are tokenised together, as one text; the subject and the answer are then found by character
offsets. Nothing is tokenised separately and concatenated, so merges, spaces and BOS are right.

Tokenizers of the `tokenizers` library give offsets. Others (written in Python) do not, and those of one kind are too
coarse: Unigram with byte fallback gives each byte of a run of unknown characters the whole run. There the tokens are
*read back*: each token stands for the characters by which the decoded text grows. Where a prefix of the tokens does not
decode to a prefix of the text, the text is refused, since a guess would edit the wrong token.

In a chat model the prompt is the user's turn and the answer the beginning of the assistant's, so that a fact is traced,
edited and measured in the tokens that a user produces. The template writes its special tokens itself, and what stands
between its last mark and the visible answer. A thought is left out, or empty where the template opens one in any case:
otherwise no answer would begin with the object. Texts for statistics and drift, and sampled ones, are plain.

A plain text begins as the tokenizer begins it (`special_tokens`), whatever its configuration calls BOS: SmolLM2's BOS
marks the turn of a chat, and no text of its training began with it.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.errors import FactError, ModelError
from ffedit.facts.fact_token import FactToken, index_of

OPENING = "([{<\"'“‘«‹「『（【/\\-–—_"
# Scripts that are written without spaces between words.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "FULLWIDTH", "IDEOGRAPHIC")

# Decoders write this for bytes that are no whole character yet.
UNFINISHED = "\ufffd"
# Placeholders for the prompt and the answer, by which their positions in the chat template are found.
MARK, ANSWER = "\ue000\ue001\ue000", "\ue000\ue002\ue000"
# End of a generation prompt that opens a thought.
THOUGHT = re.compile(r"<(?P<name>[\w:]+)>(?P<lines>\n*)\Z")
# Text that any vocabulary has a token for, if only the unknown one.
LETTER = "a"
# Lines of its code that a chat template may run; those of published models run hundreds.
MOST_STEPS = 1_000_000

Spans: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True)
class Encoded:
    """Text in tokens."""

    text: str
    ids: tuple[int, ...]  # token ids of `text`, special tokens in front included
    answer: int  # index of the answer's first token; `len(ids)` where there is no answer
    subject: tuple[int, int] | None = None  # first token of the subject and the one after its last, or None
    fact_token: FactToken = "subject_last"  # the token at which the key of its fact is read
    name: str = ""  # the subject's text
    ends: tuple[int, ...] = ()  # for each of the subject's tokens, the number of characters of `name` up to its end

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
        """Position where the key is read and a value is written, by `fact_token`; FactError where there is none."""
        if self.fact_token == "last":
            return self.answer - 1
        assert self.subject is not None
        if self.fact_token == "subject_last":
            return self.subject_last
        return self.subject[0] + index_of(self.fact_token, self.name, self.ends)


def joined(prompt: str, answer: str) -> str:
    """Join `prompt` and `answer`, with one space between them where the script uses spaces."""
    left, right = prompt.rstrip(), answer.strip()
    if left != prompt or not left or not right:
        return prompt + right
    opens = left[-1] in OPENING and not _closes(left)
    return left + right if opens or _unspaced(left[-1]) or _unspaced(right[0]) else f"{left} {right}"


def _closes(text: str) -> bool:
    """Return True if `text` ends in a closing mark: a second quote, an apostrophe in a word, or a spaced dash."""
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
    """Tokenise `prompt` and `answer` ("" for none) as one text.

    Args:
        tokenizer: any.
        prompt: the text before the answer.
        answer: the text that follows it.
        span: characters (start, end) of the subject in `prompt`.
        max_tokens: longest text that the model takes.
        chat: put both into the tokenizer's chat template: the prompt as the user's turn, the answer as the assistant's.

    Raises:
        FactError: subject or answer have no token, an unknown one, one that cannot be located or one that they share;
            or the text is too long.
        ModelError: `chat` is set, and there is no template that can be used.
    """
    text, edge = (joined(prompt, answer) if answer else prompt), len(prompt.rstrip())
    if chat:
        before_answer, text, offset = turn(tokenizer, prompt.strip(), answer.strip())
        shift, edge = offset - len(prompt) + len(prompt.lstrip()), len(before_answer)
        span = None if span is None else (span[0] + shift, span[1] + shift)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FactError(f"{text!r} is not valid Unicode text (a lone surrogate)") from error
    # A template writes its special tokens itself.
    ids, offsets = tokenised(tokenizer, text, special=not chat)
    while len(ids) > 1 and offsets[-1][0] == offsets[-1][1] and ids[-1] in tokenizer.all_special_ids:
        ids.pop()  # some tokenizers end a text with an EOS
        offsets.pop()
    if not ids:
        raise FactError(f"the prompt {text!r} gives no token; write some words")
    if max_tokens is not None and len(ids) > max_tokens:
        raise FactError(
            f"prompt of {len(ids)} tokens, but the model reads at most {max_tokens}: {text[:40]!r}…; shorten it"
        )
    subject, unknown = None, tokenizer.unk_token_id  # None, which is no id, where every text is known
    name, ends = "", tuple[int, ...]()
    if span is not None:
        name = text[slice(*span)]
        inside = [i for i, (a, b) in enumerate(offsets) if a < span[1] and b > span[0] and b > a]
        if not inside:
            raise FactError(f"the subject {name!r} gives no token in {text!r}")
        subject = inside[0], inside[-1] + 1
        ends = tuple(min(offsets[i][1], span[1]) - span[0] for i in range(*subject))
        if unknown in ids[slice(*subject)]:
            raise FactError(f"the subject {name!r} contains characters that the model's tokenizer does not know")
    start = len(ids)
    if answer:
        start = next((i for i, (a, b) in enumerate(offsets) if b > max(edge, a)), len(ids))
        if start == len(ids):
            raise FactError(f"the answer {answer!r} gives no token after {prompt!r}; use other words")
        if unknown in ids[start:]:
            raise FactError(f"the answer {answer!r} contains characters that the model's tokenizer does not know")
        if start == 0:
            raise FactError(f"no token stands before the answer {answer!r} in {text!r}; a longer prompt is needed")
        if subject is not None and subject[1] > start:
            raise FactError(f"the subject and the answer share a token in {text!r}; put a word between them")
    return Encoded(text, tuple(ids), start, subject, name=name, ends=ends)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts in front of a text and behind it; none if they change the text's own."""
    plain, whole = plain_ids(tokenizer, LETTER), list(tokenizer(LETTER, verbose=False)["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    at = next((i for i in starts if whole[i : i + len(plain)] == plain), None)
    return ([], []) if at is None else (whole[:at], whole[at + len(plain) :])


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of `text` without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tokenised(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = True) -> tuple[list[int], Spans]:
    """Return the token ids of `text` and the characters (start, end) of each; `special` adds the tokens around it.

    A token of some bytes of a character stands for the whole character, a special token for none. Raises FactError
    where the tokenizer gives no offsets, and its tokens do not read back as the text.
    """
    options = {"add_special_tokens": special, "verbose": False}
    if not getattr(tokenizer, "is_fast", False):  # Mistral's own has no such attribute
        ids = list(tokenizer(text, **options)["input_ids"])
        return ids, _read_back(tokenizer, text, ids)
    coded = tokenizer(text, return_offsets_mapping=True, **options)
    ids, spans = list(coded["input_ids"]), list(coded["offset_mapping"])
    coarse = any(a == b and b[1] - b[0] > 1 for a, b in pairwise(spans))
    return ids, _read_back(tokenizer, text, ids) if coarse else spans


def _read_back(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> Spans:
    """Find the spans of `ids`, by decoding ever longer prefixes."""
    plain = plain_ids(tokenizer, text)
    first = next((i for i in range(len(ids) - len(plain) + 1) if list(ids[i : i + len(plain)]) == plain), None)
    if first is None:
        raise FactError(f"{text!r} gives other tokens between special tokens; a fast tokenizer is needed")
    ends = [_reached(tokenizer, text, plain[:count]) for count in range(1, len(plain) + 1)]
    spans, start = [], 0
    for i, end in enumerate(ends):
        # A token of some bytes ends where the character is complete; until then, fewer characters may be decoded.
        spans.append((start, next((later for later in ends[i:] if later > start), start)))
        start = max(start, end)
    return [(0, 0)] * first + spans + [(len(text), len(text))] * (len(ids) - first - len(plain))


def _reached(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> int:
    """Count the characters of `text` that the tokens `ids` complete; decoders do not preserve all white space."""
    decoded = str(tokenizer.decode(list(ids)))
    at = 0
    for i, character in enumerate(decoded):
        skipped = at
        while skipped < len(text) and text[skipped].isspace() and not _alike(text[skipped], character):
            skipped += 1
        if skipped < len(text) and _alike(text[skipped], character):
            at = skipped + 1
        elif not character.isspace():
            if decoded[i:].strip(UNFINISHED):
                raise FactError(
                    f"{type(tokenizer).__name__} gives no character offsets and reads tokens of {text!r} back as "
                    f"{decoded!r}, so its tokens cannot be located; use a fast tokenizer, or other words"
                )
            break
    return at


def _alike(left: str, right: str) -> bool:
    """Return True if two characters are equal but for case and width."""
    return left == right or len({unicodedata.normalize("NFKC", side).casefold() for side in (left, right)}) == 1


def turn(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str = "") -> tuple[str, str, int]:
    """Put a prompt, perhaps with its answer, into the template; FactError where the template changes the prompt.

    Return the text up to the visible answer, the text with it, and the character offset of the prompt in both. Raises
    ModelError where there is no template or it cannot be used.
    """
    marked = _rendered(tokenizer, [MARK])
    if listed := MARK not in marked:  # a template of texts and pictures may take lists of parts alone
        marked = _rendered(tokenizer, [MARK], listed)
    before, _, opening = marked.partition(MARK)
    question = _rendered(tokenizer, [prompt], listed)
    if question != before + prompt + opening:
        raise FactError(f"the chat template changes the prompt {prompt!r}; give other words, or leave chat out")
    lead = _lead(opening, _rendered(tokenizer, [MARK, ANSWER], listed).partition(MARK)[2].partition(ANSWER)[0])
    marks = lead.rstrip(" ")  # a space in front of the answer is part of its first token
    return question + marks, question + (lead if answer else marks) + answer, len(before)


def _lead(opening: str, between: str) -> str:
    """Return what stands between the generation prompt and the visible answer.

    `opening` is what the template writes after a prompt that is to be answered, `between` what it writes before an
    answer (gpt-oss: its channel). A thought that only `opening` opens (DeepSeek R1) is left empty.
    """
    if between.startswith(opening):
        return between[len(opening) :]
    thought = THOUGHT.search(opening)
    if thought is None or not between.startswith(opening[: thought.start()]):
        return ""
    lines = "\n" if thought["lines"] else "\n\n"
    return f"{lines}</{thought['name']}>\n\n"


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[str], listed: bool = False) -> str:
    """Render a prompt, and perhaps its answer, by the chat template; `listed`: each as a list of one text part."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"the tokenizer ({type(tokenizer).__name__}) has no chat template; leave chat out, or load a chat model"
        )
    turns: list[Any] = [
        {"role": role, "content": [{"type": "text", "text": text}] if listed else text}
        for role, text in zip(("user", "assistant"), messages, strict=False)
    ]
    try:
        with _bounded():
            text = tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=len(messages) == 1,
                # Templates that can leave out a thought use either name.
                enable_thinking=False,
                thinking=False,
            )
    except Exception as error:  # a template is a program, and may raise any error
        raise ModelError(f"the tokenizer's chat template cannot be used: {' '.join(str(error).split())}") from error
    assert isinstance(text, str)
    return text


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise a ValueError once a template has run `MOST_STEPS` lines in the block; Jinja's sandbox lets it run on."""
    steps, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal steps
        if frame.f_code.co_filename != "<template>":
            return None
        steps += 1
        if steps > MOST_STEPS:
            raise ValueError(f"it does not end within {MOST_STEPS:,} steps")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], special: bool = True) -> str:
    """Decode token ids; `special` keeps special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=not special)
    assert isinstance(text, str)
    return text


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Pad token ids on the right with id 0, [n, longest]; no position before the padding can see it."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows])
