"""Analyses of a key by its triggers: shallow patterns, and the change of its coefficient without one token.

*Shallow patterns* are triggers that end in the same token, or the same two. Geva et al. 2021 (arXiv 2012.14913, section
3.2) let people look for patterns that repeat in at least three of a key's triggers, and call those shallow that are a
last word or n-gram. This is the part of it that needs no people. The number of triggers among t that end alike by
chance is modelled as a Poisson variable of mean t·p, where p is the frequency of this token or pair in the text. c
triggers make a *shallow pattern* where c >= 3 and the probability of c or more by chance is below 0.001. They are
*covered* by it, and a key is *shallow* where at least half its triggers are covered. Semantic patterns (a topic, a kind
of text) are not detected by this rule.

*Removal* (section 3.2, figure 3) takes the first, the last, or a random token out of a trigger prefix and measures the
relative change of its memory coefficient, (m' − m) / m, where each prefix is read at its last token. −1: the
coefficient is 0 without it; 0: it is unchanged. A token that the tokenizer puts in front of every text stays, and the
first token is the one after it. The random token is neither the first nor the last where there is a third one. A prefix
that would have nothing left is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from random import Random

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inference import replay
from ffedit.inference.batching import batches
from ffedit.inspector.rows import Row
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import pad

FEWEST = 3
CHANCE = 1e-3
SHALLOW = 0.5
# A trigger's prefix as it is, and without its first, its last and a random token.
VERSIONS = 4
TOKENS_PER_BATCH = 4096

Ending = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Frequencies:
    """Counts of a text's tokens and pairs of adjacent tokens."""

    counts: Counter[Ending]  # counts of single tokens and of pairs
    tokens: int  # number of tokens
    pairs: int  # number of pairs

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Frequencies:
        """Count the tokens and pairs of rows of token ids."""
        rows = list(rows)
        counts: Counter[Ending] = Counter(chain.from_iterable(zip(row, strict=True) for row in rows))
        tokens = counts.total()
        counts.update(chain.from_iterable(map(pairwise, rows)))
        return cls(counts, tokens, counts.total() - tokens)

    def share(self, ending: Ending) -> float:
        """Return the frequency of a token among the text's tokens, or of a pair among its pairs."""
        return self.counts[ending] / max(1, self.tokens if len(ending) == 1 else self.pairs)


@dataclass(frozen=True)
class Shallow:
    """The share of one key's triggers with a frequent ending."""

    covered: float  # share of the triggers that a shallow pattern covers
    is_shallow: bool  # whether `covered` is at least half

    @classmethod
    def of(cls, triggers: Sequence[Row], text: Frequencies) -> Shallow | None:
        """Find the shallow patterns in the triggers of a key; None without triggers."""
        if not triggers:
            return None
        lasts = [ids[-1:] for ids in triggers]
        pairs = [ids[-2:] for ids in triggers]  # a prefix of one token has no pair
        counts = Counter(lasts) + Counter(pair for pair in pairs if len(pair) == 2)
        patterns = {ending for ending, count in counts.items() if _surprising(count, len(triggers), text.share(ending))}
        covered = sum(bool({last, pair} & patterns) for last, pair in zip(lasts, pairs, strict=True)) / len(triggers)
        return cls(covered, covered >= SHALLOW)


def _surprising(count: int, triggers: int, chance: float) -> bool:
    """Return whether `count` of `triggers` triggers are a pattern, if each has its ending with probability `chance`."""
    # P(X >= c) of a Poisson variable is the regularised lower incomplete gamma function.
    c, mean = torch.tensor([count, triggers * chance], dtype=torch.float64)
    return count >= FEWEST and float(torch.special.gammainc(c, mean)) < CHANCE


@dataclass(frozen=True)
class Removal:
    """The mean relative change of a key's coefficient over its triggers, by the token that is removed."""

    first: float  # change without the first token
    last: float  # change without the last token
    random: float  # change without one drawn at random
    triggers: int  # number of triggers


def _shortened(ids: Row, start: Sequence[int], rng: Random) -> list[Row]:
    """Return a prefix, then without its first, its last and a random token; no rows if one of them would be empty.

    `start` are the ids that the tokenizer puts in front of every text, which are never removed.
    """
    first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, start, strict=False)))
    if len(ids) - first < 2:
        return []
    inside = range(first + 1, len(ids) - 1) or range(first, len(ids))
    return [ids, *(ids[:i] + ids[i + 1 :] for i in (first, len(ids) - 1, rng.choice(inside)))]


def removal(editable: Editable, layer: FeedForward, key: int, prefixes: Sequence[Row]) -> Removal | None:
    """Return the effect of removing tokens from the triggers of a key of a causal decoder's layer.

    None where no trigger has two tokens. The layer may be reduced to some of its experts.
    """
    rng = Random(f"{layer.layer}/{key}")
    rows = list(chain.from_iterable(_shortened(ids, editable.start_tokens, rng) for ids in prefixes))
    if not rows:
        return None
    coefficients = double(_last_coefficients(editable, layer, key, rows)).view(-1, VERSIONS)
    first, last, random = ((coefficients[:, 1:] - coefficients[:, :1]) / coefficients[:, :1]).mean(0).tolist()
    return Removal(first, last, random, len(coefficients))


@torch.no_grad()
def _last_coefficients(editable: Editable, layer: FeedForward, key: int, rows: Sequence[Row]) -> Tensor:
    """Return the coefficient of a key of a layer at the last token of each row, [n] float32."""
    result = torch.empty(len(rows))
    for members in batches([len(ids) for ids in rows], TOKENS_PER_BATCH):
        ids = pad([rows[i] for i in members])
        ends = torch.arange(len(members)) * ids.shape[1] + torch.tensor([len(rows[i]) - 1 for i in members])
        with layer.keys() as seen:
            replay.run_to(editable, ids, layer.layer)
        result[members] = seen()[ends, key].float().cpu()
    return result
