"""Scoring of given answers: the log-probability of each of their tokens, and the model's argmax at each.

A token's prediction depends on its *context*, all tokens before it. Each context is evaluated once, whatever needs it:
both objects after a prompt share the prompt, which gives the first token of either, and the first token of free
generation. And each token is run once, as far as that is worth a pass of its own:

- a context that is a prefix of another is read while that one is run, and needs no row;
- rows that share at least half of their tokens (two long objects after one prompt, neighbors behind one sentence) run
  these once, as a *stem*; the rest of each row continues from the stem's keys and values. Stems of one length are run
  together, so that the model builds masks and positions itself.

Rows run in batches, the longest first, padded on the right, where causal attention does not see the padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.errors import ModelError
from ffedit.inference import replay
from ffedit.inference.generation import log_softmax
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, batches, decode, pad
from ffedit.progress import Progress, silent

Context: TypeAlias = tuple[int, ...]
# Called with contexts and the log-probabilities of the token after each, [k, vocabulary], nats.
Listener: TypeAlias = Callable[[list[Context], Tensor], None]

BUDGET = 4096
# Tokens that the stems of one length must save, since they take an extra pass.
WORTH = 256


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of one answer's tokens, each given those before it, nats; and the argmax at each of them.

    The argmax after the last token follows where that was requested.
    """

    log_probs: tuple[float, ...]
    argmax: tuple[int, ...]

    def said(self, target: Sequence[int]) -> tuple[int, ...]:
        """Return the known beginning of free greedy generation: up to the first token that is not the target's.

        As long as the target's tokens are the argmax, teacher forcing and free generation are the same thing.
        """
        wrong = next((i for i, (a, t) in enumerate(zip(self.argmax, target, strict=False)) if a != t), len(target))
        return self.argmax[: wrong + 1]


@dataclass(frozen=True)
class _Row:
    """Tokens to run, and the lengths of the prefixes whose next-token logits are read, ascending."""

    ids: Context
    reads: tuple[int, ...]


@torch.no_grad()
def ask(
    editable: Editable,
    texts: Iterable[Encoded],
    budget: int = BUDGET,
    closed: Collection[Encoded] = (),
    watched: Collection[Context] = (),
    listener: Listener | None = None,
    progress: Progress = silent,
) -> dict[Encoded, Answer]:
    """Score the answers of `texts` with the model in its current state.

    Args:
        editable: the model.
        texts: prompts with answers.
        budget: padded tokens in a batch; a batch has one row at least.
        closed: those of `texts` for which the argmax after the last token is returned, too.
        watched: contexts among those of `texts` whose whole distributions go to `listener`.
        listener: called with these distributions, batch by batch.
        progress: progress callback.

    Raises:
        ModelError: the model's numbers are not finite.
    """
    wanted = {text: [text.ids[:end] for end in range(text.answer, len(text.ids) + (text in closed))] for text in texts}
    tokens: dict[Context, set[int]] = {}
    for text, contexts in wanted.items():
        for context in contexts:
            tokens.setdefault(context, set()).update(text.ids[len(context) : len(context) + 1])
    log_prob: dict[tuple[Context, int], float] = {}
    argmax: dict[Context, int] = {}
    for contexts, logits in _run(editable, _rows(sorted(tokens)), budget):
        distribution = log_softmax(logits)
        top, best = distribution.max(-1)
        _check(editable, contexts, top)
        argmax.update(zip(contexts, best.tolist(), strict=True))
        pairs = [(i, context, token) for i, context in enumerate(contexts) for token in tokens[context]]
        rows, ids = torch.tensor([(i, token) for i, _, token in pairs], dtype=torch.long).reshape(-1, 2).unbind(1)
        values = distribution[rows.to(logits.device), ids.to(logits.device)].tolist()
        log_prob.update({(context, token): value for (_, context, token), value in zip(pairs, values, strict=True)})
        if listener is not None and (heard := [i for i, context in enumerate(contexts) if context in watched]):
            listener([contexts[i] for i in heard], distribution[heard])
        progress("measuring", len(argmax), len(tokens))
    return {
        text: Answer(
            tuple(log_prob[pair] for pair in zip(contexts, text.target_ids, strict=False)),
            tuple(argmax[context] for context in contexts),
        )
        for text, contexts in wanted.items()
    }


