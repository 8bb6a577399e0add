"""Passes over contexts, the tokens before a prediction, in which each token is run once.

That is as far as it is worth a pass of its own:

- a context that is a prefix of another is read while that one is run, and needs no row;
- rows that share at least half of their tokens are a family; where it is large (prompts behind one sentence) they run
  these once, as their *stem*; the rest of each row, its *tail*, goes on from the stem's keys and values (`Past`). A
  model that is not `ragged` runs every row whole.

Rows run in batches of similar lengths, padded on the right, where causal attention does not see the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.inference.batching import batches, split_on_oom
from ffedit.inference.past import Past, cache_of, inputs_after
from ffedit.model.editable import Editable
from ffedit.model.tokenization import pad

Context: TypeAlias = tuple[int, ...]
# Contexts that are run together, each a prefix of the next: the last one holds all tokens.
Row: TypeAlias = list[Context]
# A stem, and a row that begins with it; a row that shares nothing is its own stem.
Branch: TypeAlias = tuple[Context, Row]
T = TypeVar("T")
# Runs the model on token ids [rows, tokens], right-padded, with its further inputs (a cache of earlier tokens, mask,
# positions), and returns what it computed at the (row, position) pairs, [k, 2].
Read: TypeAlias = Callable[[Tensor, dict[str, Any], Tensor], T]

# Tokens that a stem must save, since its tails take a pass of their own.
WORTH = 64
NO_MEMORY = "not enough memory to read a single text; use a smaller dtype, or another --device"


@dataclass(frozen=True, eq=False)
class Pass(Generic[T]):
    """Contexts that one pass ended in, what was read there, and what goes on from there."""

    contexts: list[Context]
    read: T  # of each context
    rows: list[int]  # the row of `past` that begins with each
    past: Past | None  # None where the model cannot go on from rows of different lengths


@torch.no_grad()
def passes(
    editable: Editable, contexts: Collection[Context], budget: int, read: Read[T], refusal: Exception
) -> Iterator[list[Pass[T]]]:
    """Run `contexts` and yield the passes of each batch; a context and what extends it directly are in one batch.

    Args:
        editable: the model.
        contexts: token ids, distinct.
        budget: padded tokens in a batch; a batch has one row at least, and is halved where memory fails.
        read: runs the model, and returns what it computed.
        refusal: raised where there is no memory for a single row.
    """
    ragged = editable.resumable and editable.ragged
    rows = _rows(sorted(contexts))
    families = [_branches(family) for family in _families(rows)] if ragged else [[(row[-1], row)] for row in rows]
    lengths = [max(len(stem) for stem, _ in branches) for branches in families]
    stems = [len({stem for stem, _ in branches}) for branches in families]

    def run(branches: Sequence[Branch]) -> list[Pass[T]]:
        return list(_run(editable, branches, budget, read, ragged))

    for batch in batches(lengths, budget, rows=stems):
        yield from split_on_oom(run, [branch for i in batch for branch in families[i]], refusal)


def _rows(contexts: Sequence[Context]) -> list[Row]:
    """Return the rows to run for sorted `contexts`, where those that begin with a context directly follow it."""
    rows: list[Row] = []
    for context in contexts:
        if rows and context[: len(rows[-1][-1])] == rows[-1][-1]:
            rows[-1].append(context)
        else:
            rows.append([context])
    return rows


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


def _branches(family: list[Row]) -> list[Branch]:
    """Return the rows of a family with their stem where that is worth it, else each with itself."""
    first, last = family[0][-1], family[-1][-1]  # rows are sorted, so these share the fewest tokens
    stem = first[: _common(first, last)]
    return [(stem if len(stem) * (len(family) - 1) >= WORTH else row[-1], row) for row in family]


def _run(editable: Editable, branches: Sequence[Branch], budget: int, read: Read[T], ragged: bool) -> Iterator[Pass[T]]:
    """Run the stems, then all tails from their keys and values."""
    stems = list(dict.fromkeys(stem for stem, _ in branches))
    owner = {stem: i for i, stem in enumerate(stems)}
    early = [(owner[stem], context) for stem, row in branches for context in row if len(context) <= len(stem)]
    cache = DynamicCache() if ragged else None
    ends = _pairs([(i, len(context) - 1) for i, context in early])
    read_early = read(pad(stems).to(editable.device), {"cache": cache, "use_cache": ragged}, ends)
    past = None if cache is None else Past.of(cache, torch.zeros(len(stems), dtype=torch.long))
    yield Pass([context for _, context in early], read_early, [i for i, _ in early], past)
    late = [(owner[stem], row) for stem, row in branches if len(row[-1]) > len(stem)]
    if past is None or not late:
        return
    for batch in batches([len(row[-1]) - len(stems[i]) for i, row in late], budget):
        owners, tails = [late[i][0] for i in batch], [late[i][1] for i in batch]
        lengths = torch.tensor([len(stems[i]) for i in owners])
        width, ids = int(lengths.max()), pad([row[-1][len(stems[i]) :] for i, row in zip(owners, tails, strict=True)])
        cache = cache_of(past.aligned(torch.tensor(owners), lengths, width))
        late_ends = [(i, c) for i, row in enumerate(tails) for c in row if len(c) > len(stems[owners[i]])]
        inputs = {"cache": cache, "use_cache": True, **inputs_after(editable, lengths, width, ids.shape[1])}
        at = _pairs([(i, len(c) - 1 - len(stems[owners[i]])) for i, c in late_ends])
        read_late = read(ids.to(editable.device), inputs, at)
        yield Pass([c for _, c in late_ends], read_late, [i for i, _ in late_ends], Past.of(cache, width - lengths))


def _pairs(pairs: list[tuple[int, int]]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
