"""Decide whether an edit took, and what else changed, from the scores before and after it.

A fact took if the new object is more likely than the old one and is what the model generates. A batch did not take if
fewer than half of its facts took; it took in part if not all did. The terminal, JSON, model cards and exit codes all
read the same `Verdict` of a `Report`. It says that other scores held only if they were measured.

A fall of any metric that should stay as before the edit, of ffedit or of another package, counts as damage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ffedit.algebra.bootstrap import Interval
from ffedit.evaluator.metrics import METRICS
from ffedit.evaluator.scores import FactScores, Scores
from ffedit.facts.text import number, quoted

Outcome: TypeAlias = Literal[
    "took",
    "took narrowly",
    "took, but text breaks",
    "took with damage",
    "took in part",
    "did not take",
    "nothing to change",
    "no edit",
]
# Damage is a score that falls by more than FELL though it should stay, or drift above DRIFTED (nats per token).
FELL, DRIFTED = 0.05, 0.1
# Units whose scale ends at 1, so that FELL is the same step on each.
UNITS = ("share", "probability", "cosine")
# Scores that every fact should have prompts for; a verdict names those that were not measured.
EXPECTED = ("specificity", "same_subject")
ROUNDING = 1e-9
# Text breaks where `degenerate` rises by more than BREAKS and by more than three standard deviations of its change by
# harmless edits. TEXT_NOISE is the deviation for one text (the mean is 0), since small models repeat themselves now and
# then, before an edit as after it. For five texts, three deviations are .40: more than a loop in one text makes.
BREAKS, TEXT_NOISE = 0.1, 0.3
# Or where `special_tokens` rises by more than one text full of them makes, or by more than this.
HALF_A_TEXT = 0.5
# The scores that show broken text, with words for their values before (`old`) and after the edit (`new`).
BREAKING = {
    "special_tokens": "special tokens took the place of {new:.0%} of the text it then says",
    "degenerate": "{new:.0%} of the tokens it then says are special or repeated, {old:.0%} before the edit",
}
# Paraphrase score below which the edit took in few other wordings only.
FEW_WORDINGS = 0.5
# Share of facts that took, below which a batch did not take.
MOSTLY = 0.5
# Number of measured facts from which a rate is shown with its interval.
ENOUGH = 10


@dataclass(frozen=True)
class Verdict:
    """Outcome of an edit, and what it damaged."""

    # "took"; "took narrowly", in few other wordings; "took, but text breaks", the text behind the new object has
    # special or repeated tokens; "took with damage", something else changed; "took in part", not for all facts; "did
    # not take", for fewer than half of them; "nothing to change", the model said all new objects before; "no edit",
    # only the unedited model was measured.
    outcome: Outcome
    facts: int  # number of facts measured
    took: int  # number of them that took
    damage: Mapping[str, str]  # by score that changed beyond its threshold, the change in words
    text: str  # the outcome and its reason, one sentence
    caveats: tuple[str, ...] = ()  # what the state before the edit says about the outcome, a sentence each

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, with `damage` as the names of the scores."""
        return {**asdict(self), "damage": list(self.damage), "caveats": list(self.caveats)}


