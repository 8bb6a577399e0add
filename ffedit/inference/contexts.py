"""Passes over contexts, the tokens before a prediction, in which each token is run once.

Contexts that begin alike are a tree: its tokens stand in one row, those of a common beginning once, and each token
attends to those before it in its own context only. A row holds some hundred tokens, whether its contexts share any or
not, so that hardly any is padded. A row too wide would cost more attention than it saves.

The model receives each token's position, and a mask, which replaces its own. Where it takes none, or a layer attends to
less than all earlier tokens (a sliding window shorter than a context), only a context that begins with all of another
shares its row (`Editable.packed`). Configurations call a window by many names, or do not mention it, so it is measured
whether the last token of a text as long as the contexts sees its beginning, in each layer (`attends_to_all`). That
takes two passes over one text, once for a model and length, and only when contexts are as long. The passes compare
outputs of layers, equal to the last bit beyond a window; logits might change by less than 16 bits show.

Rows run in batches of similar lengths, padded on the right, where nothing sees the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.inference.batching import batches, split_on_oom
from ffedit.inference.replay import Past, Prefix, logits_at, takes_positions
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture, replace_input, watched
from ffedit.model.tokenization import pad

Context: TypeAlias = tuple[int, ...]
T = TypeVar("T")
# Runs the model on token ids [rows, tokens], right-padded, with its further inputs (a cache, mask, positions), and
# returns what it computed at the (row, column) pairs, [k, 2].
Read: TypeAlias = Callable[[Tensor, dict[str, Any], Tensor], T]

# Most tokens of a row: `WIDTH`, or `TIMES` its longest context if that is more and contexts share half their tokens.
WIDTH, TIMES = 128, 4
NO_MEMORY = "not enough memory to read a single text; use a smaller dtype, or another --device"
# Implementations of attention that take a mask [tokens, tokens].
MASKED = ("eager", "sdpa")
# Share of the tested length by which `attends_to_all` makes its text longer: so many tokens are changed at once that
# 16-bit numbers show it.
FRONT = 0.25


@dataclass(frozen=True, eq=False)
class Pass(Generic[T]):
    """Result of one pass at the end of each of its contexts, and the prefixes for passes that continue them."""

    contexts: list[Context]
    read: T  # result of each context
    prefixes: list[Prefix]  # prefix of each context; empty without `keep`


@torch.no_grad()
def passes(
    editable: Editable,
    contexts: Collection[Context],
    budget: int,
    read: Read[T],
    refusal: Exception,
    keep: bool,
) -> Iterator[Pass[T]]:
    """Run `contexts` and yield the passes.

    Args:
        editable: the model.
        contexts: token ids, distinct.
        budget: padded tokens in a batch; a batch has one row at least, and is halved where memory fails.
        read: runs the model, and returns what it computed.
        refusal: raised where there is no memory for a single context.
        keep: whether to keep the passes' keys and values, for passes that continue them; the model must be `resumable`.
    """
    # No row is longer than the budget.
    longest = longest_packed(editable, min(budget, max(map(len, contexts), default=0)))
    # Separately, since a batch with trees has one mask for all its rows, and that ignores windows.
    for members, width in (
        ([context for context in contexts if len(context) > longest], 0),
        ([context for context in contexts if len(context) <= longest], editable.max_tokens),
    ):
        rows = _rows(sorted(members), width, budget)
        for indices in batches([len(row.ids) for row in rows], budget):
            batch = [rows[i] for i in indices]
            every = [context for row in batch for context in row.contexts]

            def run(
                subset: Sequence[Context], batch: list[_Row] = batch, count: int = len(every), width: int = width
            ) -> Pass[T]:
                fitting = batch if len(subset) == count else _rows(sorted(subset), width, budget)
                return _run(editable, fitting, read, keep)

            yield from split_on_oom(run, every, refusal)


@dataclass(eq=False)
class _Row:
    """Contexts in one row: the tree of their tokens, in the order in which sorted contexts reach them."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # column of the token before each; −1 for a first one
    contexts: list[Context] = field(default_factory=list)
    columns: list[list[int]] = field(default_factory=list)  # the columns of each context's tokens

    def common(self, context: Context) -> int:
        """Return how many tokens `context` shares with the last one: the most with any, since they come sorted."""
        pairs = zip(self.contexts[-1], context, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def add(self, context: Context) -> None:
        """Append the tokens of `context` that no earlier one shares."""
        common = self.common(context) if self.contexts else 0
        columns = self.columns[-1][:common] if self.contexts else []
        for token in context[common:]:
            self.parents.append(columns[-1] if columns else -1)
            columns.append(len(self.ids))
            self.ids.append(token)
        self.contexts.append(context)
        self.columns.append(columns)

    @property
    def branches(self) -> bool:
        """True if the row holds more than the tokens of one text, in order."""
        return len(self.ids) > len(self.contexts[-1])


def _rows(contexts: Sequence[Context], width: int, budget: int) -> list[_Row]:
    """Put sorted `contexts` into rows of up to `width` tokens; with 0, one shares only the row of its own prefix."""
    rows: list[_Row] = []
    longest = 0
    for context in contexts:
        if rows:
            common, row = rows[-1].common(context), rows[-1]
            longest = max(longest, len(context))
            wide = TIMES * longest if 2 * common >= len(context) else 0
            most = min(width, budget, max(WIDTH, wide))
            follows = common == len(row.contexts[-1]) and not row.branches
            if follows or len(row.ids) + len(context) - common <= most:
                row.add(context)
                continue
        rows.append(_Row())
        rows[-1].add(context)
        longest = len(context)
    return rows


def _run(editable: Editable, rows: Sequence[_Row], read: Read[T], keep: bool) -> Pass[T]:
    ids, cache = pad([row.ids for row in rows]), DynamicCache() if keep else None
    inputs = {"cache": cache, "use_cache": keep, **_tree(editable, rows, ids.shape[1])}
    ends = torch.tensor([(i, columns[-1]) for i, row in enumerate(rows) for columns in row.columns])
    values = read(ids.to(editable.device), inputs, ends)
    prefixes = []
    if cache is not None:
        past = Past.of(cache)
        prefixes = [Prefix(past, i, columns) for i, row in enumerate(rows) for columns in row.columns]
    return Pass([context for row in rows for context in row.contexts], values, prefixes)


def _tree(editable: Editable, rows: Sequence[_Row], width: int) -> dict[str, Tensor]:
    """Return the mask and positions that make trees of rows; empty if all are plain texts."""
    if not any(row.branches for row in rows):
        return {}
    seen = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        visible, depth = seen[i].numpy(), positions[i].numpy()
        for column, parent in enumerate(row.parents):
            if parent >= 0:
                visible[column] |= visible[parent]
                depth[column] = depth[parent] + 1
    dtype = editable.model.dtype
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return {"attention_mask": mask[:, None].to(editable.device), "position_ids": positions.to(editable.device)}


def longest_packed(editable: Editable, longest: int) -> int:
    """Return the most tokens of a context in which each layer attends to all earlier ones; 0 where none shares a row.

    It is searched for by doubling, only up to `longest` tokens, and kept in `Editable.packed`.
    """
    lengths = [editable.packed]
    while editable.packed and not editable.windowed and lengths[-1] < min(longest, editable.max_tokens):
        lengths.append(min(2 * lengths[-1], editable.max_tokens))
    for length in reversed(lengths[1:]):  # the longest first: it is the only one where there is no window
        if attends_to_all(editable, length):
            editable.packed = length
            break
        editable.windowed = True
    return editable.packed


@torch.no_grad()
def attends_to_all(editable: Editable, length: int) -> bool:
    """Return True if in each layer the last of `length` tokens attends to all of them.

    A text that is longer by n tokens is run twice, the second time with the states of its first n + 1 tokens negated in
    front of each layer. Where no window ends in between, the layer's output at the last token differs.
    """
    front = 1 + min(int(FRONT * length), editable.max_tokens - length)
    ids = editable.probe_ids(length + front - 1)

    def change(states: Tensor, recorded: Tensor) -> Tensor:
        return torch.cat([-recorded[:, :front], recorded[:, front:]], 1)

    def last_outputs(stack: ExitStack) -> list[Tensor]:
        outputs: list[Tensor] = []
        for layer in editable.layers:
            stack.enter_context(watched(layer, lambda output: outputs.append(output[:, -1].clone())))
        stack.enter_context(editable.without_logits())
        editable.forward(ids)
        return outputs

    with ExitStack() as stack:
        entering = stack.enter_context(capture(dict(enumerate(editable.layers)), inputs=True))
        plain = last_outputs(stack)
    with ExitStack() as stack:
        for i, layer in enumerate(editable.layers):
            stack.enter_context(replace_input(layer, partial(change, recorded=entering[i])))
        changed = last_outputs(stack)
    return not any(map(torch.equal, changed, plain))


@torch.no_grad()
def check(editable: Editable, ids: Tensor) -> float:
    """Compare two texts that branch in one row with each alone: largest absolute difference of logits.

    The texts are `ids` [1, n], and the same without a token in the middle. Infinite where the model takes no
    positions, or its attention no such mask; FlashAttention would end all work on its device.
    """
    if editable.model.config._attn_implementation not in MASKED or not takes_positions(editable):
        return float("inf")
    text = tuple(ids[0].tolist())
    texts = sorted([text, text[: len(text) // 2] + text[len(text) // 2 + 1 :]])
    row = _Row()
    for context in texts:
        row.add(context)
    together = _run(editable, [row], lambda *inputs: logits_at(editable, *inputs), keep=False).read
    alone = [editable.forward(torch.tensor([context])).logits[0, -1] for context in texts]
    return float((together - torch.stack(alone)).abs().max())
