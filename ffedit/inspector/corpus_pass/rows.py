"""The text of a pass, as rows of token ids on disk, which the flat indices of triggers refer to.

For a causal decoder a row holds n + 1 ids, of which the model runs the first n, so that every position has a next
token. A longer text is cut into rows that share the token at the cut, which is run once. A document of a corpus of
documents begins a row of its own, as the sentences of Geva et al. do (arXiv 2012.14913, section 3.1). For other stacks
(see `reading`) each row is a text of its own, with the special tokens that the tokenizer puts around one.

Rows are stored in shards of `CHUNK` rows. A reader holds one or two shards at a time: memory does not depend on the
length of the text. The *flat index* of a position, in variables called `places`, is one number for a row and a position
in it: row · `WIDTH` + position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ffedit.errors import EditError
from ffedit.files.atomic import write_file
from ffedit.inference.text import ROW_TOKENS, Corpus, identity, sampled, texts
from ffedit.inspector.corpus_pass.reading import CAUSAL, Context, Reading
from ffedit.model.editable import Editable, Stack
from ffedit.progress import Progress, silent

Row = tuple[int, ...]

CHUNK = 512
WIDTH = ROW_TOKENS
NOTHING = -1


def rows_of(stack: Stack, corpus: Corpus, progress: Progress = silent) -> Iterator[Row]:
    """Yield the rows of `corpus`; the model runs `corpus.tokens` positions of them, or fewer where the text ends.

    Raises:
        EditError: the text is missing, no text, or holds no two tokens in a row.
    """
    length, left, reading = min(ROW_TOKENS, stack.max_tokens), corpus.tokens, Reading.of(stack)
    for row in _prefixed(stack, corpus, length, progress) if stack.causal else _enclosed(stack, corpus, length):
        row = row[: left + reading.follows]
        left -= reading.length(row)
        yield row
        if not left:
            return
    if left == corpus.tokens:
        raise EditError(
            f"{corpus}: holds fewer than two tokens in a row, so no token has a next one; give a longer text"
        )


def _prefixed(stack: Stack, corpus: Corpus, length: int, progress: Progress) -> Iterator[Row]:
    """Yield rows of at most `length` ids and the next one."""
    for ids in _documents(stack, corpus, length, progress):
        for first in range(0, len(ids) - 1, length):
            yield tuple(ids[first : first + length + 1])


def _enclosed(stack: Stack, corpus: Corpus, length: int) -> Iterator[Row]:
    """Yield rows of at most `length` ids, with the tokenizer's special tokens; in a decoder, with its start id, too."""
    if corpus.named is None:
        raise EditError(f"{stack.name}: its {stack.kind} samples no text; give a text file with --corpus")
    plain, whole = (stack.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    at = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
    before, after = [*_start(stack), *whole[:at]], whole[at + len(plain) :]
    room = length - len(whole) + len(plain)
    for text in texts(corpus)[0]:
        ids = stack.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for first in range(0, len(ids) - 1, room):
            yield (*before, *ids[first : first + room], *after)


def _start(stack: Stack) -> list[int]:
    """Return the start id of the decoder of an encoder-decoder model; nothing for an encoder."""
    if stack.kind == "encoder":
        return []
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = [getattr(config, name, None) for name in names for config in (stack.model.config, stack.tokenizer)]
    return [next((int(one) for one in found if one is not None), 0)]


def _documents(stack: Stack, corpus: Corpus, length: int, progress: Progress) -> Iterator[Sequence[int]]:
    """Yield the ids of each document; of running text, parts of whole rows, each beginning with the last id before."""
    if corpus.named is None:
        assert isinstance(stack, Editable)
        for row in sampled(stack, corpus, identity(stack, corpus)[0], progress).split(length):
            yield row.tolist()
        return
    pieces, whole = texts(corpus)
    held: list[int] = []
    for number, text in enumerate(pieces):
        ids = stack.tokenizer(text, add_special_tokens=whole or not number, verbose=False)["input_ids"]
        if whole:
            yield ids
            continue
        held += ids
        ready = (len(held) - 1) // length * length
        if ready > 0:
            yield held[: ready + 1]
            held = held[ready:]
    yield held


def chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield `CHUNK` rows at a time."""
    while some := list(islice(rows, CHUNK)):
        yield some


class RowStore:
    """Rows in a folder, in shards: `count` rows, with the `Reading` of their stack."""

    def __init__(self, folder: Path, count: int = 0, reading: Reading = CAUSAL) -> None:
        self.folder = folder
        self.count = count
        self.reading = reading
        self._shard = lru_cache(maxsize=2)(self._load)

    def append(self, rows: Sequence[Row]) -> None:
        """Write the next shard; every shard but the last has `CHUNK` rows.

        Raises:
            EditError: the shard cannot be written.
        """
        ids = torch.full((len(rows), WIDTH + 1), NOTHING, dtype=torch.int32)
        for row, own in zip(ids, rows, strict=True):
            row[: len(own)] = torch.tensor(own, dtype=torch.int32)
        write_file(self._path(self.count // CHUNK), lambda made: save_file({"ids": ids}, made))
        self._shard.cache_clear()
        self.count += len(rows)

    def found(self, rows: Sequence[Row]) -> bool:
        """Return whether the next shard, already on disk, holds exactly these rows; it is then the store's last."""
        ids = self._shard(self.count // CHUNK)
        self.count += len(ids)
        return len(ids) == len(rows) and all(
            tuple(i for i in kept if i != NOTHING) == row for kept, row in zip(ids.tolist(), rows, strict=True)
        )

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, in order."""
        for number in range(-(-self.count // CHUNK)):
            for ids in self._shard(number).tolist():
                yield tuple(i for i in ids if i != NOTHING)

    def tokens(self, places: Tensor, offset: int = 0) -> Tensor:
        """Return the ids `offset` after `places` [..], [..] int64; `NOTHING` outside the row, and for `NOTHING`."""
        found = torch.full(places.shape, NOTHING).view(-1)
        flat = places.reshape(-1)
        column = flat % WIDTH + offset
        inside = (flat >= 0) & (column >= 0) & (column <= WIDTH)
        shard = flat // WIDTH // CHUNK
        for number in shard[inside].unique().tolist():
            here = (inside & (shard == number)).nonzero()[:, 0]
            found[here] = self._shard(number)[flat[here] // WIDTH % CHUNK, column[here]].long()
        return found.view(places.shape)

    def next(self, places: Tensor) -> Tensor:
        """Return the ids that follow flat indices `places` [..], [..] int64; `NOTHING` where none does."""
        return self.tokens(places, 1) if self.reading.follows else torch.full_like(places, NOTHING)

    def context(self, place: int) -> Context:
        """Return the context of the position with flat index `place`."""
        row, position = divmod(place, WIDTH)
        ids = self._shard(row // CHUNK)[row % CHUNK].tolist()
        return self.reading.context(tuple(i for i in ids if i != NOTHING), position)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the text."""
        found = sha256()
        for number in range(-(-self.count // CHUNK)):
            found.update(self._shard(number).numpy().tobytes())
        return found.hexdigest()[:16]

    def _path(self, number: int) -> Path:
        return self.folder / f"rows-{number:06}.safetensors"

    def _load(self, number: int) -> Tensor:
        path = self._path(number)
        try:
            return load_file(path)["ids"]
        except (OSError, SafetensorError, KeyError) as error:
            raise EditError(f"{path}: no rows of an inspection ({error}); inspect anew with --force") from error
