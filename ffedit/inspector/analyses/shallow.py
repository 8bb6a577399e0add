"""Is what a key detects shallow: do its triggers end in the same token, or the same two?

Geva et al. 2021 (arXiv 2012.14913, section 3.2) let people look for patterns that repeat in at least three of a key's
triggers, and call those shallow that are a last word or n-gram. This is the part of it that needs no people. Of c among
t triggers that end alike, chance explains what a Poisson variable of mean t·p explains, where p is how often the text
has this token or pair. They make a *shallow pattern* where c >= 3 and so many would come together by chance with a
probability below 0.001. A trigger is *covered* by it, and a key is *shallow* where at least half its triggers are.
What people would call semantic (a topic, a kind of text) is seen by no such rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.inspector.corpus_pass.rows import NOTHING, RowStore
from ffedit.inspector.views.view import View

FEWEST = 3
CHANCE = 1e-3
SHALLOW = 0.5
# Pairs of tokens are counted by their hash, so that the table does not grow with the text.
PAIRS = 2**20
PAIR = 0x9E3779B1


def pair_hash(first: Tensor, second: Tensor) -> Tensor:
    """Under which number a pair of tokens is counted, [..] int64."""
    return (first.long() * PAIR + second) % PAIRS


@dataclass(frozen=True, eq=False)
class Frequencies:
    """How often a text has its tokens.

    Attributes:
        unigrams: counts [vocabulary].
        pairs: counts of pairs of neighbours by `pair_hash`, [PAIRS]; never too small.
    """

    unigrams: Tensor
    pairs: Tensor

    def of(self, last: Tensor) -> Tensor:
        """The share of tokens that are these, [..] float64."""
        return self.unigrams[last.clamp(min=0)] / self.unigrams.sum().double()

    def of_pairs(self, previous: Tensor, last: Tensor) -> Tensor:
        """The share of pairs that are these, [..] float64, at most."""
        return self.pairs[pair_hash(previous.clamp(min=0), last.clamp(min=0))] / self.pairs.sum().double().clamp(min=1)


@dataclass(frozen=True)
class Shallow(View):
    """What the triggers of one key share.

    Attributes:
        last: the last token that most of them end in.
        last_share: the share of them that do.
        last_chance: the share of the text's tokens that are this one.
        pair: the last two tokens that most of them end in; None where all are one token long.
        pair_share: the share of them that do.
        pair_chance: the share of the text's pairs that are this one, at most.
        covered: the share of them that a shallow pattern covers.
        is_shallow: whether that is at least half.
    """

    last: int
    last_share: float
    last_chance: float
    pair: tuple[int, int] | None
    pair_share: float
    pair_chance: float
    covered: float
    is_shallow: bool


@dataclass(frozen=True, eq=False)
class Endings:
    """How the triggers of several keys end; where a key has fewer than t, `NOTHING` stands for the others.

    Attributes:
        previous: the last but one tokens, [keys, t].
        last: the last tokens, [keys, t].
        by_last: whether a pattern of last tokens covers each, [keys, t].
        by_pair: whether a pattern of last pairs does, [keys, t].
        shares: how many triggers of the key end in each one's last token, and in its last two, [2, keys, t].
        chances: how often the text has them, [2, keys, t].
    """

    previous: Tensor
    last: Tensor
    by_last: Tensor
    by_pair: Tensor
    shares: Tensor
    chances: Tensor

    @property
    def count(self) -> Tensor:
        """How many triggers each key has, [keys]."""
        return (self.last != NOTHING).sum(-1)

    @property
    def covered(self) -> Tensor:
        """The share of each key's triggers that a shallow pattern covers, [keys]; NaN without triggers."""
        return (self.by_last | self.by_pair).sum(-1) / self.count

    def of(self, key: int) -> Shallow | None:
        """Those of one key, in words; None without triggers."""
        if not self.count[key]:
            return None
        (last, pair), chances = self.shares[:, key].argmax(-1).tolist(), self.chances[:, key]
        count, covered = int(self.count[key]), float(self.covered[key])
        one = (int(self.previous[key, pair]), int(self.last[key, pair]))
        return Shallow(
            last=int(self.last[key, last]),
            last_share=float(self.shares[0, key, last]) / count,
            last_chance=float(chances[0, last]),
            pair=None if one[0] == NOTHING else one,
            pair_share=float(self.shares[1, key, pair]) / count,
            pair_chance=float(chances[1, pair]),
            covered=covered,
            is_shallow=covered >= SHALLOW,
        )


def endings(store: RowStore, places: Tensor, text: Frequencies) -> Endings:
    """How the triggers at `places` [keys, t] end, and which of them shallow patterns cover."""
    return compared(store.tokens(places, -1), store.tokens(places), text)


def compared(previous: Tensor, last: Tensor, text: Frequencies) -> Endings:
    """Triggers by their last tokens, each [keys, t]."""
    there, paired = last != NOTHING, (last != NOTHING) & (previous != NOTHING)
    names = (last.masked_fill(~there, NOTHING), (previous * len(text.unigrams) + last).masked_fill(~paired, NOTHING))
    shares = torch.stack([_alike(name) for name in names])
    chances = torch.stack([text.of(last), text.of_pairs(previous, last)]) * torch.stack([there, paired])
    mean = chances * there.sum(-1, keepdim=True)
    # P(X >= c) of a Poisson variable is the regularised lower incomplete gamma function.
    surprising = torch.special.gammainc(shares.double().clamp(min=1), mean.clamp(min=1e-300)) < CHANCE
    patterns = (shares >= FEWEST) & surprising
    return Endings(previous, last, patterns[0], patterns[1], shares, chances)


def _alike(names: Tensor) -> Tensor:
    """How many entries of its row, itself among them, each of `names` [keys, t] equals; 0 where it is `NOTHING`."""
    ordered, order = names.sort(-1)
    begins = torch.searchsorted(ordered, ordered)
    ends = torch.searchsorted(ordered, ordered, right=True)
    counts = torch.empty_like(names).scatter_(-1, order, ends - begins)
    return counts.masked_fill(names == NOTHING, 0)
