"""A whole model: one pass over a text, then every analysis of Geva et al. 2021 (arXiv 2012.14913) on its data.

Every number of the report is one `Measure`, with its definition in words and its section and figure in the paper, so
that tables, figures and pages are made of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from ffedit.algebra import bootstrap
from ffedit.algebra.linalg import double
from ffedit.files.placing import claimed
from ffedit.inference.corpus import Corpus
from ffedit.inspector.keys import REMOVED, SHALLOW, Endings, removals
from ffedit.inspector.memory_pass import Pass, Settings, collect, resumed
from ffedit.inspector.rows import NOTHING, Context, RowStore, rows_of
from ffedit.inspector.values import CASES, Composed, SurestValues, Values, compose, read_values, surest
from ffedit.inspector.views import MemoryIndex, Prefix, View
from ffedit.model.editable import Stack, check_model
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import decode
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

Unit = Literal["share", "number", "rank", "change"]

# Seed and number of the bootstrap's draws.
SEED, DRAWS = 0, 500
# Groups of random positions, in place of keys, on which chance is measured.
CHANCE_KEYS = 200
BINS = 10
EXAMPLES = 20
MOST_PREFIX = 160


class Definition(NamedTuple):
    """Definition of a measure."""

    group: str  # the group of measures that it is drawn and tabulated with
    title: str  # its name in a few words
    unit: Unit  # share (0 to 1, probabilities too), number, rank (1 is best) or change (relative)
    paper: str  # section and figure
    text: str  # the definition in words


_KEYS, _FADE, _AGREE, _SURE = "shallow patterns", "removing a token", "keys and values", "sure values"
_RANK, _ACTIVE, _COUNT, _SETTLED, _CASES = "rank", "active memories", "effective memories", "residual", "four cases"
_PATTERNS, _CASE = "3.2, figure 2", "5.2, figure 11"
DEFINITIONS: dict[str, Definition] = {
    "shallow": Definition(
        _KEYS, "triggers covered", "share", _PATTERNS,
        "Triggers of a key that end in a token, or a pair of tokens, in which at least three of them end and which "
        "chance does not explain; mean over keys. Stands in for the shallow patterns that people find."),
    "shallow_last": Definition(
        _KEYS, "by last token", "share", _PATTERNS, "The same, by a last token only; mean over keys."),
    "shallow_pair": Definition(
        _KEYS, "by last two", "share", _PATTERNS, "The same, by the last two tokens only; mean over keys."),
    "shallow_keys": Definition(
        _KEYS, "shallow keys", "share", _PATTERNS, "Keys half of whose triggers, or more, are covered."),
    "shallow_chance": Definition(
        _KEYS, "covered by chance", "share", "none", "Triggers covered, were they positions drawn at random."),
    "removed_first": Definition(
        _FADE, "first token", "change", "3.2, figure 3",
        "(m' − m) / m of a trigger's coefficient without its first token; mean over triggers, then keys."),
    "removed_last": Definition(_FADE, "last token", "change", "3.2, figure 3", "The same without its last token."),
    "removed_random": Definition(
        _FADE, "random token", "change", "3.2, figure 3",
        "The same without a token drawn at random from between them."),
    "agreement": Definition(
        _AGREE, "agreement", "share", "4.1, figure 4", "Keys whose value's top token is what follows the top trigger."),
    "agreement_dealt": Definition(
        _AGREE, "by chance", "share", "4.1, figure 4", "The same with what follows another key's top trigger."),
    "rank": Definition(
        _RANK, "next token", "rank", "4.1, figure 5",
        "Rank of what follows the top trigger in the value's distribution, 1 the best; median over keys."),
    "rank_dealt": Definition(
        _RANK, "random token", "rank", "4.1, figure 5", "The same of what follows another key's top trigger; median."),
    "sure": Definition(
        _SURE, "max probability", "share", "4.2", "Probability of a value's top token; mean over all values."),
    "surest_here": Definition(
        _SURE, "of the surest", "share", "4.2, table 2",
        "Share of the model's surest values that stand in this layer."),
    "active_sign": Definition(
        _ACTIVE, "by sign", "share", "5.1, figure 7", "Memories with a positive coefficient; mean over positions."),
    "active_norm": Definition(
        _ACTIVE, "by norm", "share", "none",
        "Memories with |m_i| ‖v_i‖ of at least 1% of the output's norm; mean over positions."),
    "effective": Definition(
        _COUNT, "effective number", "number", "none",
        "Participation ratio (Σ s_i²)² / Σ s_i⁴ of the strengths s_i = |m_i| ‖v_i‖; mean over positions."),
    "zero_agreement": Definition(
        _ACTIVE, "zero agreement", "share", "5.1, figure 8",
        "Positions at which the layer's top token is that of none of its memories with a positive coefficient; the "
        "paper asks silent ones, too."),
    "settled": Definition(
        _SETTLED, "already final", "share", "5.2, figure 9",
        "Positions at which the residual stream ahead of the layer's output predicts what the model says in the end."),
    "final": Definition(
        _SETTLED, "probability of it", "share", "5.2, figure 10",
        "Probability that it gives to what the model says in the end; mean over positions."),
    "case_residual": Definition(
        _CASES, "residual", "share", _CASE, "The layer's prediction is that of the residual stream alone."),
    "case_feed_forward": Definition(
        _CASES, "feed-forward", "share", _CASE, "It is that of the feed-forward output alone."),
    "case_agreement": Definition(_CASES, "agreement", "share", _CASE, "It is that of both."),
    "case_compromise": Definition(
        _CASES, "compromise", "share", _CASE, "It is that of neither (the paper's composition)."),
}  # fmt: skip


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
    """Report on the memories of a model."""

    model: str  # the model's name
    corpus: str  # the text, in words
    tokens: int  # number of positions that were run
    rows: int  # number of rows that were run
    layers: int  # number of layers
    memories: tuple[int, ...]  # number of memories of each layer, d_ff; of a mixture, of all its experts together
    vocabulary: int  # number of tokens in the vocabulary
    settings: dict[str, Any]  # settings of the pass and the analyses
    measures: tuple[Measure, ...]  # each by layer
    sureness: tuple[Sureness, ...]  # agreement by the values' maximum probability
    surest: Surest  # the values of largest maximum probability
    shifted: float  # share of the positions at which the last layer changes the prediction
    shifts: tuple[Shift, ...]  # examples of such positions
    stack: str = "decoder"  # or "encoder"
    # Differences from a causal decoder, and what could not be measured (null); None for a causal decoder.
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


class Removing(NamedTuple):
    """How many keys of each layer, drawn with the seed, and first triggers of each, tokens are removed from.

    Every trigger costs three passes over its prefix.
    """

    keys: int = 20
    triggers: int = 10


def inspect_model(
    editable: Stack,
    corpus: Corpus,
    folder: Path | str,
    *,
    settings: Settings | None = None,
    removing: Removing | None = None,
    progress: Progress = silent,
) -> ModelReport:
    """Inspect all memories of a model: one pass over a text, which can be interrupted and resumed, and all analyses.

    Args:
        editable: the model, or a stack of one; what cannot be measured on a stack is None.
        corpus: the text; its documents where it has some, else rows of running text.
        folder: where triggers, rows and sample are stored; what is there already is not computed again.
        settings: settings of the pass.
        removing: numbers of keys and triggers that tokens are removed from.
        progress: progress callback.

    Raises:
        EditError: the text cannot be used, or the folder cannot be written, holds another pass, or is in use by
            another process.
        ModelError: the model has no unembedding.
    """
    check_model(editable)
    folder = Path(folder)
    about = {
        "model": editable.name,
        "stack": editable.kind,
        "fingerprint": fingerprint(editable),
        "corpus": str(corpus),
        "tokens": corpus.tokens,
        "settings": asdict(settings or Settings()),
    }
    with claimed(folder):
        state = resumed(editable, folder, about)
        store = collect(editable, rows_of(editable, corpus, progress), corpus.tokens, state, folder, progress)
    return analyse(editable, state, store, removing, progress)


def analyse(
    stack: Stack, state: Pass, store: RowStore, removing: Removing | None = None, progress: Progress = silent
) -> ModelReport:
    """Run every analysis on a finished pass of `stack`, which may be a merged one, and on the rows that it ran."""
    removing, seed, layers = removing or Removing(), state.settings.seed, range(len(stack.feed_forward))
    values = [read_values(stack, layer, state.triggers[layer], store, seed, progress) for layer in layers]
    composed = compose(stack, state.sample.values, [layer.top for layer in values])
    best = surest(values, store)
    numbers: dict[str, list[CountedInterval | None]] = {}
    for layer in layers:
        of_layer = {
            **_shallow(store, state, layer),
            **_removed(stack, layer, state, store, removing, progress),
            **_values(values[layer]),
            "surest_here": interval(double(best.layer == layer)),
            **_composed(composed[layer], stack.feed_forward[layer].d_ff),
        }
        for name, number in of_layer.items():
            numbers.setdefault(name, []).append(number)
    last = composed[-1]
    return ModelReport(
        model=state.about["model"],
        corpus=state.about["corpus"],
        tokens=state.tokens,
        rows=state.rows,
        layers=len(layers),
        memories=tuple(feed_forward.d_ff for feed_forward in stack.feed_forward),
        vocabulary=stack.vocabulary,
        settings={**state.about["settings"], "removing": removing._asdict()},
        measures=tuple(Measure.of(name, numbers[name]) for name in DEFINITIONS),
        sureness=_sureness(values) if store.layout.predicts_next else (),
        surest=_surest(stack, state, store, best),
        shifted=float(double(last.output != last.residual).mean()),
        shifts=_shifts(stack, state, store, last),
        stack=stack.kind,
        note=store.layout.note,
    )


def _shallow(store: RowStore, state: Pass, layer: int) -> dict[str, CountedInterval | None]:
    """Measure the shallow patterns of a layer's triggers, and as chance those of random positions.

    These are flat indices of the sample in groups of as many different prefixes as a key has triggers.
    """
    positions = state.triggers[layer].positions.cpu()
    different = list({store.context(position): position for position in state.sample.positions.tolist()}.values())
    rng, size = np.random.default_rng([state.settings.seed, layer]), min(positions.shape[1], len(different))
    drawn = np.stack([rng.choice(different, size, replace=False) for _ in range(CHANCE_KEYS)])
    endings, chance = (
        Endings.of(store.tokens(at, -1), store.tokens(at), state.text)
        for at in (positions, torch.from_numpy(drawn).long())
    )
    covered = endings.covered
    return {
        "shallow": interval(covered),
        "shallow_last": interval(endings.by_last.sum(-1) / endings.count),
        "shallow_pair": interval(endings.by_pair.sum(-1) / endings.count),
        "shallow_keys": interval(double(covered[~covered.isnan()] >= SHALLOW)),
        "shallow_chance": interval(chance.covered),
    }


def _removed(
    stack: Stack, layer: int, state: Pass, store: RowStore, removing: Removing, progress: Progress
) -> dict[str, CountedInterval | None]:
    """Measure the relative change of coefficients without a token, over some keys of a layer."""
    if not stack.causal:
        return {f"removed_{name}": None for name in REMOVED}
    triggers, generator = state.triggers[layer], torch.Generator().manual_seed(state.settings.seed + layer)
    fired = (triggers.positions[:, 0] != NOTHING).nonzero()[:, 0].cpu()
    keys = fired[torch.randperm(len(fired), generator=generator)[: removing.keys]].tolist()
    prefixes = [[t.context.ids for t in triggers.read(store, key, removing.triggers)] for key in keys]
    changes = removals(stack, stack.feed_forward[layer], keys, prefixes, state.settings.seed)
    progress("removing tokens", layer + 1, len(stack.feed_forward))
    return {
        f"removed_{name}": interval([getattr(change, name) for change in changes if change is not None])
        for name in REMOVED
    }


def _values(values: Values) -> dict[str, CountedInterval | None]:
    followed, top = values.next != NOTHING, values.top[values.keys]
    return {
        "agreement": interval(double(values.agrees[followed])),
        "agreement_dealt": interval(double((top == values.permuted)[followed])),
        "rank": interval(double(values.rank[followed]), np.median),
        "rank_dealt": interval(double(values.permuted_rank[followed]), np.median),
        "sure": interval(double(values.sure)),
    }


def _composed(layer: Composed, d_ff: int) -> dict[str, CountedInterval | None]:
    by_sign, by_norm, effective = double(layer.activity).unbind(1)
    cases = {f"case_{name.replace('-', '_')}": layer.case == number for number, name in enumerate(CASES)}
    return {
        "active_sign": interval(by_sign / d_ff),
        "active_norm": interval(by_norm / d_ff),
        "effective": interval(effective),
        "zero_agreement": interval(double(layer.zero)),
        "settled": interval(double(layer.settled)),
        "final": interval(double(layer.final)),
        **{name: interval(double(case)) for name, case in cases.items()},
    }


def _sureness(values: Sequence[Values]) -> tuple[Sureness, ...]:
    """Return agreement by deciles of the values' max p_i, over all layers."""
    sure, order = torch.cat([layer.sure[layer.keys] for layer in values]).sort()
    agrees = double(torch.cat([layer.agrees for layer in values]))[order]
    bins = []
    for decile, outcomes in zip(sure.tensor_split(BINS), agrees.tensor_split(BINS), strict=True):
        if (share := interval(outcomes)) is not None:
            bins.append(Sureness(float(decile[0]), float(decile[-1]), share.mean, share.low, share.high, share.count))
    return tuple(bins)


