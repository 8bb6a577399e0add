"""The change of a key's coefficient when one token is removed from its trigger.

Geva et al. 2021 (arXiv 2012.14913, section 3.2 and figure 3) take the first, the last, or a random token out of a
trigger prefix and measure the relative change of its memory coefficient, (m' − m) / m, where each prefix is read at its
last token. −1: the coefficient is 0 without it; 0: it is unchanged. A token that the tokenizer puts in front of every
text stays, and the first token is the one after it. The random token is neither the first nor the last where there is a
third one. A prefix that would have nothing left is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inference import replay
from ffedit.inference.batching import batches
from ffedit.inspector.corpus_pass.rows import Row
from ffedit.inspector.slots import View
from ffedit.model.editable import Stack
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import pad

REMOVED = ("first", "last", "random")
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Removal(View):
    """The mean relative change of a key's coefficient over its triggers, by the token that is removed."""

    first: float  # change without the first token
    last: float  # change without the last token
    random: float  # change without one drawn at random
    triggers: int  # number of triggers


def shortened(ids: Row, start: int | None, rng: Random) -> tuple[Row, ...] | None:
    """Return a prefix without its first, its last and a random token; None where nothing would be left.

    `start` is the id that the tokenizer puts in front of every text, if it does.
    """
    first = 1 if ids[0] == start else 0
    if len(ids) - first < 2:
        return None
    inside = range(first + 1, len(ids) - 1) or range(first, len(ids))
    return tuple(ids[:i] + ids[i + 1 :] for i in (first, len(ids) - 1, rng.choice(inside)))


def removals(
    stack: Stack, layer: FeedForward, keys: Sequence[int], prefixes: Sequence[Sequence[Row]], seed: int = 0
) -> list[Removal | None]:
    """Remove tokens from the triggers of some keys of a causal decoder's layer, or of some of its experts.

    Returns:
        The changes of each key's coefficient; None where it has no trigger of two tokens.
    """
    start = stack.tokenizer.bos_token_id
    rows: list[Row] = []
    key_of: list[int] = []
    counts = []
    for key, triggers in zip(keys, prefixes, strict=True):
        rng, count = Random(f"{seed}/{layer.layer}/{key}"), 0
        for ids in triggers:
            if (less := shortened(ids, start, rng)) is not None:
                rows += [ids, *less]
                count += 1
        key_of += [key] * count * (1 + len(REMOVED))
        counts.append(count)
    coefficients = last_coefficients(stack, layer, rows, torch.tensor(key_of, dtype=torch.long))
    coefficients = double(coefficients).view(-1, 1 + len(REMOVED))
    changes = (coefficients[:, 1:] - coefficients[:, :1]) / coefficients[:, :1]
    result: list[Removal | None] = []
    for of_key in changes.split(counts):
        first, last, random = of_key.mean(0).tolist()
        result.append(Removal(first, last, random, len(of_key)) if len(of_key) else None)
    return result


@torch.no_grad()
def last_coefficients(stack: Stack, layer: FeedForward, rows: Sequence[Row], keys: Tensor) -> Tensor:
    """Return the coefficient of the key `keys[i]` of a layer at the last token of `rows[i]`, [n] float32."""
    result = torch.empty(len(rows))
    for members in batches([len(ids) for ids in rows], TOKENS_PER_BATCH):
        ids = pad([rows[i] for i in members])
        ends = torch.arange(len(members)) * ids.shape[1] + torch.tensor([len(rows[i]) - 1 for i in members])
        with layer.keys() as seen:
            replay.run_to(stack, ids, layer.layer)
        result[members] = seen()[ends, keys[members]].float().cpu()
    return result
