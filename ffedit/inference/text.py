"""Sources of text, for key statistics and for inspecting memories: ffedit's own, a file, a dataset of the hub.

Where none is named, key statistics use the English text that comes with ffedit (`neutral`) if the model predicts it
well, and else text sampled from the model (`own_text.sampled`); "sampled" asks for the latter. Statistics run a text up
to the edited layer only, while sampling runs the whole model once for each token: on a real model that is nearly all of
the cost. But sampling works for any model and language, contains what the model tends to say, and does not depend on
the edited facts.

A file or dataset is read piece by piece until there are enough tokens, never whole. A text is kept as its own
tokens, without special ones: rows are cut from the stream wherever they end, and each begins as the model's texts do
(`begin_rows`). A text that is shorter than asked for is used as it is.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
from array import array
from collections.abc import Iterator
from functools import cache as once, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffedit.errors import EditError, brief
from ffedit.files import cache
from ffedit.files.resuming import load_state, save_state
from ffedit.inference import replay
from ffedit.inference.corpus import Corpus
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import decode, plain_ids
from ffedit.progress import Progress, silent

# Long enough for local statistics, short enough for any memory, whatever the model's maximum position is.
ROW_TOKENS = 64
# Version of the sampling (`own_text`): cached text of another version is ignored.
SAMPLING = 3
# Text is tokenised in pieces of about this many characters, and no longer line than this is held in memory.
PIECE = 2**15
# Tokens that identify a text by its beginning, whatever its length.
BEGINNING = 256
# The English text that comes with ffedit was sampled once, by `evaluations/scripts/make_neutral_text.py`, from
# SmolLM2-135M-Instruct (Apache 2.0), on many subjects and in many forms: it has no author, and its statements are not
# reliable. It was not chosen with regard to any edit.
NEUTRAL = Path(__file__).with_name("neutral.txt.gz")
NEUTRAL_NAME = "the neutral text that ships with ffedit"
# It is used for a model that predicts its first READ_TOKENS tokens at no more than SPOKEN nats per character: not for
# one of another language, of a closed vocabulary or of an artificial world.
SPOKEN = 1.0
READ_TOKENS = 128


def row_length(editable: Editable) -> int:
    """Return the number of tokens of a row."""
    return min(ROW_TOKENS, editable.max_tokens)


def begin_rows(editable: Editable, ids: Tensor) -> Tensor:
    """Cut a text into rows that begin with `start_tokens`, and return as many tokens of them as `ids` has, [n].

    Rows have `row_length` tokens; the last may be shorter. Tokens displaced from the end by start tokens are lost.
    """
    start = ids.new_tensor(editable.start_tokens)
    rows = [torch.cat([start, text]) for text in ids.split(row_length(editable) - len(start))]
    return torch.cat(rows)[: len(ids)]


@once
def neutral_text() -> str:
    """Return the whole text that comes with ffedit."""
    return gzip.decompress(NEUTRAL.read_bytes()).decode()


def neutral(editable: Editable) -> Tensor | None:
    """Return the text's ids, [tokens], int32, cached where possible; None where the model predicts the text badly."""
    key = f"{hashlib.sha256(NEUTRAL.read_bytes()).hexdigest()}-{SPOKEN}-{fingerprint(editable)}"
    path = cache.path("texts", digest(key.encode()), ".safetensors")
    ids = kept_ids(path)
    if not ids:
        if not nats_per_character(editable, neutral_text()) <= SPOKEN:
            return None
        ids = plain_ids(editable.tokenizer, neutral_text())
        keep_ids(array("i", ids), path)
    return _tensor(array("i", ids))


@torch.no_grad()
def nats_per_character(editable: Editable, text: str) -> float:
    """Return the model's nats per character on the beginning of `text`; infinite for unknown tokens.

    The text's first token counts where something stands before it (`start_tokens`).
    """
    start = editable.start_tokens
    ids = [*start, *plain_ids(editable.tokenizer, text[: 8 * READ_TOKENS])][: min(READ_TOKENS, editable.max_tokens)]
    first = max(1, len(start))
    scored = decode(editable.tokenizer, ids[first:], special=False)
    if editable.tokenizer.unk_token_id in ids or not scored.strip():
        return float("inf")
    reads = torch.tensor([(0, at) for at in range(first - 1, len(ids) - 1)])
    logits = replay.forward(editable, torch.tensor([ids]), reads)
    scores = logits.float().log_softmax(-1).gather(-1, torch.tensor(ids[first:], device=logits.device)[:, None])
    return -float(scores.sum()) / len(scored)


def keep_ids(ids: array[int], path: Path) -> None:
    """Cache the ids of a text."""
    cache.write(path, partial(save_state, tensors={"ids": _tensor(ids)}, values=None))


def kept_ids(path: Path) -> list[int]:
    """Return the ids of a text that was cached before, possibly in part; empty if the file is missing or damaged."""
    try:
        ids: list[int] = load_state(path, "holds no text")[0]["ids"].tolist()
    except (EditError, KeyError):  # damaged: sampled anew, and replaced
        return []
    return ids


