"""Analyses of keys by their triggers: shallow patterns, and the change of a coefficient without one token.

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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from random import Random

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inference import replay
from ffedit.inference.batching import batches
from ffedit.inspector.rows import NOTHING, Row
from ffedit.inspector.views import View
from ffedit.model.editable import Stack
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import pad

FEWEST = 3
CHANCE = 1e-3
SHALLOW = 0.5
# Pairs of tokens are counted by their hash, so that the table does not grow with the text.
PAIRS = 2**20
PAIR = 0x9E3779B1
REMOVED = ("first", "last", "random")
TOKENS_PER_BATCH = 4096


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
    alike: Tensor  # number of the key's triggers that end in each one's last token, and in its last two, [2, keys, t]
    chances: Tensor  # frequency of these tokens and pairs in the text, [2, keys, t]

    @classmethod
    def of(cls, previous: Tensor, last: Tensor, text: Frequencies) -> Endings:
        """Find the shallow patterns in triggers with second-to-last and last tokens `previous` and `last` [keys, t]."""
        known = torch.stack([last != NOTHING, (last != NOTHING) & (previous != NOTHING)])
        names = torch.stack([last, previous * len(text.unigrams) + last]).masked_fill(~known, NOTHING)
        alike = torch.stack([_alike(name) for name in names])
        chances = text.of(previous, last) * known
        mean = chances * known[0].sum(-1, keepdim=True)
        # P(X >= c) of a Poisson variable is the regularised lower incomplete gamma function.
        surprising = torch.special.gammainc(double(alike).clamp(min=1), mean.clamp(min=1e-300)) < CHANCE
        by_last, by_pair = (alike >= FEWEST) & surprising
        return cls(previous, last, by_last, by_pair, alike, chances)

    @property
    def count(self) -> Tensor:
        """Number of triggers of each key, [keys]."""
        return (self.last != NOTHING).sum(-1)

    @property
    def covered(self) -> Tensor:
        """Share of each key's triggers that a shallow pattern covers, [keys]; NaN without triggers."""
        return (self.by_last | self.by_pair).sum(-1) / self.count

    def most_frequent(self, key: int) -> Shallow | None:
        """Return the most frequent endings of one key; None without triggers."""
        if not self.count[key]:
            return None
        (last, pair), chances = self.alike[:, key].argmax(-1).tolist(), self.chances[:, key]
        count, covered = int(self.count[key]), float(self.covered[key])
        tokens = (int(self.previous[key, pair]), int(self.last[key, pair]))
        return Shallow(
            last=int(self.last[key, last]),
            last_share=float(self.alike[0, key, last]) / count,
            last_chance=float(chances[0, last]),
            pair=None if tokens[0] == NOTHING else tokens,
            pair_share=float(self.alike[1, key, pair]) / count,
            pair_chance=float(chances[1, pair]),
            covered=covered,
            is_shallow=covered >= SHALLOW,
        )


def _alike(names: Tensor) -> Tensor:
    """Count the entries of its row that equal each of `names` [keys, t], itself included; 0 where it is `NOTHING`."""
    ordered, order = names.sort(-1)
    begins = torch.searchsorted(ordered, ordered)
    ends = torch.searchsorted(ordered, ordered, right=True)
    counts = torch.empty_like(names).scatter_(-1, order, ends - begins)
    return counts.masked_fill(names == NOTHING, 0)


@dataclass(frozen=True)
class Removal(View):
    """The mean relative change of a key's coefficient over its triggers, by the token that is removed."""

    first: float  # change without the first token
    last: float  # change without the last token
    random: float  # change without one drawn at random
    triggers: int  # number of triggers


def _shortened(ids: Row, start: Sequence[int], rng: Random) -> list[Row]:
    """Return a prefix, and without its first, its last and a random token; nothing where nothing would be left.

    `start` are the ids that the tokenizer puts in front of every text, which are never removed.
    """
    first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, start, strict=False)))
    if len(ids) - first < 2:
        return []
    inside = range(first + 1, len(ids) - 1) or range(first, len(ids))
    return [ids, *(ids[:i] + ids[i + 1 :] for i in (first, len(ids) - 1, rng.choice(inside)))]


def removals(
    stack: Stack, layer: FeedForward, keys: Sequence[int], prefixes: Sequence[Sequence[Row]], seed: int = 0
) -> list[Removal | None]:
    """Return what the removal of tokens from their triggers changes for some keys of a causal decoder's layer.

    None for a key that has no trigger of two tokens. The layer may be reduced to some of its experts.
    """
    start, each = stack.start_tokens, 1 + len(REMOVED)
    rows: list[Row] = []
    counts = []
    for key, triggers in zip(keys, prefixes, strict=True):
        rng, before = Random(f"{seed}/{layer.layer}/{key}"), len(rows)
        rows += chain.from_iterable(_shortened(ids, start, rng) for ids in triggers)
        counts.append(len(rows) - before)
    key_of = torch.tensor(keys, dtype=torch.long).repeat_interleave(torch.tensor(counts, dtype=torch.long))
    coefficients = double(_last_coefficients(stack, layer, rows, key_of)).view(-1, each)
    changes = (coefficients[:, 1:] - coefficients[:, :1]) / coefficients[:, :1]
    result: list[Removal | None] = []
    for of_key in changes.split([count // each for count in counts]):
        first, last, random = of_key.mean(0).tolist()
        result.append(Removal(first, last, random, len(of_key)) if len(of_key) else None)
    return result


@torch.no_grad()
def _last_coefficients(stack: Stack, layer: FeedForward, rows: Sequence[Row], keys: Tensor) -> Tensor:
    """Return the coefficient of the key `keys[i]` of a layer at the last token of `rows[i]`, [n] float32."""
    result = torch.empty(len(rows))
    for members in batches([len(ids) for ids in rows], TOKENS_PER_BATCH):
        ids = pad([rows[i] for i in members])
        ends = torch.arange(len(members)) * ids.shape[1] + torch.tensor([len(rows[i]) - 1 for i in members])
        with layer.keys() as seen:
            replay.run_to(stack, ids, layer.layer)
        result[members] = seen()[ends, keys[members]].float().cpu()
    return result
