"""What is measured, in the field's terms.

With p(o | x) the geometric-mean token probability of object o after prompt x, exp of the mean log-probability of its
tokens, as CounterFact compares it (Meng et al. 2022, arXiv 2202.05262, section 3.3 and appendix):

    efficacy      share of edited prompts with p(new) > p(old); magnitude: mean p(new) − p(old). Up.
    paraphrase    the same over other wordings of the fact. Up.
    specificity   share of neighbors (other subjects) with p(true) > p(new); magnitude: mean p(true) − p(new). Keep.
    same_subject  share of prompts on other facts of the subject that free greedy generation still answers with the true
                  object (where it is given) or with what the model said before; magnitude: mean p(true) − p(new). Keep.
    score         harmonic mean of efficacy, paraphrase and specificity, as published. Up.
    generation    share of edited prompts after which free greedy generation says the new object, all of it. Up.
    drift         mean KL(before ‖ after) of next-token distributions over generic text, nats per token. Zero is best.
    perplexity    exp of the mean −log p of the tokens of that text, which the unedited model has sampled. Keep.

A score that nothing was there to measure is None, never 0 or 1. Scores of several facts are means over facts, each
fact first averaged over its prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import fmean, harmonic_mean

from ffedit.facts import Fact

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

    def to_dict(self) -> dict[str, float | None]:
        """Plain numbers by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class FactScores:
    """One fact's scores, and what the model said to its prompt by itself."""

    fact: Fact
    scores: Scores
    says: str


@dataclass(frozen=True)
class Report:
    """The same measurements twice; `after` is None where no edit was given."""

    before: Scores
    after: Scores | None
    facts_before: tuple[FactScores, ...]
    facts_after: tuple[FactScores, ...] | None


def combined(efficacy: float | None, paraphrase: float | None, specificity: float | None) -> float | None:
    """The harmonic mean of the three; None where one is missing."""
    if efficacy is None or paraphrase is None or specificity is None:
        return None
    return harmonic_mean([efficacy, paraphrase, specificity])


def mean_scores(scores: Iterable[Scores], drift: float | None = None, perplexity: float | None = None) -> Scores:
    """Means over facts of what was measured; `score` is the harmonic mean of the means, as published."""
    some = list(scores)
    means: dict[str, float | None] = {}
    for field in fields(Scores):
        measured = [value for s in some if (value := getattr(s, field.name)) is not None]
        means[field.name] = fmean(measured) if measured else None
    means["score"] = combined(means["efficacy"], means["paraphrase"], means["specificity"])
    means["drift"] = drift if drift is not None else means["drift"]
    means["perplexity"] = perplexity if perplexity is not None else means["perplexity"]
    return Scores(**means)