def judge(
    means_before: Scores,
    means_after: Scores | None,
    before: Sequence[FactScores],
    after: Sequence[FactScores] | None,
    intervals: Mapping[str, Interval],
) -> Verdict:
    """Decide what became of the edit that was measured.

    Args:
        means_before: means over facts before the edit.
        means_after: means after it; None where there is none.
        before: the scores of each fact before it.
        after: the same after it; None where there is none.
        intervals: by score, the 95 % interval of its mean after the edit.
    """
    count = len(before)
    if means_after is None or after is None:
        already = sum(map(took, before))
        text = f"Measured without an edit: the model already gives {already} of {count} new objects."
        return Verdict("no edit", count, already, {}, text)
    ends = _ends(after, intervals)
    failed, caveats = [score for score in after if not took(score)], _caveats(before)
    harms, paraphrase = damage(means_before, means_after, texts(after), ends), means_after.paraphrase
    broken = " and ".join(harms.values())
    outcome: Outcome
    if failed:
        besides = f" Besides, {broken}." if harms else ""
        if len(failed) > (1 - MOSTLY) * count:
            outcome, text = "did not take", f"THE EDIT DID NOT TAKE: {_failure(failed, count)}.{besides}"
        else:
            partly = f"The edit took in part, for {count - len(failed)} of {count} facts"
            outcome, text = "took in part", f"{partly}: {_failure(failed, count)}.{besides}"
    elif harms.keys() & BREAKING.keys():
        outcome, text = "took, but text breaks", f"Done, but text breaks: {_success(before, after)}, but {broken}."
    elif harms:
        outcome, text = "took with damage", f"Done, but something else broke: {_success(before, after)}, but {broken}."
    elif all(map(took, before)) and (paraphrase or 0) <= (means_before.paraphrase or 0):
        objects = quoted(after[0].fact.new_object) if count == 1 else f"all {count} new objects"
        outcome, text = "nothing to change", f"Nothing to change: the model said {objects} before the edit, too."
        caveats = []
    elif paraphrase is not None and paraphrase < FEW_WORDINGS:
        short = f"in few other wordings (paraphrase {paraphrase:.2f}{ends.get('paraphrase', '')})"
        outcome, text = "took narrowly", f"Done, but narrowly: {_success(before, after)}, {short}."
    else:
        outcome, text = "took", f"Done: {_success(before, after)}{_rest(means_before, means_after, ends)}."
    return Verdict(outcome, count, count - len(failed), harms, text, tuple(caveats))


def took(score: FactScores) -> bool:
    """Return True if the new object is more likely than the old and is what the model generates."""
    return score.scores.efficacy in (None, 1) and score.scores.generation in (None, 1)


def knew_previous(score: FactScores) -> bool:
    """Return True if the model generated the old object, or if the fact names none."""
    return score.scores.knew in (None, 1)


def kept() -> list[str]:
    """Return the names of the scores, of all packages, whose fall is damage.

    They should stay as before the edit, on a scale that ends at 1. Of a magnitude and its rate, only the rate counts.
    """
    names = [name for name, metric in METRICS.items() if metric.direction == "keep" and metric.unit in UNITS]
    return [name for name in names if name == (rate := name.removesuffix("_magnitude")) or rate not in METRICS]


def fell(before: float, after: float) -> bool:
    """Return True if a score that should be kept fell by more than the threshold."""
    return before - after > FELL + ROUNDING


def texts(facts: Sequence[FactScores]) -> int:
    """Count the prompts after which text was generated: each fact's own, and its other wordings."""
    return sum(1 + len(fact.fact.paraphrases) for fact in facts)


def breaks(name: str, before: float, after: float, count: int) -> bool:
    """Return True if a score of `BREAKING`, a mean over `count` texts, rises by more than chance explains."""
    if name == "special_tokens":
        return after - before > min(HALF_A_TEXT, max(FELL, 1 / count))
    return after - before > max(BREAKS, 3 * TEXT_NOISE / math.sqrt(count))


def damage(before: Scores, after: Scores, count: int, ends: Mapping[str, str]) -> dict[str, str]:
    """Describe, by score, each that fell, text that breaks, and the drift, where they exceed their thresholds.

    `paraphrase` is among them: an edit of what the model says already may cost it other wordings. `count` is the number
    of texts behind the scores of `BREAKING`; `ends` has the intervals of scores, in words.
    """
    values = {name: (getattr(before, name), getattr(after, name)) for name in (*kept(), "paraphrase", *BREAKING)}
    # Text that ended at once before the edit was not broken.
    values |= {name: (values[name][0] or 0.0, values[name][1]) for name in BREAKING}
    measured = {name: (old, new) for name, (old, new) in values.items() if old is not None and new is not None}
    harms = {}
    for name, (old, new) in measured.items():
        if name in BREAKING and breaks(name, old, new, count):
            harms[name] = BREAKING[name].format(old=old, new=new)
        elif name not in BREAKING and fell(old, new):
            harms[name] = f"{name} fell from {old:.2f} to {new:.2f}{ends.get(name, '')}"
    if after.drift is not None and after.drift > DRIFTED:
        harms["drift"] = f"drift on generic text is {number(after.drift)} nats per token"
    return harms


