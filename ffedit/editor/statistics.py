"""Collect the second moment of a layer's keys over ordinary text, and remember it.

The text is a file of the user's, or, without one, text that the model samples from itself with a seed: that works for any
model and language, holds what the model tends to say, and is never chosen with the edited facts in view. One pass per batch
runs up to the layer and no further. The result is cached under a fingerprint of everything it depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ffedit import cache, readout, replay
from ffedit.anatomy import Editable
from ffedit.errors import EditError
from ffedit.fingerprint import fingerprint
from ffedit.hooks import captured
from ffedit.memory import KeyValueMemory
from ffedit.moments import KeyMoments, MomentsFitter
from ffedit.progress import Progress, silent
from ffedit.tokens import pad

# Long enough for local statistics, short enough for any memory, whatever the model's maximum position is.
ROW_TOKENS = 64
ROWS_PER_BATCH = 64


@dataclass(frozen=True)
class Corpus:
    """Where the text comes from: a UTF-8 text file, or the model itself.

    Attributes:
        path: the file; None for text that the model samples.
        tokens: how many tokens to use, at most.
        seed: of the sampling.
    """

    path: Path | None = None
    tokens: int = 10_000
    seed: int = 0

    def __str__(self) -> str:
        return f"text sampled from the model (seed {self.seed})" if self.path is None else self.path.name

    def digest(self) -> str:
        """What identifies the text besides the model."""
        if self.path is None:
            return f"sampled-{self.seed}-{self.tokens}"
        return f"{hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]}-{self.tokens}"

    def rows(self, editable: Editable) -> Iterator[list[list[int]]]:
        """Batches of rows of token ids.

        Raises:
            EditError: the file is missing, no text, or empty.
        """
        length = min(ROW_TOKENS, editable.max_tokens)
        if self.path is None:
            wanted = -(-self.tokens // length)
            for batch, first in enumerate(range(0, wanted, ROWS_PER_BATCH)):
                yield readout.own_text(editable, min(ROWS_PER_BATCH, wanted - first), length, self.seed + 1000 + batch)
            return
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EditError(f"{self.path}: a UTF-8 text file was expected ({error})") from error
        ids: list[int] = editable.tokenizer(text, verbose=False)["input_ids"][: self.tokens]
        if not ids:
            raise EditError(f"{self.path}: holds no text to collect key statistics from")
        rows = [ids[i : i + length] for i in range(0, len(ids), length)]
        for first in range(0, len(rows), ROWS_PER_BATCH):
            yield rows[first : first + ROWS_PER_BATCH]


@torch.no_grad()
def collect_moments(
    editable: Editable,
    memory: KeyValueMemory,
    corpus: Corpus | None = None,
    progress: Progress = silent,
) -> KeyMoments:
    """C of one memory over `corpus`, from the cache where it is there.

    Raises:
        EditError: the corpus cannot be used.
    """
    corpus = corpus or Corpus()
    if corpus.path is not None and not corpus.path.is_file():
        raise EditError(f"{corpus.path}: no such file; --corpus takes a UTF-8 text file")
    layer = memory.address.layer
    mark = f"{fingerprint(editable, below=layer)}:{memory.address}:{corpus.digest()}"
    path = cache.path("moments", hashlib.sha256(mark.encode()).hexdigest()[:24], ".safetensors")
    if path.exists():
        return KeyMoments.load(path, mark)
    fitter, expected = MomentsFitter(), corpus.tokens
    for rows in corpus.rows(editable):
        with captured({0: memory.module}, inputs=True) as keys:
            ids = pad(rows)
            replay.forward(editable, ids, torch.tensor([[0, 0]]))
        inside = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        fitter.update(keys[0].reshape(*ids.shape, -1)[inside])
        progress("collecting key statistics", min(fitter.count, expected), expected)
    moments = fitter.moments(str(corpus), mark)
    cache.write(path, moments.save)
    return moments
