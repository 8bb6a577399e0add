"""The report on a model's memories, layer by layer, as a value.

Every number is one `Measure`, with its definition in words and its section and figure in the paper (Geva et al. 2021,
arXiv 2012.14913), so that tables, figures and pages are made of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ffedit.algebra import bootstrap
from ffedit.inspector.slots import View
from ffedit.notebook import Displayed

Unit = Literal["share", "number", "rank", "change"]

SEED, DRAWS = 0, 500


@dataclass(frozen=True)
class CountedInterval(bootstrap.Interval):
    """A number, the ends of its interval, and the number of values behind it."""

    count: int


def interval(values: ArrayLike, statistic: Callable[..., Any] = np.mean) -> CountedInterval | None:
    """Return `statistic` (np.mean, np.median) of values [n] that are not NaN, with its interval; None without any."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if not len(array):
        return None
    bounds = bootstrap.statistic_interval(array, statistic, SEED, DRAWS)
    return CountedInterval(bounds.mean, bounds.low, bounds.high, len(array))


class Definition(NamedTuple):
    """Definition of a measure."""

    group: str  # the group of measures that it is drawn and tabulated with
    title: str  # its name in a few words
    unit: Unit  # share (0 to 1, probabilities too), number, rank (1 is best) or change (relative)
    paper: str  # section and figure
    text: str  # the definition in words


