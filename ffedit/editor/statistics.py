"""Collect the second moment of a layer's keys over ordinary text, and remember it.

The text is a file of the user's, or, without one, text that the model samples from itself with a seed: that works
for any model and language, holds what the model tends to say, and is never chosen with the edited facts in view.

C = E[k kᵀ] asks whose reading an edit may disturb. Over running text the answer is: that of "the" and "is", which
make up most tokens and need few directions, while a name that occurs once counts for nothing. By default the
expectation is therefore taken over token *types*: each occurrence weighs one over the number of times its token
occurs, so that a rare name is protected as well as a frequent word. `weighting="tokens"` is the mean over running
text, as ROME was published.

The result is cached under a fingerprint of everything it depends on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
SAMPLED_ROWS = 256


@dataclass(frozen=True)
class Corpus:
    """Where the text comes from, and how its tokens count.

    Attributes:
        path: a UTF-8 text file; None for text that the model samples.
        tokens: how many tokens to use, at most.
        seed: of the sampling.
        weighting: "types" (each occurrence weighs one over its token's frequency) or "tokens" (all weigh the same).
    """

    path: Path | None = None
    tokens: int = 16_384
    seed: int = 0
    weighting: Literal["types", "tokens"] = "types"

    def __str__(self) -> str:
        return f"text sampled from the model (seed {self.seed})" if self.path is None else self.path.name

    def digest(self) -> str:
        """What identifies the text besides the model."""
        text = f"sampled-{self.seed}"
        if self.path is not None:
            text = hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]
        return f"{text}-{self.tokens}-{self.weighting}"

    def rows(self, editable: Editable) -> list[list[int]]:
        """The text as rows of token ids.

        Raises:
            EditError: the file is missing, no text, or empty.
        """
        length = min(ROW_TOKENS, editable.max_tokens)
        if self.path is None:
            wanted = -(-self.tokens // length)
            return [
                row
                for batch, first in enumerate(range(0, wanted, SAMPLED_ROWS))
                for row in readout.own_text(
                    editable, min(SAMPLED_ROWS, wanted - first), length, self.seed + 1000 + batch
                )
            ]
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EditError(f"{self.path}: a UTF-8 text file was expected ({error})") from error
        ids: list[int] = editable.tokenizer(text, verbose=False)["input_ids"][: self.tokens]
        if not ids:
            raise EditError(f"{self.path}: holds no text to collect key statistics from")
        return [ids[i : i + length] for i in range(0, len(ids), length)]

    def weights(self, rows: list[list[int]]) -> list[list[float]]:
        """How much each token of `rows` counts; the mean is 1."""
        if self.weighting == "tokens":
            return [[1.0] * len(row) for row in rows]
        counts = Counter(token for row in rows for token in row)
        share = counts.total() / len(counts)
        return [[share / counts[token] for token in row] for row in rows]


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
    # Keys over given text depend on nothing above them; text that the model samples depends on all of it.
    below = None if corpus.path is None else layer
    mark = f"{fingerprint(editable, below)}:{memory.address}:{corpus.digest()}"
    path = cache.path("moments", hashlib.sha256(mark.encode()).hexdigest()[:24], ".safetensors")
    if path.exists():
        return KeyMoments.load(path, mark)
    rows = corpus.rows(editable)
    weights = corpus.weights(rows)
    fitter = MomentsFitter()
    for first in range(0, len(rows), ROWS_PER_BATCH):
        some = rows[first : first + ROWS_PER_BATCH]
        ids = pad(some)
        with captured({0: memory.module}, inputs=True) as keys:
            replay.forward(editable, ids, torch.tensor([[0, 0]]))
        inside = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in some])[:, None]
        some_weights = torch.tensor([w for row in weights[first : first + ROWS_PER_BATCH] for w in row])
        fitter.update(keys[0].reshape(*ids.shape, -1)[inside], some_weights)
        progress("collecting key statistics", min(first + len(some), len(rows)), len(rows))
    moments = fitter.moments(f"{corpus}, weighted by {corpus.weighting}", mark)
    cache.write(path, moments.save)
    return moments
