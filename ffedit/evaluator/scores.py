"""Scores of one fact and of several: a number for each of `METRICS`, their means, and counts of prompts left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from ffedit.evaluator.metrics import METRICS, SCORE_PARTS, harmonic
from ffedit.facts.fact import Fact
from ffedit.facts.text import counted

# Headline scores of ffedit, in order.
NAMES = (
    *("efficacy", "paraphrase", "specificity", "same_subject", "portability", "score", "generation"),
    *("keep", "also", "cross_lingual", "degenerate", "greedy_entropy", "drift"),
)
# The items that a score is measured on.
MEASURED_ON = {
    "efficacy": "prompt",
    "paraphrase": "paraphrase",
    "specificity": "neighbor",
    "same_subject": "same-subject prompt",
    "portability": "question",
    "locality": "unrelated question",
    "keep": "keep prompt",
    "cross_lingual": "prompt in another language",
    "neighbor_with_edit": "neighbor",
    "divergence": "neighbor",
}
# Reasons to leave prompts of a fact out of a score, by the suffix of the score's name in `FactScores.left_out`.
REASONS = {
    "/edited": "the fact that they ask for is edited as well",
    "/unsaid": "no object is named, and the model says none before the edit",
    "/one": "both objects are the same, so there is nothing to compare",
    "/alone": "they need edits that are not made together with this one",
}
OF_SCORE = {
    "neighbor_with_edit": "too long for the model after the edit's sentence",
    "divergence": "outside the sample whose distributions are kept",
    "cross_lingual": "the model's tokenizer does not know them",
}


def headline_scores() -> tuple[str, ...]:
    """Return the names of the headline scores: those of ffedit, and all that other packages add."""
    return (*NAMES, *(name for name, metric in METRICS.items() if metric.package != "ffedit"))


class Scores(SimpleNamespace):
    """Scores by the name of the metric (`ffedit.evaluator.metrics`), as attributes: `scores.efficacy`.

    Rates are shares, magnitudes differences of probability, drift nats per token; None where unmeasured.
    """

    def __init__(self, **values: float | None) -> None:
        if unknown := [name for name in values if name not in METRICS]:
            raise TypeError(f"there is no score {unknown[0]!r}; known are {', '.join(METRICS)}")
        super().__init__(**{name: values.get(name) for name in METRICS})

    def __repr__(self) -> str:
        measured = (f"{name}={value:.3g}" for name, value in vars(self).items() if value is not None)
        return f"Scores({', '.join(measured)})"

    def __getattr__(self, name: str) -> float | None:
        raise AttributeError(f"there is no score {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("scores do not change")

    def to_dict(self) -> dict[str, float | None]:
        """Return plain numbers by name."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, numbers: Mapping[str, float | None]) -> Scores:
        """Read what `to_dict` returned; a metric that is not installed here is left out."""
        return cls(**{name: value for name, value in numbers.items() if name in METRICS})


@dataclass(frozen=True)
class Continuation:
    """A prompt of a fact other than the edited one, and how the model continues it."""

    score: str  # name of the score that is measured on the prompt
    prompt: str
    answer: str  # the answer that the score favours
    says: str  # the first words of the greedy continuation, as many as it takes to compare them with the answer
    right: bool | None = None  # whether it says the answer; None in records without this


@dataclass(frozen=True)
class FactScores:
    """One fact's scores."""

    fact: Fact  # the fact that was scored
    scores: Scores  # of this fact alone
    says: str  # the model's greedy continuation of its prompt
    # Portability and locality by the data set's kinds of probes, as `metrics.by_kind` returns them.
    kinds: Mapping[str, float] = field(default_factory=dict)
    # Number of the fact's prompts that were left out, by score, or by score and reason ("specificity/edited"; the
    # reasons are in `REASONS`).
    left_out: Mapping[str, int] = field(default_factory=dict)
    asked: tuple[Continuation, ...] = ()  # the other prompts that were asked

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        asked = [asdict(continuation) for continuation in self.asked]
        optional = {"kinds": dict(self.kinds), "left_out": dict(self.left_out), "asked": asked}
        filled = {name: value for name, value in optional.items() if value}
        return {"fact": self.fact.to_dict(), "scores": self.scores.to_dict(), "says": self.says, **filled}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FactScores:
        """Read what `to_dict` returned; kinds of a metric that is not installed here are left out."""
        fact, scores = Fact.from_dict(record["fact"]), Scores.from_dict(record["scores"])
        asked = tuple(Continuation(**fields) for fields in record.get("asked", ()))
        kinds = {name: value for name, value in record.get("kinds", {}).items() if name.partition("/")[0] in METRICS}
        return cls(fact, scores, record["says"], kinds, record.get("left_out", {}), asked)


@dataclass(frozen=True)
class LeftOut:
    """Items that one score was not measured on."""

    score: str  # name of the score
    count: int  # number of items left out
    what: str  # the items: "neighbors of 5 facts"
    reason: str  # why they were left out

    def __str__(self) -> str:
        return f"{self.score}: {self.count} {self.what} left out: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)


def left_out(facts: Collection[FactScores]) -> tuple[LeftOut, ...]:
    """Count the items left out of the scores of distinct `facts`, by score and reason."""
    items = []
    for score, item in MEASURED_ON.items():
        for suffix, reason in {**REASONS, "": OF_SCORE.get(score, "")}.items():
            counts = [fact.left_out[score + suffix] for fact in facts if score + suffix in fact.left_out]
            if counts:
                noun, preposition, rest = item.partition(" in ")
                what = f"{noun}{'s' * (sum(counts) > 1)}{preposition}{rest} of {counted(len(counts), 'fact')}"
                items.append(LeftOut(score, sum(counts), what, reason))
    return tuple(items)


def columns(facts: Sequence[FactScores]) -> dict[str, Sequence[float | None]]:
    """Return the value of each fact, by score and by kind."""
    scores = {name: [getattr(fact.scores, name) for fact in facts] for name in METRICS}
    kinds = dict.fromkeys(name for fact in facts for name in fact.kinds)
    return {**scores, **{name: [fact.kinds.get(name) for fact in facts] for name in kinds}}


def subjects(facts: Sequence[FactScores]) -> list[str]:
    """Return the subject of each fact."""
    return [fact.fact.subject for fact in facts]


def mean_kinds(facts: Sequence[FactScores]) -> dict[str, float]:
    """Return the mean of each kind over the facts that have it."""
    names = dict.fromkeys(name for fact in facts for name in fact.kinds)
    return {name: fmean(fact.kinds[name] for fact in facts if name in fact.kinds) for name in names}


def mean_scores(scores: Iterable[Scores], **of_model: float | None) -> Scores:
    """Return means over facts of what was measured; `score` is the harmonic mean of the means, as published.

    Scores of the whole model (`of_model`) replace means.
    """
    facts = list(scores)
    means: dict[str, float | None] = {}
    for name in METRICS:
        measured = [value for fact in facts if (value := getattr(fact, name)) is not None]
        means[name] = fmean(measured) if measured else None
    means["score"] = harmonic(*(means[rate] for rate in SCORE_PARTS))
    return Scores(**means | {name: value for name, value in of_model.items() if value is not None})
