"""Try layers by editing: write facts that the model knows at each of several layers, and measure.

The layer that recalls a fact is not always the best one to edit (Hase et al. 2023, arXiv 2301.04213). `choose_layer`
writes facts at a few candidates, by default those of a built-in set that the model knows. Layers are ranked by the
harmonic mean of efficacy, paraphrase and specificity. Layers within `TIE` of the best one tie, and the one nearest to
the layer that `auto` takes is chosen.

The amount of work is fixed by counts, not by time, so that the same model gives the same layer.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.checks import in_reach
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import METHODS, check_config, check_method, preset
from ffedit.editor.names import MethodName
from ffedit.editor.statistics import collect, text_for
from ffedit.editor.write import write
from ffedit.errors import EditError, FactError
from ffedit.evaluator.evaluate import Evaluation
from ffedit.evaluator.formulas import exact_match
from ffedit.evaluator.metrics import SCORE_PARTS
from ffedit.evaluator.prompts import questions
from ffedit.evaluator.scores import Scores, mean_scores
from ffedit.facts.fact import Fact, FactLike, as_facts, by_subject
from ffedit.facts.reading import read_facts
from ffedit.inference import generation
from ffedit.inference.corpus import Corpus, check_corpus
from ffedit.layer_choice.published import AutoLayer, auto_layer
from ffedit.model.editable import Editable, check_model
from ffedit.model.memory import Address, as_layers
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

logger = logging.getLogger(__name__)

FACTS = Path(__file__).with_name("calibration.json")
# Least number of facts to compare layers on, and number of built-in facts that are written at each.
LEAST, WRITTEN = 3, 6
# Up to SHALLOW layers, all but the last are tried; in deeper models, these shares of the depth and `auto`'s layer.
SHALLOW, SHARES = 6, (1 / 16, 1 / 8, 1 / 4, 3 / 8)
# Scores within this of the best one tie: one fact of six weighs more.
TIE = 0.05
# Tokens generated for an answer: those of an object, and one that shows that it is complete.
OWN_TOKENS = 8


@dataclass(frozen=True)
class LayerScore:
    """Scores of edits at one layer.

    Attributes:
        efficacy: efficacy after edits at this layer; like `paraphrase` and `specificity`, None where not measured.
        score: harmonic mean of the rates that were measured; None without efficacy.
        magnitude: mean of the same rates' magnitudes, differences of probability; breaks ties in `best`.
    """

    layer: int
    efficacy: float | None
    paraphrase: float | None
    specificity: float | None
    score: float | None
    magnitude: float | None = None

    @classmethod
    def of(cls, layer: int, scores: Scores) -> LayerScore:
        """Build the row of a layer from the scores of the edits at it."""
        rates = {name: getattr(scores, name) for name in SCORE_PARTS}
        if scores.efficacy is None:
            return cls(layer, **rates, score=None)
        measured = {name: rate for name, rate in rates.items() if rate is not None}
        sizes = [size for name in measured if (size := getattr(scores, f"{name}_magnitude")) is not None]
        score = harmonic_mean(list(measured.values()))
        return cls(layer, **rates, score=score, magnitude=fmean(sizes) if sizes else None)


def best(rows: Iterable[LayerScore], expected: int) -> int:
    """Return the layer nearest to the `expected` one among those that tie for the best score (`tied`).

    If two are equally near, the score decides, then the magnitude.
    """

    def rank(row: LayerScore) -> tuple[float, float]:
        score, magnitude = (-1.0 if value is None else value for value in (row.score, row.magnitude))
        return score, magnitude

    ranked = sorted(rows, key=rank, reverse=True)
    return min(tied(ranked), key=lambda row: abs(row.layer - expected)).layer


def tied(rows: Sequence[LayerScore]) -> list[LayerScore]:
    """Return the rows whose score is within `TIE` of the best."""
    scores = [-1.0 if row.score is None else row.score for row in rows]
    return [row for row, score in zip(rows, scores, strict=True) if score >= max(scores) - TIE]


def edit_at(
    editable: Editable,
    facts: Sequence[Fact],
    layers: Sequence[int],
    method: str,
    config: EditConfig,
    stats: Corpus | None,
    progress: Progress = silent,
) -> tuple[LayerScore, ...]:
    """Write all `facts` into each of `layers` in turn, and measure; the key statistics are collected in one pass."""
    evaluation = Evaluation(editable, facts, progress)
    moments: Mapping[Address, KeyMoments] | None = None
    if METHODS[method].statistics:
        memories = [memory for layer in layers for memory in editable.feed_forward[layer].memories]
        named = METHODS[method].complete(config).key.names_weight > 0
        text = text_for(editable, len(by_subject(facts)), config.seed, names=named) if stats is None else stats
        moments = collect(editable, memories, text, progress)
    rows = []
    for layer in layers:
        edit = write(editable, facts, method, [layer], config, moments, progress=progress)
        with edit.applied(editable):
            scores = mean_scores(fact.scores for fact in evaluation.scores())
        rows.append(LayerScore.of(layer, scores))
    return tuple(rows)


@dataclass(frozen=True)
class LayerChoice(Displayed):
    """Layer that trial edits choose, and the evidence for it.

    Attributes:
        layer: the best of the layers that were tried; if several tie, the nearest to the layer that `auto` takes.
        method: the method of the edits.
        asked: number of facts that the model was asked.
        known: number of these facts that it knows.
        prompts: number of prompts by rate; for efficacy, the number of facts written.
        rows: scores by layer.
        auto: the layer that `auto` takes.
        seconds: duration of the choice.
    """

    layer: int
    method: str
    asked: int
    known: int
    rows: tuple[LayerScore, ...]
    auto: AutoLayer
    prompts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __repr__(self) -> str:
        scores = ", ".join(f"{row.layer}: {row.score or 0:.2f}" for row in self.rows)
        return f"LayerChoice of layer {self.layer} ({self.method}, {self.known} of {self.asked} facts known; {scores})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        plain = dict(json.loads(json.dumps(asdict(self))))
        auto = {"layer": self.auto.layer, "by": self.auto.by}
        return {**plain, "auto": auto, "tied": [row.layer for row in tied(self.rows)]}


def choose_layer(
    editable: Editable,
    *,
    method: MethodName | str = "memit",
    facts: FactLike | Iterable[FactLike] | None = None,
    layers: int | Iterable[int] | None = None,
    config: EditConfig | None = None,
    stats: Corpus | None = None,
    progress: Progress = silent,
) -> LayerChoice:
    """Choose a layer by writing facts that the model knows into each of a few layers, and measuring.

    Args:
        editable: the model; restored afterwards.
        method: the method of the edits.
        facts: facts with previous objects, targets, paraphrases and neighbors; None for `WRITTEN` of the built-in
            facts that the model knows.
        layers: layers to try; None for a few shares of the depth, and the layer that `auto` takes.
        config: settings of the edits; None for the method's defaults.
        stats: the text to collect key statistics on; None for the usual one (`ffedit.collect_stats`).
        progress: called with the progress.

    Raises:
        EditError: an unknown method, a layer that is not there or from which nothing reaches the answers, a model that
            knows fewer than `LEAST` of the facts, or statistics that cannot be collected.
    """
    check_model(editable)
    started, depth = time.perf_counter(), len(editable.layers)
    config = config or preset("default", check_method(method).name)
    check_config(config)
    check_corpus(stats)
    auto = auto_layer(editable, method)
    tried = candidates(depth, auto.layer) if layers is None else sorted(set(as_layers(layers)))
    if not tried or not set(tried) <= set(range(depth)):
        raise EditError(f"layers {tried} were asked for, but {editable.name} has layers 0 to {depth - 1}")
    asked = read_facts(FACTS) if facts is None else as_facts(facts)
    known = known_facts(editable, asked)
    if len(known) < LEAST:
        kind = "built-in calibration facts" if facts is None else "facts"
        raise EditError(
            f"{editable.name} knows {len(known)} of the {len(asked)} {kind}, but at least {LEAST} are needed "
            "to compare layers; give facts whose `previous` objects it generates"
        )
    written = in_turn(known)[:WRITTEN] if facts is None else known
    for layer in tried:
        in_reach(editable, written, check_method(method), range(layer, layer + 1), config.key.fact_token)
    rows = edit_at(editable, written, tried, method, config, stats, progress=progress)
    counts = Counter(name for q in questions(editable, written, written) for name, *_ in q.by_score)
    prompts = {"efficacy": len(written), **{name: counts[name] for name in SCORE_PARTS[1:]}}
    seconds = round(time.perf_counter() - started, 1)
    choice = LayerChoice(best(rows, auto.layer), method, len(asked), len(known), rows, auto, prompts, seconds)
    logger.info("layer %s by %s, chosen in %.1f s", choice.layer, method, choice.seconds)
    return choice


def known_facts(editable: Editable, facts: Sequence[Fact]) -> list[Fact]:
    """Select the facts whose previous object the model generates in full: greedily, from the prompt as it is.

    A fact with a prompt or an object that does not fit the tokenizer or the model counts as unknown.
    """
    asked: list[tuple[Fact, str]] = []
    for fact in facts:
        if fact.previous is None or fact.target is None:
            continue
        try:
            encoded = editable.encode(fact.text, fact.previous, fact.span, editable.max_tokens - OWN_TOKENS)
            questions(editable, [fact], facts)
        except FactError:
            continue
        asked.append((fact, generation.words(editable, encoded.target_ids)))
    answers = generation.completions(editable, [fact.text for fact, _ in asked], OWN_TOKENS)
    return [fact for (fact, old), text in zip(asked, answers, strict=True) if exact_match(text, old, fact.new_object)]


def in_turn(facts: Sequence[Fact]) -> list[Fact]:
    """Take one fact of each subject and interleave the relations, so that the first facts cover as many as possible."""
    first = [group[0] for group in by_subject(facts)]
    relations = [fact.relation for fact in first]
    turns = [relations[:i].count(relation) for i, relation in enumerate(relations)]
    return [first[i] for i in sorted(range(len(first)), key=turns.__getitem__)]


def candidates(depth: int, auto: int) -> list[int]:
    """Return the layers to try in a model of `depth` layers, given the layer that `auto` takes.

    The last layer is excluded: no later attention layer carries what it writes at the subject to the prompt's end.
    """
    if depth <= SHALLOW:
        return list(range(max(1, depth - 1)))
    return sorted({auto, *(round(share * depth) for share in SHARES)})
