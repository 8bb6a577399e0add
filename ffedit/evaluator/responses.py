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
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.errors import ModelError
from ffedit.inference import replay
from ffedit.inference.batching import batches, split_on_oom
from ffedit.inference.generation import NO_ROOM, log_softmax
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode, pad
from ffedit.progress import Progress, silent

Context: TypeAlias = tuple[int, ...]
# Contexts that are run together, each a prefix of the next: the last one holds all tokens.
Row: TypeAlias = list[Context]
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
        watched: contexts among those of `texts` whose whole distributions go to `listener`, batch by batch.
        listener: called with these.
        progress: progress callback.

    Raises:
        ModelError: the model's numbers are not finite.
    """
    needed = {text: [text.ids[:end] for end in range(text.answer, len(text.ids) + (text in closed))] for text in texts}
    tokens: dict[Context, set[int]] = {}
    for text, contexts in needed.items():
        for context in contexts:
            tokens.setdefault(context, set()).update(text.ids[len(context) : len(context) + 1])
    log_prob: dict[tuple[Context, int], float] = {}
    argmax: dict[Context, int] = {}
    for contexts, distribution in _run(editable, _rows(sorted(tokens)), budget):
        top, best = distribution.max(-1)
        _check(editable, contexts, top)
        argmax.update(zip(contexts, best.tolist(), strict=True))
        pairs = [(i, context, token) for i, context in enumerate(contexts) for token in tokens[context]]
        entries = torch.tensor([(i, token) for i, _, token in pairs], dtype=torch.long).reshape(-1, 2)
        values = distribution[entries.to(distribution.device).unbind(1)].tolist()
        log_prob.update({(context, token): value for (_, context, token), value in zip(pairs, values, strict=True)})
        if listener is not None and (rows := [i for i, context in enumerate(contexts) if context in watched]):
            listener([contexts[i] for i in rows], distribution[rows])
        progress("measuring", len(argmax), len(tokens))
    return {
        text: Answer(
            tuple(log_prob[pair] for pair in zip(contexts, text.target_ids, strict=False)),
            tuple(argmax[context] for context in contexts),
        )
        for text, contexts in needed.items()
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


def _rows(contexts: Sequence[Context]) -> list[Row]:
    """Return the rows to run for sorted `contexts`, where those that begin with a context directly follow it."""
    rows: list[Row] = []
    for context in contexts:
        if rows and context[: len(rows[-1][-1])] == rows[-1][-1]:
            rows[-1].append(context)
        else:
            rows.append([context])
    return rows


def _run(editable: Editable, rows: Sequence[Row], budget: int) -> Iterator[tuple[list[Context], Tensor]]:
    """Yield contexts, and the log-probabilities after each, [k, vocabulary], batch by batch, halved if memory fails."""
    whole: list[Row] = []
    stems: dict[int, list[list[Row]]] = defaultdict(list)
    for family in _families(rows) if editable.resumable else [[row] for row in rows]:
        if len(family) == 1:
            whole += family
        else:  # rows are sorted, so the first and the last share the fewest tokens
            stems[_common(family[0][-1], family[-1][-1])].append(family)
    for length, families in stems.items():
        if sum(length * (len(family) - 1) for family in families) < WORTH:
            whole += [row for family in families for row in family]
            continue
        for batch in batches([sum(len(row[-1]) for row in family) for family in families], budget):
            owned = [(i, row) for i in batch for row in families[i]]  # by row: a family may be halved, too
            branched = partial(_branched, editable, stem=length)
            yield from chain.from_iterable(split_on_oom(branched, owned, ModelError(NO_ROOM)))
    for batch in batches([len(row[-1]) for row in whole], budget):
        yield from split_on_oom(partial(_whole, editable), [whole[i] for i in batch], ModelError(NO_ROOM))


def _whole(editable: Editable, rows: Sequence[Row]) -> tuple[list[Context], Tensor]:
    """Run every row from its first token on."""
    reads = torch.tensor([(i, len(context) - 1) for i, row in enumerate(rows) for context in row])
    logits = replay.forward(editable, pad([row[-1] for row in rows]), reads)
    return [context for row in rows for context in row], log_softmax(logits)


def _families(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows adjacent in order that share at least half of their tokens; a row that shares less is alone."""
    families: list[list[Row]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row[-1]))
        if families and 2 * _common(families[-1][0][-1], row[-1]) >= longest:
            families[-1].append(row)
        else:
            families.append([row])
            longest = len(row[-1])
    return families


def _common(a: Context, b: Context) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _branched(editable: Editable, owned: Sequence[tuple[int, Row]], stem: int) -> list[tuple[list[Context], Tensor]]:
    """Run the first `stem` tokens of each family once, then the rest of every row from their keys and values.

    `owned` are rows, each with the number of its family; rows of a family are adjacent.
    """
    cache, scored = DynamicCache(), []
    beginnings = {family: row[-1][:stem] for family, row in owned}
    numbers = {family: number for number, family in enumerate(beginnings)}
    rows = [(numbers[family], row) for family, row in owned]
    early = [(owner, context) for owner, row in rows for context in row if len(context) <= stem]
    reads = torch.tensor([(owner, len(context) - 1) for owner, context in early], dtype=torch.long).reshape(-1, 2)
    ids = torch.tensor(list(beginnings.values()), device=editable.device)
    with replay.unembedding(editable, reads):
        logits = editable.run(input_ids=ids, cache=cache, use_cache=True).logits[0]
    if early:
        scored.append(([context for _, context in early], log_softmax(logits)))
    cache.batch_select_indices(torch.tensor([owner for owner, _ in rows]))  # on the CPU: layers may be anywhere
    late = [(i, context) for i, (_, row) in enumerate(rows) for context in row if len(context) > stem]
    with replay.unembedding(editable, torch.tensor([(i, len(context) - 1 - stem) for i, context in late])):
        tails = pad([row[-1][stem:] for _, row in rows]).to(editable.device)
        logits = editable.run(input_ids=tails, cache=cache, use_cache=True).logits[0]
    return [*scored, ([context for _, context in late], log_softmax(logits))]