_KEYS, _FADE, _AGREE, _SURE = "shallow patterns", "removing a token", "keys and values", "sure values"
_RANK, _ACTIVE, _COUNT, _SETTLED, _CASES = "rank", "active memories", "effective memories", "residual", "four cases"
DEFINITIONS: dict[str, Definition] = {
    "shallow": Definition(
        _KEYS, "triggers covered", "share", "3.2, figure 2",
        "Triggers of a key that end in a token, or a pair of tokens, in which at least three of them end and which "
        "chance does not explain; mean over keys. Stands in for the shallow patterns that people find.",
    ),
    "shallow_last": Definition(
        _KEYS, "by last token", "share", "3.2, figure 2", "The same, by a last token only; mean over keys."
    ),
    "shallow_pair": Definition(
        _KEYS, "by last two", "share", "3.2, figure 2", "The same, by the last two tokens only; mean over keys."
    ),
    "shallow_keys": Definition(
        _KEYS, "shallow keys", "share", "3.2, figure 2", "Keys half of whose triggers, or more, are covered."
    ),
    "shallow_chance": Definition(
        _KEYS, "covered by chance", "share", "none", "Triggers covered, were they positions drawn at random."
    ),
    "removed_first": Definition(
        _FADE, "first token", "change", "3.2, figure 3",
        "(m' − m) / m of a trigger's coefficient without its first token; mean over triggers, then keys.",
    ),
    "removed_last": Definition(_FADE, "last token", "change", "3.2, figure 3", "The same without its last token."),
    "removed_random": Definition(
        _FADE, "random token", "change", "3.2, figure 3", "The same without a token drawn at random from between them."
    ),
    "agreement": Definition(
        _AGREE, "agreement", "share", "4.1, figure 4", "Keys whose value's top token is what follows the top trigger."
    ),
    "agreement_dealt": Definition(
        _AGREE, "by chance", "share", "4.1, figure 4", "The same with what follows another key's top trigger."
    ),
    "rank": Definition(
        _RANK, "next token", "rank", "4.1, figure 5",
        "Rank of what follows the top trigger in the value's distribution, 1 the best; median over keys.",
    ),
    "rank_dealt": Definition(
        _RANK, "random token", "rank", "4.1, figure 5", "The same of what follows another key's top trigger; median."
    ),
    "sure": Definition(
        _SURE, "max probability", "share", "4.2", "Probability of a value's top token; mean over all values."
    ),
    "surest_here": Definition(
        _SURE, "of the surest", "share", "4.2, table 2", "Share of the model's surest values that stand in this layer."
    ),
    "active_sign": Definition(
        _ACTIVE, "by sign", "share", "5.1, figure 7", "Memories with a positive coefficient; mean over positions."
    ),
    "active_norm": Definition(
        _ACTIVE, "by norm", "share", "none",
        "Memories with |m_i| ‖v_i‖ of at least 1% of the output's norm; mean over positions.",
    ),
    "effective": Definition(
        _COUNT, "effective number", "number", "none",
        "Participation ratio (Σ s_i²)² / Σ s_i⁴ of the strengths s_i = |m_i| ‖v_i‖; mean over positions.",
    ),
    "zero_agreement": Definition(
        _ACTIVE, "zero agreement", "share", "5.1, figure 8",
        "Positions at which the layer's top token is that of none of its memories with a positive coefficient; the "
        "paper asks silent ones, too.",
    ),
    "settled": Definition(
        _SETTLED, "already final", "share", "5.2, figure 9",
        "Positions at which the residual stream ahead of the layer's output predicts what the model says in the end.",
    ),
    "final": Definition(
        _SETTLED, "probability of it", "share", "5.2, figure 10",
        "Probability that it gives to what the model says in the end; mean over positions.",
    ),
    "case_residual": Definition(
        _CASES, "residual", "share", "5.2, figure 11", "The layer's prediction is that of the residual stream alone."
    ),
    "case_feed_forward": Definition(
        _CASES, "feed-forward", "share", "5.2, figure 11", "It is that of the feed-forward output alone."
    ),
    "case_agreement": Definition(_CASES, "agreement", "share", "5.2, figure 11", "It is that of both."),
    "case_compromise": Definition(
        _CASES, "compromise", "share", "5.2, figure 11", "It is that of neither (the paper's composition)."
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measure(View):
    """One number of every layer, with 95% intervals: Wilson's for proportions, otherwise the bootstrap's."""

    name: str  # one of `DEFINITIONS`
    values: tuple[float | None, ...]  # by layer; None where nothing could be measured
    low: tuple[float | None, ...]  # lower ends
    high: tuple[float | None, ...]  # upper ends
    counts: tuple[int, ...]  # number of keys or positions behind each

    @classmethod
    def of(cls, name: str, intervals: Sequence[CountedInterval | None]) -> Measure:
        """Build a measure from the layers' intervals."""
        columns = (tuple(None if i is None else getattr(i, end) for i in intervals) for end in ("mean", "low", "high"))
        values, low, high = columns
        return cls(name, values, low, high, tuple(0 if i is None else i.count for i in intervals))

    @property
    def definition(self) -> Definition:
        """Definition of the measure."""
        return DEFINITIONS[self.name]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, with the definition."""
        return {**self.definition._asdict(), **super().to_dict()}


@dataclass(frozen=True)
class Sureness(View):
    """Agreement among values of similar maximum probability (figure 6): a tenth of all."""

    least: float  # lowest maximum probability among them
    most: float  # highest maximum probability among them
    agreement: float  # share whose top token is the one that follows the key's top trigger
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    count: int  # number of values


@dataclass(frozen=True)
class Surest(View):
    """The values of the model with the largest maximum probability (section 4.2, table 2)."""

    count: int  # number of values
    agrees: int | None  # number whose top token follows the key's top trigger; None where no next token is predicted
    any_agrees: int | None  # number whose top token follows one of the key's triggers; None likewise
    # Memory, top token, probability, and the prefix of the trigger that agrees, if any.
    examples: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Shift(View):
    """A position at which the last layer changes the prediction (section 5.2, table 3)."""

    prefix: str  # the text up to the position
    residual: str  # the prediction without the layer
    added: str  # the prediction of the layer's feed-forward output alone
    output: str  # the prediction with the layer
    next: str | None  # the token that follows in the text; None where no next token is predicted
    case: str  # "feed-forward" or "compromise"


@dataclass(frozen=True)
class ModelReport(View, Displayed):
    """Report on the memories of a model.

    Attributes:
        model: the model's name.
        corpus: the text, in words.
        tokens: number of positions that were run.
        rows: number of rows that were run.
        layers: number of layers.
        memories: number of memories of each layer, d_ff; of a mixture, of all its experts together.
        vocabulary: number of tokens in the vocabulary.
        settings: settings of the pass and the analyses.
        measures: the measures, each by layer.
        sureness: agreement by the values' maximum probability.
        surest: the values of largest maximum probability.
        shifted: share of the positions at which the last layer changes the prediction.
        shifts: examples of such positions.
        stack: "decoder" or "encoder".
        note: differences from a causal decoder, and what could not be measured (null); None for a causal decoder.
    """

    model: str
    corpus: str
    tokens: int
    rows: int
    layers: int
    memories: tuple[int, ...]
    vocabulary: int
    settings: dict[str, Any]
    measures: tuple[Measure, ...]
    sureness: tuple[Sureness, ...]
    surest: Surest
    shifted: float
    shifts: tuple[Shift, ...]
    stack: str = "decoder"
    note: str | None = None

    def __repr__(self) -> str:
        measured = ", ".join(measure.name for measure in self.measures)
        return f"ModelReport of {self.model}: {self.layers} layers, {self.tokens:,} tokens\n  measures: {measured}"

    def __getitem__(self, name: str) -> Measure:
        """Return the measure of a name."""
        return next(measure for measure in self.measures if measure.name == name)

    def groups(self) -> dict[str, list[Measure]]:
        """Return the measures by group, in order."""
        groups: dict[str, list[Measure]] = {}
        for measure in self.measures:
            groups.setdefault(measure.definition.group, []).append(measure)
        return groups