def texts(corpus: Corpus) -> tuple[Iterator[str], bool]:
    """Return the texts that `corpus` names, in order, and whether each is a separate document or a piece of one.

    Raises EditError, here or while they are read, where there is no such text or the hub does not answer.
    """
    corpus.check()
    assert corpus.path is not None
    path = Path(corpus.path)
    if not path.is_file():
        return _records(str(path), _dataset(str(corpus.path))), True
    if path.suffix in (".jsonl", ".json"):
        return _records(str(path), _json(path)), True
    return _pieces(path), False


def corpus_ids(editable: Editable, corpus: Corpus, progress: Progress = silent) -> Tensor:
    """Return the first ids of the text that `corpus` names, [tokens or fewer], int32; EditError as in `texts`."""
    ids = array("i")
    for text in texts(corpus)[0]:
        ids.extend(plain_ids(editable.tokenizer, text))
        progress("reading text", min(len(ids), corpus.tokens), corpus.tokens)
        if len(ids) >= corpus.tokens:
            break
    if not ids:
        raise EditError(f"{corpus.path}: holds no text to collect key statistics from")
    return _tensor(ids)[: corpus.tokens]


def identity(editable: Editable, corpus: Corpus, ids: Tensor | None = None) -> tuple[str, str]:
    """Return the identifiers of the text of `corpus` and of its beginning: texts that begin alike share tokens.

    A text with `ids` is identified by them; a sampled one, without, by all that the sampling depends on.
    """
    if ids is None:
        beginning = f"sampled-{SAMPLING}-{fingerprint(editable)}-{corpus.seed}"
        return digest(f"{beginning}-{corpus.tokens}".encode()), digest(beginning.encode())
    return digest(ids.numpy().tobytes()), digest(ids[:BEGINNING].numpy().tobytes())


def digest(content: bytes) -> str:
    """Return 16 hexadecimal digits that identify `content`."""
    return hashlib.sha256(content).hexdigest()[:16]


def _tensor(ids: array[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def _pieces(path: Path) -> Iterator[str]:
    """Yield a text file in pieces of whole lines."""
    piece = ""
    for line in _lines(path, PIECE):
        piece += line
        if len(piece) >= PIECE:
            yield piece
            piece = ""
    if piece:
        yield piece


def _lines(path: Path, most: int = -1) -> Iterator[str]:
    """Yield the lines of a UTF-8 file; those of more than `most` bytes in parts. Raises EditError for anything else."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(most):
                if b"\0" in line:
                    raise EditError(f"{path}: byte {offset + line.index(0)} is NUL: not text; UTF-8 text was expected")
                cut = len(decoder.getstate()[0])  # bytes of a character that was cut at the end of the last part
                try:
                    text = decoder.decode(line)
                except UnicodeDecodeError as error:
                    raise EditError(
                        f"{path}: byte {offset - cut + error.start} is not UTF-8 ({error.reason}); save it as UTF-8"
                    ) from error
                yield (text if offset else text.removeprefix("\ufeff")).replace("\r\n", "\n")
                offset += len(line)
        if cut := len(decoder.getstate()[0]):
            raise EditError(f"{path}: byte {offset - cut} is not UTF-8 (the file ends within a character)")
    except OSError as error:
        raise EditError(f"{path}: cannot be read ({error.strerror})") from error


def _json(path: Path) -> Iterator[Any]:
    """Yield the records of a file of JSON lines, or of one list."""
    lines = enumerate(_lines(path), 1)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            if path.suffix == ".json" and line.lstrip().startswith("["):
                yield from json.loads(line + "".join(rest for _, rest in lines))
            else:
                yield json.loads(line)
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits, thousands of brackets
            raise EditError(
                f"{path}: line {number} is not JSON ({brief(error)}); one record a line was expected, or one list"
            ) from error


def _dataset(name: str) -> Iterator[Any]:
    """Yield the records of a dataset of the hub, streamed."""
    import datasets

    source, configuration, split = [*name.split(":"), None, None][:3]
    try:
        yield from datasets.load_dataset(source, configuration, split=split or "train", streaming=True)
    except Exception as error:  # errors of the hub, the network and a dataset's format have no common class
        raise EditError(f"{name}: the dataset cannot be read ({brief(error)}); a text file needs no network") from error


def _records(name: str, records: Iterator[Any]) -> Iterator[str]:
    """Yield the text of each record: the record itself, its field "text", or its only field that is a string."""
    for number, record in enumerate(records, 1):
        fields = record if isinstance(record, dict) else {"text": record}
        strings = [value for value in fields.values() if isinstance(value, str)]
        text = fields.get("text", strings[0] if len(strings) == 1 else None)
        if not isinstance(text, str):
            names = ", ".join(map(str, fields)) if isinstance(record, dict) else type(record).__name__
            raise EditError(f'{name}: record {number} has no field "text"; found: {names}; rename the one to read')
        yield text
