"""Distance of next-token distributions from those of the unedited model: on generic text (drift) and after neighbors.

Generic text is unrelated to the edited facts: a file, or text that the model samples. It is cut into rows of equal
length, each begun with the tokens that the model's tokenizer puts in front of a text. These are no text: drift is the
mean over the positions behind them, and perplexity that of all other tokens that something stands before.

Whole distributions are large (of 5,000 neighbors and 50,000 tokens, 1 GB): drift is measured on as many rows, drawn
with a seed, as fit into `TEXT_BYTES`; beyond about `NEIGHBOR_BYTES`, a sample of the neighbors is kept, and divergence
is measured on these only. Membership in that sample depends on a neighbor's own tokens alone, so that several processes
draw the same one.

Of sampled text, which is the same for each edit, the states behind the last layer are kept in the cache, and give the
distributions of the unedited model by one product; those that enter the edited layer, too, and the edited model runs
from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ffedit.errors import EditError, ModelError
from ffedit.evaluator.formulas import divergence, perplexity
from ffedit.files import cache
from ffedit.files.resuming import load_state, save_state
from ffedit.inference import replay
from ffedit.inference.batching import batches, split_on_oom
from ffedit.inference.contexts import NO_MEMORY, Context
from ffedit.inference.generation import log_softmax
from ffedit.inference.own_text import own_text
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.storage import device_of
from ffedit.model.tokenization import plain_ids

# For the text that the model samples; differs from every seed that an edit uses.
DRIFT_SEED = 77_000
DRIFT_ROWS, DRIFT_TOKENS = 16, 32
# Length of the rows of a file.
FILE_TOKENS = 128
BUDGET = 2048
TEXT_BYTES, NEIGHBOR_BYTES = 2**28, 2**30


class GenericText:
    """Text to measure drift and perplexity on, with the unedited model's next-token distributions on it.

    Of a text file, or without `path` of text that the model samples. With `layer`, whatever is measured later on this
    model differs from it in this layer and above only.

    Attributes:
        rows: token ids, rows of equal length, each begun with the model's `start_tokens`.
        drift_rows: number of rows that drift is measured on, and number of all rows.
        perplexity: perplexity of the unedited model.

    Raises:
        EditError: the file cannot be read, or is too short.
    """

    def __init__(self, editable: Editable, path: str | Path | None = None, layer: int | None = None) -> None:
        self._editable, self._layer = editable, layer if path is None else None
        self._measured = False
        if path is None:
            self.rows = own_text(editable, DRIFT_ROWS, min(DRIFT_TOKENS, editable.max_tokens), DRIFT_SEED)
        else:
            self.rows = _rows_of(editable, Path(path))
        vocabulary = editable.model.config.get_text_config().vocab_size
        count, most_rows = len(self.rows), max(1, TEXT_BYTES // (4 * vocabulary * len(self.rows[0])))
        self._compared = set(Random(DRIFT_SEED).sample(range(count), min(count, most_rows)))
        self.drift_rows = len(self._compared), count
        self._reference: dict[int, Tensor] = {}
        kept = self._kept()
        # By row: the states that enter the layer and those that leave the last one, [2, tokens, d_model], on the CPU.
        self._states = {} if kept is None else _recalled(kept)
        recalled = len(self._states)
        self.perplexity = self.measure()[1]
        self._measured = True
        if kept is not None and not recalled:
            states = torch.stack([self._states[i] for i in range(count)])
            cache.write(kept, partial(save_state, tensors={"states": states}, values=None))

    def _kept(self) -> Path | None:
        """Return the file of the states of the unedited model; None where none are kept."""
        if self._layer is None:
            return None
        weights = fingerprint(self._editable)
        if self._editable.history.base not in (None, weights):
            return None
        about = repr((weights, self.rows, self._layer, str(self._editable.model.dtype)))
        return cache.path("states", sha256(about.encode()).hexdigest()[:24], ".safetensors")

    @torch.no_grad()
    def measure(self, editable: Editable | None = None) -> tuple[float, float]:
        """Return drift from the unedited model, nats per token, and perplexity, of the model in its current state.

        Or of `editable`, another model with the same tokenizer. The first call keeps the distributions as the
        reference, so its drift is 0. Raises ModelError for numbers that are not finite.
        """
        editable = editable or self._editable
        distances: list[Tensor] = []
        chosen: list[Tensor] = []
        start = len(editable.start_tokens)

        def read(batch: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
            ids = torch.tensor([self.rows[i] for i in batch])
            log_probs = log_softmax(self._logits(editable, batch, ids)).float().view(*ids.shape, -1)
            following = log_probs[:, :-1].gather(-1, ids[:, 1:, None].to(log_probs.device))
            following = following[:, max(0, start - 1) :].flatten().cpu()
            apart = []
            for i, row in zip(batch, log_probs[:, start:], strict=True):
                if i in self._reference:
                    apart.append(divergence(self._reference[i].to(row.device), row).cpu())
                elif i in self._compared:
                    self._reference[i] = row.cpu()
            return following, apart

        for batch in batches([len(row) for row in self.rows], BUDGET):
            for following, apart in split_on_oom(read, batch, ModelError(NO_MEMORY)):
                chosen.append(following)
                distances += apart
        drift = float(torch.cat(distances).mean()) if distances else 0.0
        text = perplexity(torch.cat(chosen))
        if not text < float("inf") or drift != drift:
            raise ModelError(
                f"{editable.name}: the probabilities of generic text are not finite (NaN), so there is no score; use "
                "a sound checkpoint, or a smaller edit"
            )
        return drift, text

    def _logits(self, editable: Editable, batch: Sequence[int], ids: Tensor) -> Tensor:
        """Return the logits at all tokens `ids` of some rows, [rows · tokens, vocabulary]."""
        reads = torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1]))
        if self._layer is None or editable is not self._editable:
            return replay.forward(editable, ids, reads)
        if not all(i in self._states for i in batch):
            recording = replay.record(editable, ids, reads)
            states = torch.stack([recording.states[layer].cpu() for layer in (self._layer, -1)], 1)
            self._states.update(zip(batch, states, strict=True))
            return recording.logits
        entering, leaving = torch.stack([self._states[i] for i in batch], 1)
        layer, states = (self._layer, entering) if self._measured else (len(editable.layers), leaving)
        states = states.to(device_of(editable.layers[min(layer, len(editable.layers) - 1)]))
        return replay.resume_after(editable, [], layer, ids, states, reads)


def _recalled(kept: Path) -> dict[int, Tensor]:
    """Return the states that an earlier run kept, by row; none where there are none, or damaged ones."""
    try:
        return dict(enumerate(load_state(kept, "holds no states")[0]["states"]))
    except EditError:
        return {}


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