def _surest(stack: Stack, state: Pass, store: RowStore, best: SurestValues) -> Surest:
    """Return the agreement of the values of largest max p_i, the first of them as examples."""
    examples: list[dict[str, Any]] = []
    columns = (column[:EXAMPLES].tolist() for column in (best.layer, best.index, best.top, best.sure))
    for layer, index, top, sure in zip(*columns, strict=True):
        agreeing = (_text(stack, t.context) for t in state.triggers[layer].read(store, index) if t.next == top)
        memory, token = str(MemoryIndex(*stack.feed_forward[layer].at(index))), decode(stack.tokenizer, [top])
        examples.append({"memory": memory, "token": token, "probability": sure, "trigger": next(agreeing, None)})
    agrees, any_agrees = (
        int(same.sum()) if store.layout.predicts_next else None for same in (best.agrees, best.any_agrees)
    )
    return Surest(len(best.sure), agrees, any_agrees, tuple(examples))


def _shifts(stack: Stack, state: Pass, store: RowStore, last: Composed) -> tuple[Shift, ...]:
    """Return the first positions of the sample, which is in random order, whose prediction the last layer changes."""
    shifts = []
    following = store.next(state.sample.positions).tolist()
    for i in (last.output != last.residual).nonzero()[:EXAMPLES, 0].tolist():
        tops = (last.residual, last.added, last.output)
        residual, added, output = (decode(stack.tokenizer, [int(top[i])]) for top in tops)
        next_token = None if following[i] == NOTHING else decode(stack.tokenizer, [following[i]])
        text = _text(stack, store.context(int(state.sample.positions[i])))
        shifts.append(Shift(text, residual, added, output, next_token, CASES[int(last.case[i])]))
    return tuple(shifts)


def _text(stack: Stack, context: Context) -> str:
    """Decode the end of a prefix or, in a stack that is not causal, the text around the position, which is marked."""
    if not stack.causal:
        return Prefix.of(stack.tokenizer, *context).marked(MOST_PREFIX)
    text = decode(stack.tokenizer, context.ids)
    return text if len(text) <= MOST_PREFIX else "…" + text[-MOST_PREFIX:]
