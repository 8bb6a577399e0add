"""Choose the layer to edit in a model, once, by editing facts that the model knows.

The layer that recalls a fact is not always the best one to edit (Hase et al. 2023, arXiv 2301.04213), and one fact's
trace is weak evidence about a model. So the model is asked a small set of facts that ships with ffedit. Those that it
knows are traced at the token where the key is read, and a few are written at each of a few candidates: the layer of the
largest effect, the published one, and early ones, where most models edit best. The layer of the best harmonic mean of
efficacy, paraphrase and specificity is chosen; of those within `TIE` of it the one nearest to the published layer, or
to the usual share of the depth.

The amount of work is fixed by counts, not by time, so that the same model gives the same layer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor import METHODS, EditConfig, check_method, collect, preset, write
from ffedit.editor.edit import base_of
from ffedit.errors import FactError
from ffedit.evaluator.evaluate import Evaluation
from ffedit.evaluator.formulas import exact_match
from ffedit.evaluator.prompts import questions
from ffedit.evaluator.scores import Scores, mean_scores
from ffedit.facts.fact import Fact, FactLike, as_facts, by_subject
from ffedit.facts.reading import read_facts
from ffedit.files import cache
from ffedit.files.seal import sealed, unsealed
from ffedit.inference import generation
from ffedit.inference.corpus import Corpus, tokens_for
from ffedit.layer_choice.published import nearest, published
from ffedit.locator import TraceSet, locate_all
from ffedit.model.editable import Editable, check_model
from ffedit.model.memory import Address
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent
from ffedit.version import __version__

logger = logging.getLogger(__name__)

FACTS = Path(__file__).with_name("calibration.json")
# A model that knows fewer of the facts cannot be calibrated on them.
LEAST = 3
# Known facts that are traced, corrupted runs of each, and known facts that are written at each candidate.
TRACED, SAMPLES, WRITTEN = 4, 2, 6
# Models of up to SHALLOW layers try them all; deeper ones try these shares of the depth, the traced and the published.
SHALLOW, SHARES = 6, (1 / 16, 1 / 8, 1 / 4)
# Scores of so few facts that lie nearer than this are not told apart: one fact of six weighs more.
TIE = 0.05
# Where no layer was published: those that were lie between .15 and .35 of the depth.
USUAL = 1 / 4
# Tokens generated for an answer: those of an object, and one that shows that it is complete.
OWN_TOKENS = 8


@dataclass(frozen=True)
class LayerScore:
    """Scores of tracing and editing at one layer.

    Attributes:
        effect: average indirect effect at the subject's last token, window of layers around this one.
        efficacy: after editing the facts in this layer, as are `paraphrase` and `specificity`; each None where it was
            not measured.
        score: harmonic mean of those that were measured; None without efficacy.
        magnitude: mean of the same rates' magnitudes, differences of probability; decides between equal scores.
    """

    layer: int
    effect: float | None
    efficacy: float | None
    paraphrase: float | None
    specificity: float | None
    score: float | None
    magnitude: float | None = None

    @classmethod
    def of(cls, layer: int, effect: float | None, scores: Scores) -> LayerScore:
        """Build the row of a layer from its effect and the scores of the edits at it."""
        rates = {name: getattr(scores, name) for name in ("efficacy", "paraphrase", "specificity")}
        if scores.efficacy is None:
            return cls(layer, effect, **rates, score=None)
        measured = {name: rate for name, rate in rates.items() if rate is not None}
        sizes = [size for name in measured if (size := getattr(scores, f"{name}_magnitude")) is not None]
        score = harmonic_mean(list(measured.values()))
        return cls(layer, effect, **rates, score=score, magnitude=fmean(sizes) if sizes else None)


@dataclass(frozen=True)
class Choice(Displayed):
    """Layer to edit in a model, and the evidence for it.

    Attributes:
        layer: the layer; None if the model knows too few of the calibration facts.
        method: that the candidates were edited with.
        asked: number of facts that the model was asked.
        known: how many of them it knows.
        written: how many were written at each candidate.
        effects: average indirect effect at the subject's last token over the traced facts, [layers]; empty if `layer`
            is None, since none were traced.
        total: average total effect.
        traced: the layer that the trace finds, or None if it shows no site.
        prior: the published layer, or None.
        source: of the prior.
        made: date, YYYY-MM-DD.
    """

    layer: int | None
    method: str
    asked: int
    known: int
    written: int = 0
    rows: tuple[LayerScore, ...] = ()
    effects: tuple[float, ...] = ()
    total: float | None = None
    traced: int | None = None
    prior: int | None = None
    source: str | None = None
    seconds: float = 0.0
    made: str = ""

    def __repr__(self) -> str:
        scores = ", ".join(f"{row.layer}: {row.score or 0:.2f}" for row in self.rows)
        return f"Choice of layer {self.layer} ({self.method}, {self.known} of {self.asked} facts known; {scores})"

    def within(self, allowed: range) -> int | None:
        """Return the layer, or the best allowed candidate, or the nearest allowed layer; None if none was chosen."""
        if self.layer is None or self.layer in allowed:
            return self.layer
        if rows := [row for row in self.rows if row.layer in allowed]:
            return best(rows, expected(self.prior, len(self.effects)))
        return nearest(allowed, self.layer)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Choice:
        """Build a choice from what `to_dict` returned."""
        rows = tuple(LayerScore(**row) for row in values["rows"])
        return cls(**{**values, "rows": rows, "effects": tuple(values["effects"])})


def expected(published: int | None, depth: int) -> int:
    """Return the layer to expect in a model of `depth` layers: the published one, or the usual share of the depth."""
    return round(USUAL * depth) if published is None else published


def best(rows: Iterable[LayerScore], prior: int | None = None) -> int:
    """Return the layer of the best score; of those within `TIE` of it the one nearest to the prior, where there is one.

    Among equals: where the magnitude is largest, then where tracing shows the strongest effect.
    """

    def rank(row: LayerScore) -> tuple[float, ...]:
        score, magnitude = (-1.0 if value is None else value for value in (row.score, row.magnitude))
        return score, magnitude, row.effect or 0.0

    rows = sorted(rows, key=rank, reverse=True)
    tied = [row for row in rows if prior is not None and rank(row)[0] >= rank(rows[0])[0] - TIE]
    return min(tied, key=lambda row: abs(row.layer - (prior or 0))).layer if tied else rows[0].layer


def choose_layer(
    editable: Editable,
    method: str = "memit",
    facts: FactLike | Iterable[FactLike] | None = None,
    config: EditConfig | None = None,
    stats: Corpus | None = None,
    progress: Progress = silent,
) -> Choice:
    """Choose the layer to edit in this model, or return the cached choice for the same arguments.

    Args:
        editable: the model; restored afterwards. Applied edits do not change the choice.
        method: that the candidates are edited with.
        facts: with previous objects and targets, and with paraphrases and neighbors; None for those that ship.
        config: of the edits; None for the method's defaults, whatever the edit that follows is made with.
        stats: the text to collect key statistics on; None for the usual one (`ffedit.stats`).
        progress: called with the progress.

    Raises:
        EditError: an unknown method, or statistics that cannot be collected.
    """
    check_model(editable, Editable)
    config = config or preset("default", check_method(method).name)
    asked = read_facts(FACTS) if facts is None else as_facts(facts)
    path = _path(editable, method, asked, config, stats)
    if (cached := _read(path, len(editable.layers))) is not None:
        logger.info("layer %s by %s, chosen earlier: %s", cached.layer, method, path)
        return cached
    started = time.perf_counter()
    choice = _calibrate(editable, method, asked, config, stats, progress)
    choice = replace(choice, seconds=round(time.perf_counter() - started, 1), made=date.today().isoformat())
    write_json(path, choice.to_dict())
    logger.info("layer %s by %s, chosen in %.1f s", choice.layer, method, choice.seconds)
    return choice


def remembered(editable: Editable, method: str = "memit") -> Choice | None:
    """Read the cached choice for this model with the method's defaults; None if there is none."""
    return _read(_path(editable, method, read_facts(FACTS), preset("default", method), None), len(editable.layers))


