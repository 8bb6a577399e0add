"""Drift and perplexity on generic text, unrelated to the edited facts: a file, or text that the model samples.

A file is cut into rows of equal length, and perplexity is measured on all of them. Drift compares whole next-token
distributions, which are large: it is measured on as many rows, drawn with a seed, as fit into `MOST_BYTES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ffedit.errors import EditError, ModelError
from ffedit.evaluator.metrics import divergence, perplexity
from ffedit.inference import replay
from ffedit.inference.generation import log_softmax
from ffedit.inference.text import own_text
from ffedit.model.editable import Editable
from ffedit.model.tokenization import pad

# For the text that the model samples; differs from every seed that an edit uses.
DRIFT_SEED = 77_000
DRIFT_ROWS, DRIFT_TOKENS = 16, 32
# Length of the rows of a file.
FILE_TOKENS = 128
BUDGET = 2048
MOST_BYTES = 2**28


class GenericText:
    """Text to measure drift and perplexity on, with the unedited model's next-token distributions on it.

    Args:
        editable: the unedited model.
        path: a text file; None for text that the model samples.

    Attributes:
        rows: token ids, rows of equal length.
        drift_rows: number of rows that drift is measured on, and number of all rows.
        perplexity: perplexity of the unedited model.

    Raises:
        EditError: the file cannot be read, or is too short.
    """

    def __init__(self, editable: Editable, path: str | Path | None = None, most: int = MOST_BYTES) -> None:
        self._editable = editable
        if path is None:
            self.rows = own_text(editable, DRIFT_ROWS, min(DRIFT_TOKENS, editable.max_tokens), DRIFT_SEED)
        else:
            self.rows = _rows_of(editable, Path(path))
        vocabulary = editable.model.config.get_text_config().vocab_size
        room = max(1, most // (4 * vocabulary * len(self.rows[0])))
        count = len(self.rows)
        self._compared = set(range(count) if count <= room else Random(DRIFT_SEED).sample(range(count), room))
        self.drift_rows = len(self._compared), count
        self._usual: dict[int, Tensor] = {}
        self.perplexity = self._run(editable)[1]

    def measure(self, editable: Editable | None = None) -> tuple[float, float]:
        """Return drift from the unedited model, nats per token, and perplexity, of the model in its current state.

        Args:
            editable: another model, with the same tokenizer.

        Raises:
            ModelError: the model's numbers are not finite.
        """
        return self._run(editable or self._editable)

    @torch.no_grad()
    def _run(self, editable: Editable) -> tuple[float, float]:
        """Return drift and perplexity; the first run keeps the distributions as the reference, so its drift is 0."""
        length, moved, found = len(self.rows[0]), [], []
        size = max(1, BUDGET // length)
        for first in range(0, len(self.rows), size):
            log_probs = _next_token_log_probs(editable, self.rows[first : first + size])
            ids = torch.tensor(self.rows[first : first + size], device=log_probs.device)
            found.append(log_probs[:, :-1].gather(-1, ids[:, 1:, None]).flatten().cpu())
            for i, row in enumerate(log_probs):
                if first + i in self._compared:
                    usual = self._usual.setdefault(first + i, row.cpu())
                    moved.append(divergence(usual.to(row.device), row).cpu())
        drift, text = float(torch.cat(moved).mean()), perplexity(torch.cat(found))
        if not text < float("inf") or drift != drift:
            raise ModelError(
                f"{editable.name}: the probabilities of generic text are not finite (NaN); no score can be given: a "
                "sound checkpoint, or a smaller edit, was expected"
            )
        return drift, text


def _next_token_log_probs(editable: Editable, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return next-token log-probabilities at every position of `rows` of equal length, [rows, tokens, vocabulary]."""
    ids = pad(rows)
    reads = torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1]))
    return log_softmax(replay.forward(editable, ids, reads)).float().view(*ids.shape, -1)


def _rows_of(editable: Editable, path: Path) -> list[list[int]]:
    """Read a file's tokens into rows of equal length; an incomplete last row is dropped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"{path}: cannot be read as text ({error}); a text file in UTF-8 was expected") from error
    ids: list[int] = list(editable.tokenizer(text, verbose=False)["input_ids"])
    length = min(FILE_TOKENS, editable.max_tokens, len(ids))
    if length < 2:
        raise EditError(f"{path}: comes to {len(ids)} tokens; a text of some sentences was expected")
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
