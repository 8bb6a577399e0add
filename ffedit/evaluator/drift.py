"""Distance of next-token distributions from those of the unedited model: on generic text (drift) and after neighbors.

Generic text is unrelated to the edited facts: a file, or text that the model samples. It is cut into rows of equal
length, each begun with the tokens that the model's tokenizer puts in front of a text. These are no text: drift is the
mean over the positions behind them, and perplexity that of all other tokens that something stands before.

Whole distributions are large (of 5,000 neighbors and 50,000 tokens, 1 GB). Of the text, the states behind the last
layer of the unedited model are kept, and its distributions are read from them as often as they are compared, a few rows
at a time. Beyond about `NEIGHBOR_BYTES`, a sample of the neighbors is kept, and divergence is measured on these only.
Membership in that sample depends on a neighbor's own tokens alone, so that several processes draw the same one.

Sampled text is the same for each edit: its states stay in the cache, with those that enter the edited layer, from which
the edited model runs on.
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

Part = TypeVar("Part")

# For the text that the model samples; differs from every seed that an edit uses.
DRIFT_SEED = 77_000
DRIFT_ROWS, DRIFT_TOKENS = 16, 32
# Length of the rows of a file.
FILE_TOKENS = 128
BUDGET = 2048
# Numbers of the logits that are computed at a time, of each of the two models: enough for a fast product.
LOGITS = 2**25
# Of those that are compared at a time: a processor's cache holds them, and they are small enough for memory that glibc
# keeps for the next ones.
PIECE = 2**22
NEIGHBOR_BYTES = 2**30


class GenericText:
    """Text to measure drift and perplexity on, with the states of the unedited model on it.

    Of a text file, or without `path` of text that the model samples. With `layer`, whatever is measured later on this
    model differs from it in this layer and above only.

    Attributes:
        rows: token ids, rows of equal length, each begun with the model's `start_tokens`.
        perplexity: perplexity of the unedited model.

    Raises:
        EditError: the file cannot be read, or is too short.
    """

    def __init__(self, editable: Editable, path: str | Path | None = None, layer: int | None = None) -> None:
        self._editable, self._layer = editable, layer if path is None else None
        if path is None:
            self.rows = own_text(editable, DRIFT_ROWS, min(DRIFT_TOKENS, editable.max_tokens), DRIFT_SEED)
        else:
            self.rows = _rows_of(editable, Path(path))
        # The states that enter the layer, if any, and those that leave the last one, [rows, tokens, d_model] each.
        self._states: list[Tensor] = []
        path = self._kept()
        found = self._made() if path is None else kept(path, self._made)
        self._states, self.perplexity = list(found["states"]), float(found["perplexity"])

    def _made(self) -> dict[str, Tensor]:
        """Run the unedited model for its states, [1 or 2, rows, tokens, d_model], and the perplexity."""
        every = [torch.cat(side) for side in zip(*(states for _, states in self._run(self._editable)), strict=True)]
        compared = self._compared(self._editable, range(len(self.rows)), every[-1])
        text = torch.tensor(_scores(self._editable, compared)[1], dtype=torch.float64)
        return {"states": torch.stack(every), "perplexity": text}

    def _kept(self) -> Path | None:
        """Return the file of the states of the unedited model; None where none are kept."""
        if self._layer is None:
            return None
        weights = fingerprint(self._editable)
        if self._editable.history.base not in (None, weights):
            return None
        about = repr((weights, self.rows, self._layer, str(self._editable.model.dtype)))
        return cache.entry("states", about)

    def measure(self, editable: Editable | None = None) -> tuple[float, float]:
        """Return drift from the unedited model, nats per token, and perplexity, of the model in its current state.

        Or of `editable`, another model with the same tokenizer. Raises ModelError for numbers that are not finite.
        """
        of = editable or self._editable
        runs = self._run(of)
        return _scores(of, (part for rows, states in runs for part in self._compared(of, rows, states[-1])))

    def _run(self, editable: Editable) -> Iterator[tuple[Sequence[int], list[Tensor]]]:
        """Run the rows; yield some after others with the states that leave the last layer, [rows, tokens, d_model].

        In front of these, those that enter the layer, in the first run; later runs of this model begin with them. All
        are on the CPU.
        """
        depth, layer = len(editable.layers), self._layer if editable is self._editable else None
        known = self._states[0] if self._states else None
        first = {} if layer is None or known is not None else {layer: editable.layers[layer]}

        @torch.no_grad()
        def states(rows: Sequence[int]) -> tuple[Sequence[int], list[Tensor]]:
            ids = torch.tensor([self.rows[i] for i in rows])
            with capture(first, inputs=True) as entering, capture({depth: editable.layers[-1]}) as leaving:
                if layer is None or known is None:
                    replay.run_to(editable, ids, depth - 1)
                else:
                    given = known[list(rows)].to(device_of(editable.layers[layer]))
                    replay.resume_after(editable, [], layer, ids, given, torch.zeros(0, 2, dtype=torch.long))
            return rows, [side.reshape(*ids.shape, -1).cpu() for side in (*entering.values(), *leaving.values())]

        return self._in_parts(states, range(len(self.rows)), BUDGET)

    def _compared(self, editable: Editable, rows: Sequence[int], states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the log-probabilities of the tokens and the divergences at them, of some of `rows` after others.

        `states` [rows, tokens, d_model] leave the last layer of `editable`. Divergences are 0 before any are kept.
        """
        start, vocabulary = len(editable.start_tokens), editable.vocabulary

        def logits(of: Editable, side: Tensor) -> Sequence[Tensor]:
            every = of.logits_of(side.flatten(0, 1).to(device_of(of.layers[-1])))
            pieces: Sequence[Tensor] = every.split(max(1, PIECE // vocabulary))
            return pieces

        def read(part: Sequence[int]) -> tuple[Tensor, Tensor]:
            numbers = [rows[i] for i in part]
            ids = torch.tensor([self.rows[i] for i in numbers])
            now = logits(editable, states[list(part)])
            before = logits(self._editable, self._states[-1][numbers]) if self._states else [None] * len(now)
            following, apart = list[Tensor](), list[Tensor]()
            for new, old, token in zip(now, before, ids.roll(-1, 1).flatten().split(len(now[0])), strict=True):
                log_probs = log_softmax(new).float()
                following.append(log_probs.gather(-1, token[:, None].to(log_probs.device)).cpu())
                if old is None:
                    apart.append(torch.zeros(len(new)))
                else:
                    apart.append(divergence(log_softmax(old).float().to(log_probs.device), log_probs).cpu())
            said, moved = (torch.cat(side).view(ids.shape) for side in (following, apart))
            return said[:, max(0, start - 1) : -1].flatten(), moved[:, start:].flatten()

        return self._in_parts(read, range(len(rows)), LOGITS // vocabulary)

    def _in_parts(self, work: Callable[[Sequence[int]], Part], rows: Sequence[int], tokens: int) -> Iterator[Part]:
        """Run `work` on neighbouring `rows` that have about so many tokens together, in order."""
        size = max(1, tokens // len(self.rows[0]))
        for first in range(0, len(rows), size):
            yield from split_on_oom(work, rows[first : first + size], ModelError(NO_MEMORY))


def _scores(editable: Editable, compared: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return drift and perplexity of what `_compared` yields; ModelError where they are not finite."""
    following, apart = (torch.cat(side) for side in zip(*compared, strict=True))
    drift, text = float(apart.mean()), perplexity(following)
    if not text < float("inf") or drift != drift:
        raise ModelError(
            f"{editable.name}: the probabilities of generic text are not finite (NaN), so there is no score; use "
            "a sound checkpoint, or a smaller edit"
        )
    return drift, text


def _rows_of(editable: Editable, path: Path) -> list[list[int]]:
    """Read a file's tokens into rows of equal length, each begun as a text is; an incomplete last row is dropped."""
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

    They are sampled where those of all processes, `count`, would exceed `NEIGHBOR_BYTES`: by a hash of their tokens
    alone, so that several processes draw the same sample.
    """

    def __init__(self, contexts: Sequence[Context], vocabulary: int, count: int) -> None:
        share = NEIGHBOR_BYTES / (4 * vocabulary * max(1, count))
        draws = {each: int.from_bytes(sha256(repr(each).encode()).digest()[:8], "big") / 2**64 for each in contexts}
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
