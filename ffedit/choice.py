"""Which layer should be edited? The one that tracing finds, the one where editing works best, or the user's.

The two need not agree: where a fact is recalled is not always where it is best changed (Hase et al. 2023, arXiv
2301.04213). A sweep edits at each layer and measures; side by side with the trace it says how far to trust the trace
for this model. What was found over many facts is remembered under the model's fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ffedit import cache
from ffedit.anatomy import Editable
from ffedit.editor import Corpus, EditConfig, collect, write
from ffedit.errors import EditError
from ffedit.evaluator.evaluate import evaluate
from ffedit.facts import Fact
from ffedit.fingerprint import fingerprint
from ffedit.locator import Corruption, TraceSet, locate
from ffedit.locator.aggregate import rank_correlation
from ffedit.memory import Address
from ffedit.moments import KeyMoments
from ffedit.progress import Progress, silent

How: TypeAlias = Literal["trace", "sweep"]
# A trace of fewer facts speaks for these facts, not for the model.
MANY = 30


@dataclass(frozen=True)
class Choice:
    """A layer that was chosen for a model.

    Attributes:
        layer: the layer.
        how: by "trace" or by "sweep".
        facts: over how many facts.
    """

    layer: int
    how: How
    facts: int


@dataclass(frozen=True)
class LayerScore:
    """What tracing and editing say about one layer.

    Attributes:
        layer: the layer.
        effect: average indirect effect at the subject's last token, window of layers around this one, or None.
        efficacy: after editing all facts in this layer; so are the others.
        paraphrase: None where no fact has paraphrases.
        specificity: None where no fact has neighbors.
        score: harmonic mean of those that there are.
    """

    layer: int
    effect: float | None
    efficacy: float | None
    paraphrase: float | None
    specificity: float | None
    score: float | None


@dataclass(frozen=True)
class Sweep:
    """Edits at each layer.

    Attributes:
        rows: one for each layer.
        traced: the layer that tracing chooses.
        correlation: Spearman's rank correlation of effect and score over the layers; None where one is constant.
    """

    rows: tuple[LayerScore, ...]
    traced: int
    correlation: float | None

    @property
    def layer(self) -> int:
        """The layer of the best score; among equals the one that tracing finds strongest."""
        return max(self.rows, key=lambda row: (row.score or 0.0, row.effect or 0.0)).layer


@dataclass(frozen=True)
class Found:
    """The layer to edit, and why this one.

    Attributes:
        traces: of feed-forward outputs; of all facts, or of the first where the layer was remembered.
        layer: the layer.
        kept: what was remembered, where that decided.
        sweep: where a new one decided.
    """

    traces: TraceSet
    layer: int
    kept: Choice | None = None
    sweep: Sweep | None = None


def find_layer(
    editable: Editable,
    facts: Sequence[Fact],
    asked: str,
    allowed: range,
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    progress: Progress = silent,
) -> Found:
    """Take the layer that is remembered of this model, or trace, or sweep.

    Args:
        editable: the model.
        facts: to be written.
        asked: "auto" or "sweep", where all layers are allowed; anything else traces.
        allowed: the layers to choose among by trace.
        config: of a sweep's edits, and the trace's seed.
        stats: for a sweep.
        progress: told how far it is.
    """
    config = config or EditConfig()
    kept = remembered(editable, "sweep" if asked == "sweep" else "trace") if asked in ("auto", "sweep") else None
    traces = by_trace(editable, facts[:1] if kept else facts, config.seed, progress)
    if kept:
        return Found(traces, kept.layer, kept)
    if asked == "sweep":
        sweep = by_sweep(editable, facts, traces, config, stats, progress)
        return Found(traces, sweep.layer, sweep=sweep)
    return Found(traces, traces.best_within(allowed))


def spread_below(layer: int, count: int) -> range:
    """`count` layers that share the work, the highest of which is `layer`.

    Raises:
        EditError: there are fewer.
    """
    if count > layer + 1:
        raise EditError(f"--spread {count} was asked for, but layer {layer} has only {layer} below it; spread less")
    return range(layer + 1 - count, layer + 1)


def by_trace(editable: Editable, facts: Sequence[Fact], seed: int = 0, progress: Progress = silent) -> TraceSet:
    """Trace the feed-forward outputs of all `facts`; the `layer` of the result is the one to edit.

    Raises:
        FactError: nothing to trace.
    """
    traces = locate(editable, list(facts), "feed_forward", seed=seed, progress=progress)
    remember_trace(editable, traces)
    return traces


def remember_trace(editable: Editable, traces: TraceSet) -> None:
    """Keep the layer that many known facts point to, where they were traced as `by_trace` does."""
    known = TraceSet(tuple(trace for trace in traces.traces if trace.known))
    if len(known.traces) < MANY:
        return
    one = known.traces[0]
    asked = (one.kind, one.sever, one.metric, one.corruption, one.exact)
    if asked == ("feed_forward", None, "probability", str(Corruption()), True):
        remember(editable, Choice(known.layer, "trace", len(known.traces)))


def by_sweep(
    editable: Editable,
    facts: Sequence[Fact],
    traces: TraceSet,
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    progress: Progress = silent,
) -> Sweep:
    """Write all `facts` into each layer in turn and measure.

    Args:
        editable: the model; as before afterwards.
        facts: with targets, and with paraphrases and neighbors for the scores to say something.
        traces: of feed-forward outputs, for comparison.
        config: of the edits.
        stats: second moments of the keys of all layers, or the text to collect them on.
        progress: told how far it is.

    Raises:
        FactError: a fact has no target.
    """
    effects = traces.at_subject
    rows, depth = [], len(editable.layers)
    if stats is None or isinstance(stats, Corpus):
        memories = list(editable.memories.values())
        stats = collect(editable, memories, stats or Corpus(), progress)
    for layer in range(depth):
        edit = write(editable, facts, "memit", [layer], config, stats, progress=progress)
        after = evaluate(editable, facts, edit, progress).after
        assert after is not None
        scores = after.efficacy, after.paraphrase, after.specificity, after.score
        rows.append(LayerScore(layer, float(effects[layer]), *scores))
    correlation = rank_correlation([row.effect or 0.0 for row in rows], [row.score or 0.0 for row in rows])
    sweep = Sweep(tuple(rows), traces.layer, correlation)
    remember(editable, Choice(sweep.layer, "sweep", len(facts)))
    return sweep


def remember(editable: Editable, choice: Choice) -> None:
    """Keep a choice for this model, in the place of an earlier one of its kind."""
    text = json.dumps(asdict(choice))

    def save(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    cache.write(_place(editable, choice.how), save)


def remembered(editable: Editable, how: How) -> Choice | None:
    """What was kept for this model."""
    try:
        found = Choice(**json.loads(_place(editable, how).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.layer in range(len(editable.layers)) else None


def _place(editable: Editable, how: How) -> Path:
    asked = "-chat" if editable.chat else ""
    return cache.path("layers", f"{fingerprint(editable)}{asked}-{how}", ".json")


def remembered_or_traced(editable: Editable, facts: Sequence[Fact], seed: int = 0, progress: Progress = silent) -> int:
    """The layer that is kept for this model, or the one that tracing `facts` finds."""
    kept = remembered(editable, "trace")
    return kept.layer if kept else by_trace(editable, facts, seed, progress).layer
