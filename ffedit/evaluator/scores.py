"""Scores of a fact and of several, in the field's terms.

The formulas are those of `metrics`; a fact's score is their mean over the fact's prompts, the score of several facts
the mean over facts.

The seven of the headline, and their magnitudes:

    efficacy      share of edited prompts with nll(new) < nll(old); magnitude: mean p(new) − p(old). Up.
    paraphrase    the same over other wordings of the fact. Up.
    specificity   share of neighbors (other subjects) with nll(true) < nll(new); magnitude: p(true) − p(new). Keep.
    same_subject  share of prompts on other facts of the subject that free greedy generation still answers with the true
                  object (where it is given, by any of its names) or with what the model said before; magnitude:
                  mean p(true) − p(new). Keep.
    score         harmonic mean of efficacy, paraphrase and specificity, as published. Up.
    generation    share of edited prompts after which free greedy generation says the new object, all of it, or another
                  of its names where the data give some. Up.
    drift         mean KL(before ‖ after) of next-token distributions over generic text, nats per token. Zero is best.

With and without teacher forcing (arXiv 2502.11177), of the edited prompt and of other wordings:

    teacher_forced      share of prompts of whose new object every token is the argmax after the true ones. Up.
    token_accuracy      mean share of such tokens: efficacy of zsRE. Up.
    teacher_forced_gap  teacher_forced − generation: where the model says more than the object, or spells it otherwise.
                        Zero is best.
    token_accuracy_gap  token_accuracy − generation: the gap as 2502.11177 publishes it, which also holds the credit
                        for parts of an object. Zero is best.
    paraphrase_token_accuracy, paraphrase_generation   the same over other wordings; the first is zsRE's paraphrase. Up.

What follows, and what else moved:

    portability         share of prompts on what follows from the edit after which free greedy generation says it, by
                        any of the names or answers that the data accept (MQuAKE, KnowEdit). A multi-hop question
                        counts once, as answered if any of its wordings is (MQuAKE, section 3.3, which prompts with
                        examples; here there are none). Up.
    portability_token_accuracy   the same, teacher-forced, on the first of them: as KnowEdit publishes it. Up.
    locality            share of unrelated questions that free greedy generation answers as before the edit. Keep.
    locality_token_accuracy   share of the tokens of their given answers that are the argmax, teacher-forced: zsRE, as
                        ROME and MEMIT compute it. Keep.
    locality_argmax     share of their answers' tokens with the argmax of before, teacher-forced: KnowEdit. Keep.
    neighbor_with_edit  specificity where the edit's sentence stands before the neighbor (CounterFact+). Keep.
    divergence          mean KL(before ‖ after) of the next token after neighbors, nats per token. Zero is best.
    entropy             of bigrams and trigrams in sampled text about the subject, bits. Keep.
    consistency         TF-IDF cosine of that text with the fact's references; document frequencies are over the
                        references of all facts that are given. Up.
    perplexity          exp of the mean −log p of the tokens of the generic text. Keep.
    knew                share of facts whose old object, where one is named, free greedy generation says.

A score that nothing was there to measure is None, never 0 or 1: so are comparisons where both objects are one, as where
no old object is named and the model says the new one before the edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import fmean
from typing import Any

from ffedit.algebra.bootstrap import Interval
from ffedit.evaluator import intervals
from ffedit.evaluator.added_metrics import RESERVED, added_metrics
from ffedit.evaluator.left_out import LeftOut
from ffedit.evaluator.metrics import harmonic
from ffedit.facts.fact import Fact

NAMES = ("efficacy", "paraphrase", "specificity", "same_subject", "score", "generation", "drift")


@dataclass(frozen=True)
class Scores:
    """Rates are shares, magnitudes differences of probability, drift nats per token; None where unmeasured."""

    efficacy: float | None = None
    paraphrase: float | None = None
    specificity: float | None = None
    same_subject: float | None = None
    score: float | None = None
    generation: float | None = None
    drift: float | None = None
    efficacy_magnitude: float | None = None
    paraphrase_magnitude: float | None = None
    specificity_magnitude: float | None = None
    same_subject_magnitude: float | None = None
    perplexity: float | None = None
    teacher_forced: float | None = None
    token_accuracy: float | None = None
    teacher_forced_gap: float | None = None
    token_accuracy_gap: float | None = None
    paraphrase_token_accuracy: float | None = None
    paraphrase_generation: float | None = None
    portability: float | None = None
    portability_token_accuracy: float | None = None
    locality: float | None = None
    locality_token_accuracy: float | None = None
    locality_argmax: float | None = None
    neighbor_with_edit: float | None = None
    neighbor_with_edit_magnitude: float | None = None
    divergence: float | None = None
    entropy: float | None = None
    consistency: float | None = None
    knew: float | None = None
    added: Mapping[str, float | None] = field(default_factory=dict)

    def __getattr__(self, name: str) -> float | None:
        """Return the score of a metric of another package, None where it was not measured."""
        if name in added_metrics():
            return self.added.get(name)
        raise AttributeError(f"there is no score {name!r}")

    def to_dict(self) -> dict[str, float | None]:
        """Return plain numbers by name."""
        return {name: getattr(self, name) for name in score_names()}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, float | None]) -> Scores:
        """Read what `to_dict` gave; a metric that is not installed here is left out."""
        known = {one.name for one in fields(cls)}
        added = {name: value for name, value in numbers.items() if name in added_metrics()}
        return cls(**{name: value for name, value in numbers.items() if name in known}, added=added)


RESERVED.update(name for name in dir(Scores) if not name.startswith("_"))
RESERVED.update(one.name for one in fields(Scores))


def score_names() -> list[str]:
    """Return the names of all scores, those of other packages last."""
    own = [one.name for one in fields(Scores) if one.name != "added"]
    return [*own, *(name for name in added_metrics() if name not in own)]


@dataclass(frozen=True)
class FactScores:
    """One fact's scores.

    Attributes:
        fact: what was asked for.
        scores: of this fact alone.
        says: what the model said to its prompt by itself.
        kinds: by the data set's kinds of probes, "portability/Reasoning": `portability`, `portability_token_accuracy`
            and `locality`, here of unrelated questions, same-subject prompts and neighbors: the share of a kind that
            free greedy generation answers as before the edit.
        left_out: by score, or by score and reason ("specificity/edited"), how many of the fact's prompts it was not
            measured on; the reasons are in `evaluator.left_out`.
    """

    fact: Fact
    scores: Scores
    says: str
    kinds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        more = {"kinds": dict(self.kinds), "left_out": dict(self.left_out)}
        some = {name: value for name, value in more.items() if value}
        return {"fact": self.fact.to_dict(), "scores": self.scores.to_dict(), "says": self.says, **some}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FactScores:
        """Read what `to_dict` gave."""
        fact, scores = Fact.from_dict(record["fact"]), Scores.from_dict(record["scores"])
        return cls(fact, scores, record["says"], record.get("kinds", {}), record.get("left_out", {}))


@dataclass(frozen=True)
class Report:
    """The same measurements twice; `after` is None where no edit was given."""

    before: Scores
    after: Scores | None
    facts_before: tuple[FactScores, ...]
    facts_after: tuple[FactScores, ...] | None
    left_out: tuple[LeftOut, ...] = ()

    @cached_property
    def intervals_before(self) -> dict[str, Interval]:
        """By score, and by kind as in `kinds`, the 95 % interval of its mean over facts, of two or more."""
        return intervals.intervals(columns(self.facts_before))

    @cached_property
    def intervals_after(self) -> dict[str, Interval]:
        """The same after the edit."""
        return intervals.intervals(columns(self.facts_after or ()))

    @cached_property
    def changes(self) -> dict[str, Interval]:
        """By score and by kind, the interval of after − before, paired by fact."""
        return intervals.changes(columns(self.facts_before), columns(self.facts_after or ())) if self.after else {}

    @cached_property
    def known(self) -> tuple[Scores, Scores | None]:
        """Scores before and after of the facts whose old object the unedited model said."""
        which = [i for i, one in enumerate(self.facts_before) if one.scores.knew]
        before = mean_scores(self.facts_before[i].scores for i in which)
        if self.facts_after is None:
            return before, None
        return before, mean_scores(self.facts_after[i].scores for i in which)

    @property
    def kinds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Locality and portability by kind, before and after; means over the facts that have probes of the kind."""
        return mean_kinds(self.facts_before), mean_kinds(self.facts_after or ())

    @property
    def references(self) -> int:
        """How many reference texts the document frequencies behind consistency were counted over."""
        return sum(len(one.fact.references) for one in self.facts_before)


