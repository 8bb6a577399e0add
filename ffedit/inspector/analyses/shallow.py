"""Shallow patterns of a key: triggers that end in the same token, or the same two.

Geva et al. 2021 (arXiv 2012.14913, section 3.2) let people look for patterns that repeat in at least three of a key's
triggers, and call those shallow that are a last word or n-gram. This is the part of it that needs no people. The number
of triggers among t that end alike by chance is modelled as a Poisson variable of mean t·p, where p is the frequency of
this token or pair in the text. c triggers make a *shallow pattern* where c >= 3 and the probability of c or more by
chance is below 0.001. They are *covered* by it, and a key is *shallow* where at least half its triggers are covered.
Semantic patterns (a topic, a kind of text) are not detected by this rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inspector.corpus_pass.rows import NOTHING, RowStore
from ffedit.inspector.slots import View

FEWEST = 3
CHANCE = 1e-3
SHALLOW = 0.5
# Pairs of tokens are counted by their hash, so that the table does not grow with the text.
PAIRS = 2**20
PAIR = 0x9E3779B1


def pair_hash(first: Tensor, second: Tensor) -> Tensor:
    """Return the index under which a pair of tokens is counted, [..] int64."""
    return (first.long() * PAIR + second) % PAIRS


@dataclass(frozen=True, eq=False)
class Frequencies:
    """Counts of a text's tokens and pairs of tokens."""

    unigrams: Tensor  # counts [vocabulary]
    pairs: Tensor  # counts of adjacent pairs by `pair_hash`, [PAIRS]; collisions make them upper bounds

    def of(self, previous: Tensor, last: Tensor) -> Tensor:
        """Return the frequencies of tokens `last` [..], and upper bounds of those of the pairs, [2, ..] float64."""
        previous, last = previous.clamp(min=0), last.clamp(min=0)
        pairs = self.pairs[pair_hash(previous, last)] / double(self.pairs.sum()).clamp(min=1)
        return torch.stack([self.unigrams[last] / double(self.unigrams.sum()), pairs])


@dataclass(frozen=True)
class Shallow(View):
    """The most frequent endings of the triggers of one key."""

    last: int  # the most frequent last token of the triggers
    last_share: float  # share of the triggers that end in it
    last_chance: float  # share of the text's tokens that are this one
    pair: tuple[int, int] | None  # the most frequent last two tokens; None where all triggers are one token long
    pair_share: float  # share of the triggers that end in them
    pair_chance: float  # share of the text's pairs that are this one, at most
    covered: float  # share of the triggers that a shallow pattern covers
    is_shallow: bool  # whether `covered` is at least half


@dataclass(frozen=True, eq=False)
class Endings:
    """Endings of the triggers of several keys; where a key has fewer than t, the others are `NOTHING`."""

    previous: Tensor  # the second-to-last tokens, [keys, t]
    last: Tensor  # the last tokens, [keys, t]
    by_last: Tensor  # whether a pattern of last tokens covers each, [keys, t]
    by_pair: Tensor  # whether a pattern of last pairs covers each, [keys, t]
    shares: Tensor  # number of the key's triggers that end in each one's last token, and in its last two, [2, keys, t]
    chances: Tensor  # frequency of these tokens and pairs in the text, [2, keys, t]

    @property
    def count(self) -> Tensor:
        """Number of triggers of each key, [keys]."""
        return (self.last != NOTHING).sum(-1)

    @property
    def covered(self) -> Tensor:
        """Share of each key's triggers that a shallow pattern covers, [keys]; NaN without triggers."""
        return (self.by_last | self.by_pair).sum(-1) / self.count

    def of(self, key: int) -> Shallow | None:
        """Return the most frequent endings of one key; None without triggers."""
        if not self.count[key]:
            return None
        (last, pair), chances = self.shares[:, key].argmax(-1).tolist(), self.chances[:, key]
        count, covered = int(self.count[key]), float(self.covered[key])
        endings = (int(self.previous[key, pair]), int(self.last[key, pair]))
        return Shallow(
            last=int(self.last[key, last]),
            last_share=float(self.shares[0, key, last]) / count,
            last_chance=float(chances[0, last]),
            pair=None if endings[0] == NOTHING else endings,
            pair_share=float(self.shares[1, key, pair]) / count,
            pair_chance=float(chances[1, pair]),
            covered=covered,
            is_shallow=covered >= SHALLOW,
        )


def endings(store: RowStore, positions: Tensor, text: Frequencies) -> Endings:
    """Return the endings of the triggers at flat indices `positions` [keys, t], and the shallow patterns in them."""
    return compared(store.tokens(positions, -1), store.tokens(positions), text)


def compared(previous: Tensor, last: Tensor, text: Frequencies) -> Endings:
    """Return the endings of triggers with second-to-last tokens `previous` and last tokens `last`, each [keys, t]."""
    known = torch.stack([last != NOTHING, (last != NOTHING) & (previous != NOTHING)])
    names = torch.stack([last, previous * len(text.unigrams) + last]).masked_fill(~known, NOTHING)
    shares = torch.stack([_alike(name) for name in names])
    chances = text.of(previous, last) * known
    mean = chances * known[0].sum(-1, keepdim=True)
    # P(X >= c) of a Poisson variable is the regularised lower incomplete gamma function.
    surprising = torch.special.gammainc(double(shares).clamp(min=1), mean.clamp(min=1e-300)) < CHANCE
    patterns = (shares >= FEWEST) & surprising
    return Endings(previous, last, patterns[0], patterns[1], shares, chances)


def _alike(names: Tensor) -> Tensor:
    """Count the entries of its row that equal each of `names` [keys, t], itself included; 0 where it is `NOTHING`."""
    ordered, order = names.sort(-1)
    begins = torch.searchsorted(ordered, ordered)
    ends = torch.searchsorted(ordered, ordered, right=True)
    counts = torch.empty_like(names).scatter_(-1, order, ends - begins)
    return counts.masked_fill(names == NOTHING, 0)
