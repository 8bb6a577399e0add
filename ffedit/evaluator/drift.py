"""Distance of next-token distributions from those of the unedited model: on generic text (drift) and after neighbors.

Generic text is unrelated to the edited facts: a file, or text that the model samples. It is cut into rows of equal
length, each beginning with the tokens that the tokenizer puts in front of a text. These are not scored: drift is the
mean over the positions behind them, and perplexity is over all other tokens that have a token before them.

Whole distributions are large (1 GB for 5,000 neighbors and 50,000 tokens). For generic text, the unedited model's
states behind the last layer are kept, and its distributions are computed from them for each comparison, a few rows at a
time. For neighbors, distributions are kept; beyond about `NEIGHBOR_BYTES`, only those of a sample, on which alone
divergence is then measured. The sample depends on the neighbors' tokens alone, so several processes draw the same one.

Sampled text is the same for each edit, so its states are cached, with those that enter the lowest edited layer. A run
of the edited model starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ffedit.errors import EditError, ModelError
from ffedit.evaluator.formulas import divergence, perplexity
from ffedit.files import cache
from ffedit.files.resuming import kept
from ffedit.inference import replay
from ffedit.inference.batching import split_on_oom
from ffedit.inference.contexts import NO_MEMORY, Context
from ffedit.inference.generation import log_softmax
from ffedit.inference.own_text import own_text
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.hooks import capture
from ffedit.model.storage import device_of
from ffedit.model.tokenization import plain_ids
from ffedit.progress import Progress, silent

Out = TypeVar("Out")

# Seed of the text that the model samples; differs from every seed that an edit uses.
DRIFT_SEED = 77_000
DRIFT_ROWS, DRIFT_TOKENS = 16, 32
# Tokens in a row of a file.
FILE_TOKENS = 128
BUDGET = 2048
# Number of logits that are computed at a time for each of the two models: enough for a fast product.
LOGITS = 2**25
# Number of logits that are compared at a time: they fit a processor's cache, and glibc keeps memory of this size for
# the next ones.
PIECE = 2**22
NEIGHBOR_BYTES = 2**30


class GenericText:
    """Text to measure drift and perplexity on, with the states of the unedited model on it.

    The text is read from `path`, or sampled from the model where that is None. With `layer`, the weights below it are
    the same in all later measurements of this model. `progress` counts rows.

    Attributes:
        rows: token ids, rows of equal length, each beginning with the model's `start_tokens`.
        perplexity: perplexity of the unedited model.

    Raises:
        EditError: the file cannot be read, or is too short.
    """

    def __init__(
        self,
        editable: Editable,
        path: str | Path | None = None,
        layer: int | None = None,
        progress: Progress = silent,
    ) -> None:
        self._editable, self._layer, self._progress = editable, layer if path is None else None, progress
        if path is None:
            self.rows = own_text(editable, DRIFT_ROWS, min(DRIFT_TOKENS, editable.max_tokens), DRIFT_SEED)
        else:
            self.rows = _rows_of(editable, Path(path))
        # The states that enter the layer, if any, and those that leave the last one, [rows, tokens, d_model] each.
        self._states: list[Tensor] = []
        entry = self._cache_entry()
        tensors = self._made() if entry is None else kept(entry, self._made)
        self._states, self.perplexity = list(tensors["states"]), float(tensors["perplexity"])

    def _made(self) -> dict[str, Tensor]:
        """Run the unedited model for its states, [1 or 2, rows, tokens, d_model], and the perplexity."""
        states = [torch.cat(side) for side in zip(*(sides for _, sides in self._run(self._editable)), strict=True)]
        compared = self._compared(self._editable, range(len(self.rows)), states[-1])
        text_perplexity = torch.tensor(_scores(self._editable, compared)[1], dtype=torch.float64)
        return {"states": torch.stack(states), "perplexity": text_perplexity}

    def _cache_entry(self) -> Path | None:
        """Return the cache file of the unedited model's states; None where these are not cached."""
        if self._layer is None:
            return None
        weights = fingerprint(self._editable)
        if self._editable.history.base not in (None, weights):
            return None
        key = repr((weights, self.rows, self._layer, str(self._editable.model.dtype)))
        return cache.entry("states", key)

    def measure(self, editable: Editable | None = None) -> tuple[float, float]:
        """Return drift, nats per token, and perplexity of `editable`, or of this model in its current state.

        Another model must have the same tokenizer. Raises ModelError for numbers that are not finite.
        """
        model = editable or self._editable
        runs = self._run(model)
        return _scores(model, (pair for rows, states in runs for pair in self._compared(model, rows, states[-1])))

    def _run(self, editable: Editable) -> Iterator[tuple[Sequence[int], list[Tensor]]]:
        """Run the rows in batches; yield each with the states that leave the last layer, [rows, tokens, d_model].

        With a layer, the first run also yields the states that enter it, before these, and later runs of this model
        start from them. All are on the CPU.
        """
        depth, layer = len(editable.layers), self._layer if editable is self._editable else None
        cached = self._states[0] if self._states else None
        entry = {} if layer is None or cached is not None else {layer: editable.layers[layer]}

        @torch.no_grad()
        def run(rows: Sequence[int]) -> tuple[Sequence[int], list[Tensor]]:
            ids = torch.tensor([self.rows[i] for i in rows])
            with capture(entry, inputs=True) as entering, capture({depth: editable.layers[-1]}) as leaving:
                if layer is None or cached is None:
                    replay.run_to(editable, ids, depth - 1)
                else:
                    states = cached[list(rows)].to(device_of(editable.layers[layer]))
                    replay.resume_after(editable, [], layer, ids, states, torch.zeros(0, 2, dtype=torch.long))
            return rows, [side.reshape(*ids.shape, -1).cpu() for side in (*entering.values(), *leaving.values())]

        return self._in_batches(run, range(len(self.rows)), BUDGET)

    def _compared(self, editable: Editable, rows: Sequence[int], states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each batch of `rows`, the log-probabilities of the tokens and the divergences at them.

        `states` [rows, tokens, d_model] leave the last layer of `editable`. Divergences are 0 in the first run.
        """
        start, vocabulary = len(editable.start_tokens), editable.vocabulary

        def logits(model: Editable, hidden: Tensor) -> Sequence[Tensor]:
            flat = model.logits_of(hidden.flatten(0, 1).to(device_of(model.layers[-1])))
            pieces: Sequence[Tensor] = flat.split(max(1, PIECE // vocabulary))
            return pieces

        def read(batch: Sequence[int]) -> tuple[Tensor, Tensor]:
            indices = [rows[i] for i in batch]
            ids = torch.tensor([self.rows[i] for i in indices])
            now = logits(editable, states[list(batch)])
            before = logits(self._editable, self._states[-1][indices]) if self._states else [None] * len(now)
            following, divergences = list[Tensor](), list[Tensor]()
            for new, old, token in zip(now, before, ids.roll(-1, 1).flatten().split(len(now[0])), strict=True):
                log_probs = log_softmax(new).float()
                following.append(log_probs.gather(-1, token[:, None].to(log_probs.device)).cpu())
                if old is None:
                    divergences.append(torch.zeros(len(new)))
                else:
                    divergences.append(divergence(log_softmax(old).float().to(log_probs.device), log_probs).cpu())
            scored, moved = (torch.cat(side).view(ids.shape) for side in (following, divergences))
            self._progress("measuring drift", indices[-1] + 1, len(self.rows))
            return scored[:, max(0, start - 1) : -1].flatten(), moved[:, start:].flatten()

        return self._in_batches(read, range(len(rows)), LOGITS // vocabulary)

    def _in_batches(self, work: Callable[[Sequence[int]], Out], rows: Sequence[int], tokens: int) -> Iterator[Out]:
        """Run `work` on consecutive batches of `rows` with about `tokens` tokens each."""
        size = max(1, tokens // len(self.rows[0]))
        for first in range(0, len(rows), size):
            yield from split_on_oom(work, rows[first : first + size], ModelError(NO_MEMORY))


def _scores(editable: Editable, compared: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return drift and perplexity from what `_compared` yields; ModelError where they are not finite."""
    log_probs, divergences = (torch.cat(side) for side in zip(*compared, strict=True))
    drift, text_perplexity = float(divergences.mean()), perplexity(log_probs)
    if not text_perplexity < float("inf") or drift != drift:
        raise ModelError(
            f"{editable.name}: the probabilities of generic text are not finite (NaN), so there is no score; use "
            "a sound checkpoint, or a smaller edit"
        )
    return drift, text_perplexity


def _rows_of(editable: Editable, path: Path) -> list[list[int]]:
    """Read a file's tokens into rows of equal length, each beginning as a text does; drop an incomplete last row."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"{path}: cannot be read as text ({error}); a text file in UTF-8 was expected") from error
    ids, start = plain_ids(editable.tokenizer, text), editable.start_tokens
    if len(ids) < 2:
        raise EditError(f"{path}: has {len(ids)} tokens; a text of some sentences was expected")
    length = min(FILE_TOKENS - len(start), editable.max_tokens - len(start), len(ids))
    return [[*start, *ids[i : i + length]] for i in range(0, len(ids) - length + 1, length)]


class ReferenceDistributions:
    """Next-token distributions of the unedited model after some contexts, in float32 on the CPU.

    Where those of all processes, `count`, would exceed `NEIGHBOR_BYTES`, a sample of the contexts is kept: drawn by a
    hash of their tokens alone, so that several processes draw the same one.
    """

    def __init__(self, contexts: Sequence[Context], vocabulary: int, count: int) -> None:
        share = NEIGHBOR_BYTES / (4 * vocabulary * max(1, count))
        draws = {ids: int.from_bytes(sha256(repr(ids).encode()).digest()[:8], "big") / 2**64 for ids in contexts}
        self.contexts = frozenset(context for context, draw in draws.items() if share >= 1 or draw < share)
        self._kept: dict[Context, Tensor] = {}

    def keep(self, contexts: Sequence[Context], log_probs: Tensor) -> None:
        """Keep the unedited model's log-probabilities [k, vocabulary] after `contexts`."""
        self._kept.update(zip(contexts, log_probs.float().cpu(), strict=True))

    def compare(self, contexts: Sequence[Context], log_probs: Tensor) -> list[float]:
        """Return KL(unedited ‖ now) after each of `contexts`, nats; `log_probs` [k, vocabulary] are the model's now."""
        before = torch.stack([self._kept[context] for context in contexts]).to(log_probs.device)
        distances: list[float] = divergence(before, log_probs.float()).tolist()
        return distances