def columns(facts: Sequence[FactScores]) -> dict[str, Sequence[float | None]]:
    """Return, by score and by kind, its value of each fact."""
    scores = {name: [getattr(f.scores, name) for f in facts] for name in score_names()}
    kinds = dict.fromkeys(name for one in facts for name in one.kinds)
    return {**scores, **{name: [one.kinds.get(name) for one in facts] for name in kinds}}


def mean_kinds(facts: Sequence[FactScores]) -> dict[str, float]:
    """Return means by kind over the facts that have it."""
    names = dict.fromkeys(name for one in facts for name in one.kinds)
    return {name: fmean(one.kinds[name] for one in facts if name in one.kinds) for name in names}


def mean_scores(scores: Iterable[Scores], drift: float | None = None, perplexity: float | None = None) -> Scores:
    """Return means over facts of what was measured; `score` is the harmonic mean of the means, as published."""
    some = list(scores)
    means: dict[str, float | None] = {}
    for name in score_names():
        measured = [value for s in some if (value := getattr(s, name)) is not None]
        means[name] = fmean(measured) if measured else None
    means["score"] = harmonic(means["efficacy"], means["paraphrase"], means["specificity"])
    means["drift"] = drift if drift is not None else means["drift"]
    means["perplexity"] = perplexity if perplexity is not None else means["perplexity"]
    return Scores.from_dict(means)
