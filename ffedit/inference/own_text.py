"""Text that a model says by itself: how it begins, what it is drawn from, and where it is kept.

It begins as the model's texts do: with the tokens that its tokenizer puts in front (`Editable.start_tokens`), which
stay in front of each row. Where the tokenizer puts nothing, a first token is needed all the same, and it is

- the first word of a sentence of the neutral text, if the model predicts that text well: part of the row, as any word.
  A line break, not part of the row, stands before it: as first token, an attention sink, the word would tell nothing;
- else the token between documents (BOS or EOS) after which a model was trained to begin. No text begins with it, so it
  is not part of the row. A token that the chat template writes is no such token: a role follows it;
- else any token but a special one.

Rows of text are drawn from the whole distribution. C is then the moment of keys as frequent as in the model's own
text; and drift, the mean of a divergence per token, is by the chain rule the divergence between the edited
model's text and the unedited one's. Text of the likeliest tokens only would leave out names, and count the rest double.

Contexts are a few short texts to put before a prompt. A draw from the tail (a tag, a line of code) would be half of the
text in which a key is read. So they are drawn from the 5 likeliest tokens, as in the published code (kmeng01/rome,
util/generate.py), and begin with a word, as AlphaEdit's do ("The", "Because", "I"), even behind BOS: there, many models
expect a web page or a program.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cache as once
from itertools import chain, cycle, islice

import torch
from torch import Tensor

from ffedit.files import cache
from ffedit.inference.corpus import Corpus
from ffedit.inference.generation import continuations, words
from ffedit.inference.text import SAMPLING, digest, keep_ids, kept_ids, neutral, neutral_text, row_length
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import plain_ids
from ffedit.progress import Progress, silent

SAMPLED_ROWS = 256
# Number of likeliest tokens that contexts are drawn from (kmeng01/rome, util/generate.py).
TOP = 5
# A word with a capital letter at the beginning of a line or sentence.
WORD = re.compile(r"(?:^|(?<=[.!?] )|(?<=\n))(?:[AI]|[A-Z][a-z]+)\b")


def own_text(
    editable: Editable, rows: int, length: int, seed: int, top: int | None = None, kept: bool = True
) -> list[list[int]]:
    """Return ids [rows][length] of text that the model says, drawn with `seed`; each row begins with `start_tokens`.

    They are cached: every edit and evaluation begins with the same rows. While edits are in the weights nothing is
    cached, since the model's text changes with each of them.

    Args:
        editable: the model.
        rows: number of texts.
        length: tokens of each; fewer where the model takes no more.
        seed: seed of the draws.
        top: draw from so many of the likeliest tokens, and begin with a word if the model predicts the neutral text
            well; None: draw from the whole distribution.
        kept: whether to use the cache.
    """
    length = min(length, editable.max_tokens)
    weights = fingerprint(editable)
    if not kept or editable.history.base not in (None, weights):
        return _drawn(editable, rows, length, seed, top)
    key = f"rows-{SAMPLING}-{weights}-{rows}-{length}-{seed}-{top}"
    path = cache.path("texts", digest(key.encode()), ".safetensors")
    ids = kept_ids(path)
    if len(ids) != rows * length:
        ids = list(chain.from_iterable(_drawn(editable, rows, length, seed, top)))
        keep_ids(array("i", ids), path)
    return [ids[i : i + length] for i in range(0, len(ids), length)]


def _drawn(editable: Editable, rows: int, length: int, seed: int, top: int | None) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    prompts, begins = _beginnings(editable, rows, generator, top is not None)
    numbers = torch.rand(rows, length, dtype=torch.float64, generator=generator)
    generated = continuations(editable, prompts, length, numbers, top)
    first = begins - len(editable.start_tokens)
    return [[*prompt, *new][first : first + length] for prompt, new in zip(prompts, generated, strict=True)]


def _beginnings(
    editable: Editable, rows: int, generator: torch.Generator, with_word: bool
) -> tuple[list[list[int]], int]:
    """Return the ids that each of `rows` texts continues, and how many of them stand in front of the text itself."""
    start, tokenizer = editable.start_tokens, editable.tokenizer
    if (with_word or not start) and neutral(editable) is not None:
        drawn = torch.randint(len(first_words()), (rows,), generator=generator).tolist()
        front = start or plain_ids(tokenizer, "\n")
        return [[*front, *plain_ids(tokenizer, first_words()[i])] for i in drawn], len(front)
    if start:
        return [start] * rows, len(start)
    template = str(tokenizer.chat_template or "")
    for separator in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if separator is not None and str(tokenizer.convert_ids_to_tokens(separator)) not in template:
            return [[int(separator)]] * rows, 1
    size, special = editable.vocabulary, set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(size) if i not in special])
    return ordinary[torch.randint(len(ordinary), (rows, 1), generator=generator)].tolist(), 0


@once
def first_words() -> Sequence[str]:
    """Return the first word of each sentence of the neutral text, as often as sentences begin with it."""
    return WORD.findall(neutral_text())


def contexts(editable: Editable, count: int, lengths: Sequence[int], seed: int) -> tuple[str, ...]:
    """Return short texts that the model would say, in one line each, to put before a prompt.

    Args:
        editable: the model.
        count: number of texts; those of blanks alone are left out.
        lengths: tokens of each text, at most, in turn.
        seed: seed of the draws.
    """
    limits = list(islice(cycle(lengths), count))
    before = len(editable.start_tokens)
    rows = own_text(editable, len(limits), before + max(limits, default=1), seed, TOP)
    texts = [words(editable, row[before : before + limit]) for row, limit in zip(rows, limits, strict=True)]
    return tuple(text for text in texts if text)


def sampled(editable: Editable, corpus: Corpus, name: str, progress: Progress = silent) -> Tensor:
    """Return the ids of text that the model says, without start tokens, [tokens], int32.

    Each row of it fills one row of `begin_rows`. The text is cached as `name`, in part if interrupted.
    """
    path, start = cache.path("texts", name, ".safetensors"), len(editable.start_tokens)
    ids, length = array("i", kept_ids(path)), row_length(editable)
    before, rows = len(ids), -(-corpus.tokens // (length - start))
    try:
        for first in range(before // (length - start), rows, SAMPLED_ROWS):
            # Seeds far enough apart that no other seed samples the same rows.
            seed = corpus.seed + 1000 + first // SAMPLED_ROWS * 1_000_003
            texts = own_text(editable, min(SAMPLED_ROWS, rows - first), length, seed, kept=False)
            new = array("i", chain.from_iterable(row[start:] for row in texts))
            ids.extend(new)  # one operation, which an interrupt cannot split
            progress("sampling text", min(len(ids), corpus.tokens), corpus.tokens)
    finally:
        if len(ids) > before:
            keep_ids(ids, path)
    return torch.tensor(ids, dtype=torch.int32)[: corpus.tokens]