def _calibrate(
    editable: Editable,
    method: str,
    asked: Sequence[Fact],
    config: EditConfig,
    stats: Corpus | None,
    progress: Progress,
) -> Choice:
    known = known_facts(editable, asked)
    if len(known) < LEAST:
        return Choice(None, method, len(asked), len(known))
    facts = in_turn(known)
    seed, token = config.seed, config.key.fact_token
    traces = locate_all(editable, facts[:TRACED], samples=SAMPLES, seed=seed, tokens=token, progress=progress)
    row = published(editable.model.config.get_text_config())
    prior = None if row is None else row.layer(method)
    layers = candidates(len(editable.layers), traces.site, prior)
    written = facts[:WRITTEN]
    rows = edit_at(editable, written, layers, method, config, stats, traces, progress)
    return Choice(
        layer=best(rows, expected(prior, len(editable.layers))),
        method=method,
        asked=len(asked),
        known=len(known),
        written=len(written),
        rows=rows,
        effects=tuple(map(float, traces.at_subject)),
        total=traces.total,
        traced=traces.site,
        prior=prior,
        source=None if row is None else f"{row.name}: {row.source}",
    )


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
    said = generation.completions(editable, [fact.text for fact, _ in asked], OWN_TOKENS)
    return [fact for (fact, old), text in zip(asked, said, strict=True) if exact_match(text, old, fact.new_object)]