def _check(editable: Editable, contexts: Sequence[Context], top: Tensor) -> None:
    """Check that log-probabilities are finite: a comparison with NaN is false, which would pass for a score."""
    bad = (~top.isfinite()).nonzero()
    if len(bad):
        text = decode(editable.tokenizer, contexts[int(bad[0])])
        edits = len(editable.history.known)
        edited = f" with {edits} edit{'s' if edits > 1 else ''}" if edits else ""
        raise ModelError(
            f"{editable.name}{edited}: the probabilities after {text[-60:]!r} are not finite (NaN); no score can be "
            "given: a sound checkpoint, or a smaller edit, was expected"
        )


def _rows(contexts: Sequence[Context]) -> list[_Row]:
    """Return the rows to run for sorted `contexts`, where those that begin with a context directly follow it."""
    rows, reads = [], []
    for i, context in enumerate(contexts):
        reads.append(len(context))
        if i + 1 == len(contexts) or contexts[i + 1][: len(context)] != context:
            rows.append(_Row(context, tuple(reads)))
            reads = []
    return rows


def _run(editable: Editable, rows: Sequence[_Row], budget: int) -> Iterator[tuple[list[Context], Tensor]]:
    """Yield contexts, and the logits after each, [k, vocabulary], batch by batch."""
    whole: list[_Row] = []
    stems: dict[int, list[list[_Row]]] = defaultdict(list)
    for family in _families(rows) if editable.resumable else [[row] for row in rows]:
        if len(family) == 1:
            whole += family
        else:
            stems[_shared(family)].append(family)
    for length, families in stems.items():
        if sum(length * (len(family) - 1) for family in families) < WORTH:
            whole += [row for family in families for row in family]
            continue
        for batch in batches([sum(len(row.ids) for row in family) for family in families], budget):
            yield from _branched(editable, [families[i] for i in batch], length)
    for batch in batches([len(row.ids) for row in whole], budget):
        yield _whole(editable, [whole[i] for i in batch])


def _families(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Group rows adjacent in order that share at least half of their tokens; a row that shares less is alone."""
    families: list[list[_Row]] = []
    longest = 0
    for row in rows:
        if families and 2 * _common(families[-1][0].ids, row.ids) >= max(longest, len(row.ids)):
            families[-1].append(row)
            longest = max(longest, len(row.ids))
        else:
            families.append([row])
            longest = len(row.ids)
    return families


def _common(a: Context, b: Context) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared(family: Sequence[_Row]) -> int:
    """Count the tokens that all rows of a family share; rows are sorted, so the first and last share the fewest."""
    return _common(family[0].ids, family[-1].ids)


def _whole(editable: Editable, rows: Sequence[_Row]) -> tuple[list[Context], Tensor]:
    reads = [(i, length) for i, row in enumerate(rows) for length in row.reads]
    logits = replay.forward(editable, pad([row.ids for row in rows]), torch.tensor([(i, n - 1) for i, n in reads]))
    return [rows[i].ids[:n] for i, n in reads], logits


def _branched(
    editable: Editable, families: Sequence[Sequence[_Row]], stem: int
) -> Iterator[tuple[list[Context], Tensor]]:
    """Run the first `stem` tokens of each family once, then the rest of every row from their keys and values."""
    cache = DynamicCache()
    rows = [(owner, row) for owner, family in enumerate(families) for row in family]
    early = [(owner, row, n) for owner, row in rows for n in row.reads if n <= stem]
    reads = torch.tensor([(owner, n - 1) for owner, _, n in early], dtype=torch.long).reshape(-1, 2)
    ids = torch.tensor([family[0].ids[:stem] for family in families], device=editable.device)
    with replay.unembedding(editable, reads):
        logits = editable.run(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
    if early:
        yield [row.ids[:n] for _, row, n in early], logits
    cache.batch_select_indices(torch.tensor([owner for owner, _ in rows]))  # on the CPU: layers may be anywhere
    late = [(i, row, n) for i, (_, row) in enumerate(rows) for n in row.reads if n > stem]
    with replay.unembedding(editable, torch.tensor([(i, n - 1) for i, _, n in late]), stem):
        tails = pad([row.ids[stem:] for _, row in rows]).to(editable.device)
        logits = editable.run(input_ids=tails, past_key_values=cache, use_cache=True).logits[0]
    yield [row.ids[:n] for _, row, n in late], logits