def _ends(facts: Sequence[FactScores], intervals: Mapping[str, Interval]) -> dict[str, str]:
    """Format the 95 % intervals of scores that were measured on `ENOUGH` facts or more."""
    counts = {name: sum(getattr(fact.scores, name, None) is not None for fact in facts) for name in intervals}
    return {
        name: f" {interval.ends('{:.2f}'.format)}".rstrip()
        for name, interval in intervals.items()
        if counts[name] >= ENOUGH
    }


def _failure(failed: Sequence[FactScores], count: int) -> str:
    if count == 1:
        (score,) = failed
        new = quoted(score.fact.new_object)
        if score.scores.efficacy == 0:
            return f"{new} is not more likely than the old object; the model says {quoted(score.says)}"
        likelier = "" if score.scores.efficacy is None else f"{new} is now more likely than the old object, but "
        return f"{likelier}the model generates {quoted(score.says)}{'' if likelier else f', not {new}'}"
    reasons = {  # by efficacy; None: there was no other object to compare with
        0: " facts the new object is not more likely than the old",
        1: " it is more likely, but the model generates another answer",
        None: " the model generates another answer",
    }
    counts = Counter(score.scores.efficacy for score in failed)
    return ", and ".join(f"for {counts[key]} of {count}{reason}" for key, reason in reasons.items() if counts[key])


def _success(before: Sequence[FactScores], after: Sequence[FactScores]) -> str:
    if len(after) > 1:
        return f"the model now says all {len(after)} new objects"
    fact = after[0].fact
    instead = fact.previous is not None and knew_previous(before[0]) and not took(before[0])
    old = f" instead of {quoted(fact.previous or '')}" if instead else ""
    return f"the model now says {quoted(fact.new_object)}{old}"


def _rest(before: Scores, after: Scores, ends: Mapping[str, str]) -> str:
    """List the other scores that were measured and held, and those that were not measured."""
    names = kept()
    shown = [
        f"{name} {getattr(before, name):.2f} → {getattr(after, name):.2f}{ends.get(name, '')}"
        for name in [*names, "degenerate"]
        if getattr(before, name) is not None and getattr(after, name) is not None
    ]
    missing = [name for name in EXPECTED if getattr(after, name) is None]
    if after.drift is not None:
        shown.append(f"drift {number(after.drift)} nats per token")
    text = f", and the other scores held ({', '.join(shown)})" if shown else ""
    return text + (f"; not measured, since no prompt was given or left: {' and '.join(missing)}" if missing else "")


def _caveats(before: Sequence[FactScores]) -> list[str]:
    """List signs that the success is not due to the edit: the state of the model before it."""
    notes, count = [], len(before)
    believed = [score for score in before if score.scores.efficacy == 1]
    if believed and count == 1:
        new = quoted(believed[0].fact.new_object)
        notes.append(f"Even before the edit the model found {new} more likely than the old object.")
    elif believed:
        notes.append(f"{len(believed)} of {count} new objects were more likely than the old ones even before the edit.")
    if said := sum(score.scores.efficacy is None and took(score) for score in before):
        objects = "the new object" if count == 1 else f"{said} of {count} new objects"
        notes.append(f"The model said {objects} even before the edit.")
    ignorant = [score for score in before if not knew_previous(score)]
    if ignorant and count == 1:
        (score,) = ignorant
        old = quoted(score.fact.previous or "")
        notes.append(f"It did not know the old object {old}: before the edit it said {quoted(score.says)}.")
    elif ignorant:
        objects = f"{len(ignorant)} of {count} old objects"
        notes.append(f"{objects} were not known: the model said something else before the edit.")
    return notes