def in_turn(facts: Sequence[Fact]) -> list[Fact]:
    """Take one fact of each subject and interleave the relations, so that the first facts cover as many as possible."""
    first = [group[0] for group in by_subject(facts)]
    relations = [fact.relation for fact in first]
    turns = [relations[:i].count(relation) for i, relation in enumerate(relations)]
    return [first[i] for i in sorted(range(len(first)), key=turns.__getitem__)]


def candidates(depth: int, traced: int | None, prior: int | None) -> list[int]:
    """Return the layers to try in a model of `depth` layers.

    The last layer is excluded: no later attention layer carries what it writes at the subject to the prompt's end.
    """
    if depth <= SHALLOW:
        return list(range(max(1, depth - 1)))
    layers = {round(share * depth) for share in SHARES} | {layer for layer in (traced, prior) if layer is not None}
    return sorted(layer for layer in layers if layer < depth - 1)


def edit_at(
    editable: Editable,
    facts: Sequence[Fact],
    layers: Sequence[int],
    method: str,
    config: EditConfig,
    stats: Corpus | Mapping[Address, KeyMoments] | None,
    traces: TraceSet,
    progress: Progress = silent,
) -> tuple[LayerScore, ...]:
    """Write all `facts` into each of `layers` in turn, and measure; the key statistics are collected in one pass."""
    evaluation, effects = Evaluation(editable, facts, progress), traces.at_subject
    if METHODS[method].statistics and (stats is None or isinstance(stats, Corpus)):
        memories = [memory for layer in layers for memory in editable.feed_forward[layer].memories]
        text = stats or Corpus(tokens=tokens_for(len(by_subject(facts))), seed=config.seed)
        stats = collect(editable, memories, text, progress)
    rows = []
    for layer in layers:
        edit = write(editable, facts, method, [layer], config, stats, progress=progress)
        with edit.applied(editable):
            scores = mean_scores(one.scores for one in evaluation.scores())
        rows.append(LayerScore.of(layer, float(effects[layer]), scores))
    return tuple(rows)


def _path(editable: Editable, method: str, facts: Sequence[Fact], config: EditConfig, stats: Corpus | None) -> Path:
    """Return the cache path of a choice, which depends on the unedited weights and all settings."""
    numbers = (LEAST, TRACED, SAMPLES, WRITTEN, SHALLOW, SHARES, TIE, USUAL)
    records = [fact.to_dict() for fact in facts]
    about = [__version__, editable.chat, method, config.to_dict(), str(stats), numbers, records]
    digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:8]
    weights = base_of(editable)
    return cache.path("layers", f"{weights}-{digest}", ".json")


def _read(path: Path, depth: int) -> Choice | None:
    """Read a cached choice; None if there is none, or it is damaged."""
    try:
        choice = Choice.from_dict(unsealed(json.loads(path.read_text(encoding="utf-8"))))
        return choice if choice.layer is None or choice.layer in range(depth) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of the cache."""
    text = json.dumps(sealed(content))
    cache.write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
