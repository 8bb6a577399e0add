"""Report on an edit, the scores before and after it, and its verdict: did it take, and what else changed?

A fact took if the new object is more likely than the old one and is what the model generates. A batch did not take if
fewer than half of its facts took; it took in part if not all did. A fall of any metric that should stay as before the
edit, of ffedit or of another package, counts as damage. The terminal, JSON, model cards and exit codes all read the one
`Verdict` of a `Report`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ffedit.algebra.bootstrap import Interval
from ffedit.evaluator import intervals
from ffedit.evaluator.metrics import METRICS
from ffedit.evaluator.scores import (
    FactScores,
    LeftOut,
    Scores,
    columns,
    headline_scores,
    mean_kinds,
    mean_scores,
    subjects,
)
from ffedit.facts.text import counted, number, quoted
from ffedit.notebook import Displayed, data_frame

if TYPE_CHECKING:
    from pandas import DataFrame

Outcome: TypeAlias = Literal[
    "took",
    "took narrowly",  # in few other wordings
    "took, but text breaks",  # what is said behind the new object is special or repeated tokens
    "took with damage",  # something else changed
    "took in part",  # not for all facts
    "did not take",  # for fewer than half of them
    "nothing to change",  # the model said all new objects before
    "no edit",  # only the unedited model was measured
]
# Damage is a score that falls by more than FELL though it should stay, or drift above DRIFTED (nats per token).
FELL, DRIFTED = 0.05, 0.1
UNITS = ("share", "probability", "cosine")  # whose scale ends at 1, so that FELL is the same step on it
EXPECTED = ("specificity", "same_subject")  # what every fact should be asked, so that it is said where it was not
ROUNDING = 1e-9
# Text breaks where `degenerate` rises by more than BREAKS, and by more than three standard deviations of what edits
# that break nothing do. In one text these move it by TEXT_NOISE (standard deviation; 0 on average), since small models
# repeat themselves now and then, before an edit as after it. Of five texts, three are .40: no single loop is as much.
BREAKS, TEXT_NOISE = 0.1, 0.3
# Or where `special_tokens` is more than one text of those makes it, or half of a single text.
HALF_A_TEXT = 0.5
# The scores that tell it, and how, from before (`old`) and after the edit (`new`).
BREAKING = {
    "special_tokens": "special tokens took the place of {new:.0%} of the text it then says",
    "degenerate": "{new:.0%} of the tokens it then says are special or repeated, {old:.0%} before the edit",
}
FEW_WORDINGS = 0.5  # paraphrase score below which the edit took in few other wordings only
MOSTLY = 0.5  # share of facts that took, below which a batch did not take
ENOUGH = 10  # number of measured facts from which a rate is shown with its interval


@dataclass(frozen=True)
class Verdict:
    """What became of an edit."""

    outcome: Outcome
    facts: int  # number of facts measured
    took: int  # number of them that took
    damage: Mapping[str, str]  # by score that changed beyond its threshold, how, in words
    text: str  # the outcome and its reason, one sentence
    caveats: tuple[str, ...] = ()  # what the state before the edit says about the outcome, a sentence each

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON; of the damage, the names of the scores."""
        return {**asdict(self), "damage": list(self.damage), "caveats": list(self.caveats)}


def judge(report: Report) -> Verdict:
    """Decide what became of the edit that was measured."""
    before, after, count = report.facts_before, report.facts_after, len(report.facts_before)
    if report.after is None or after is None:
        known = sum(map(took, before))
        text = f"Measured without an edit: the model already gives {known} of {count} new objects."
        return Verdict("no edit", count, known, {}, text)
    ends = _ends(after, report.intervals_after)
    failed, caveats = [score for score in after if not took(score)], _caveats(before)
    harms, paraphrase = damage(report.before, report.after, texts(after), ends), report.after.paraphrase
    broken = " and ".join(harms.values())
    outcome: Outcome
    if failed:
        also = f" Besides, {broken}." if harms else ""
        if len(failed) > (1 - MOSTLY) * count:
            outcome, text = "did not take", f"THE EDIT DID NOT TAKE: {_failure(failed, count)}.{also}"
        else:
            taken = f"The edit took in part, for {count - len(failed)} of {count} facts"
            outcome, text = "took in part", f"{taken}: {_failure(failed, count)}.{also}"
    elif harms.keys() & BREAKING.keys():
        outcome, text = "took, but text breaks", f"Done, but text breaks: {_success(before, after)}, but {broken}."
    elif harms:
        outcome, text = "took with damage", f"Done, but something else broke: {_success(before, after)}, but {broken}."
    elif all(map(took, before)) and (paraphrase or 0) <= (report.before.paraphrase or 0):
        said = quoted(after[0].fact.new_object) if count == 1 else f"all {count} new objects"
        outcome, text = "nothing to change", f"Nothing to change: the model said {said} before the edit, too."
        caveats = []
    elif paraphrase is not None and paraphrase < FEW_WORDINGS:
        short = f"in few other wordings (paraphrase {paraphrase:.2f}{ends.get('paraphrase', '')})"
        outcome, text = "took narrowly", f"Done, but narrowly: {_success(before, after)}, {short}."
    else:
        outcome, text = "took", f"Done: {_success(before, after)}{_rest(report.before, report.after, ends)}."
    return Verdict(outcome, count, count - len(failed), harms, text, tuple(caveats))


def took(score: FactScores) -> bool:
    """Return True if the new object is more likely than the old and is what the model generates."""
    return score.scores.efficacy in (None, 1) and score.scores.generation in (None, 1)


def knew_previous(score: FactScores) -> bool:
    """Return True if the model generated the old object, or if the fact names none."""
    return score.scores.knew in (None, 1)


def kept() -> list[str]:
    """Return the names of the scores, of all packages, in which a fall is damage.

    Those that should stay as before the edit and whose scale ends at 1. A magnitude is judged by its rate.
    """
    names = [name for name, metric in METRICS.items() if metric.direction == "keep" and metric.unit in UNITS]
    return [name for name in names if name == (rate := name.removesuffix("_magnitude")) or rate not in METRICS]


def fell(before: float, after: float) -> bool:
    """Return True if a score that should be kept fell by more than the threshold."""
    return before - after > FELL + ROUNDING


def texts(facts: Sequence[FactScores]) -> int:
    """Return after how many prompts text was generated: each fact's own, and its other wordings."""
    return sum(1 + len(fact.fact.paraphrases) for fact in facts)


def breaks(name: str, before: float, after: float, count: int) -> bool:
    """Return True if a score of `BREAKING`, a mean over `count` texts, rises beyond what chance makes of so many."""
    if name == "special_tokens":
        return after - before > min(HALF_A_TEXT, max(FELL, 1 / count))
    return after - before > max(BREAKS, 3 * TEXT_NOISE / math.sqrt(count))


def damage(before: Scores, after: Scores, count: int, ends: Mapping[str, str]) -> dict[str, str]:
    """Describe, by score, each that fell, text that breaks, and the drift, where they exceed their thresholds.

    `count` is the number of texts that the scores of `BREAKING` are means of, `ends` the intervals of scores, in words.
    """
    harms = {}
    for name in (*kept(), *BREAKING):
        old, new = getattr(before, name), getattr(after, name)
        if old is None or new is None:
            continue
        if name in BREAKING and breaks(name, old, new, count):
            harms[name] = BREAKING[name].format(old=old, new=new)
        elif name not in BREAKING and fell(old, new):
            harms[name] = f"{name} fell from {old:.2f} to {new:.2f}{ends.get(name, '')}"
    if after.drift is not None and after.drift > DRIFTED:
        harms["drift"] = f"drift on generic text is {number(after.drift)} nats per token"
    return harms


def _ends(facts: Sequence[FactScores], intervals: Mapping[str, Interval]) -> dict[str, str]:
    """Format the 95 % intervals of scores that were measured on `ENOUGH` facts or more."""
    return {
        name: f" {interval.ends('{:.2f}'.format)}".rstrip()
        for name, interval in intervals.items()
        if sum(getattr(fact.scores, name, None) is not None for fact in facts) >= ENOUGH
    }


def _failure(failed: Sequence[FactScores], count: int) -> str:
    weaker = sum(score.scores.efficacy == 0 for score in failed)
    if count == 1:
        (score,) = failed
        new = quoted(score.fact.new_object)
        if weaker:
            return f"{new} is not more likely than the old object; the model says {quoted(score.says)}"
        likelier = "" if score.scores.efficacy is None else f"{new} is now more likely than the old object, but "
        return f"{likelier}the model generates {quoted(score.says)}{'' if likelier else f', not {new}'}"
    reasons = []
    if weaker:
        reasons.append(f"for {weaker} of {count} facts the new object is not more likely than the old")
    if stronger := len(failed) - weaker:
        reasons.append(f"for {stronger} of {count} it is more likely, but the model generates another answer")
    return ", and ".join(reasons)


def _success(before: Sequence[FactScores], after: Sequence[FactScores]) -> str:
    if len(after) > 1:
        return f"the model now says all {len(after)} new objects"
    fact = after[0].fact
    instead = fact.previous is not None and knew_previous(before[0]) and not took(before[0])
    old = f" instead of {quoted(fact.previous or '')}" if instead else ""
    return f"the model now says {quoted(fact.new_object)}{old}"


def _rest(before: Scores, after: Scores, ends: Mapping[str, str]) -> str:
    held = [
        f"{name} {getattr(before, name):.2f} → {getattr(after, name):.2f}{ends.get(name, '')}"
        for name in [*kept(), "degenerate"]
        if getattr(before, name) is not None and getattr(after, name) is not None
    ]
    missing = [name for name in EXPECTED if getattr(after, name) is None]
    if after.drift is not None:
        held.append(f"drift {number(after.drift)} nats per token")
    text = f", and the other scores held ({', '.join(held)})" if held else ""
    return text + (f"; not measured, since the fact has no prompts for it: {' and '.join(missing)}" if missing else "")


def _caveats(before: Sequence[FactScores]) -> list[str]:
    """List signs that the success is not due to the edit: the state of the model before it."""
    notes, count = [], len(before)
    believed = sum(score.scores.efficacy == 1 for score in before)
    if believed and count == 1:
        new = quoted(before[0].fact.new_object)
        notes.append(f"Even before the edit the model found {new} more likely than the old object.")
    elif believed:
        notes.append(f"{believed} of {count} new objects were more likely than the old ones even before the edit.")
    if said := sum(score.scores.efficacy is None and took(score) for score in before):
        which = "the new object" if count == 1 else f"{said} of {count} new objects"
        notes.append(f"The model said {which} even before the edit.")
    ignorant = sum(not knew_previous(score) for score in before)
    if ignorant and count == 1:
        old = quoted(before[0].fact.previous or "")
        notes.append(f"It did not know the old object {old}: before the edit it said {quoted(before[0].says)}.")
    elif ignorant:
        share = f"{ignorant} of {count} old objects"
        notes.append(f"{share} were not known: the model said something else before the edit.")
    return notes


@dataclass(frozen=True)
class Report(Displayed):
    """The same measurements twice; `after` is None where no edit was given."""

    before: Scores
    after: Scores | None
    facts_before: tuple[FactScores, ...]
    facts_after: tuple[FactScores, ...] | None
    left_out: tuple[LeftOut, ...] = ()

    def __repr__(self) -> str:
        sides = [side for side in (self.before, self.after) if side is not None]
        lines = [f"Report on {counted(len(self.facts_before), 'fact')}{', before → after' if self.after else ''}"]
        for name in headline_scores():
            values = [getattr(side, name) for side in sides]
            if any(value is not None for value in values):
                shown = " → ".join("not measured" if value is None else number(value) for value in values)
                lines.append(f"{name:<14}  {shown}")
        return "\n  ".join(lines)

    def to_frame(self) -> DataFrame:
        """Return a pandas data frame: a row for each fact and side ("before", "after"), a column for each score.

        Raises:
            FFEditError: pandas is not installed.
        """
        sides = {"before": self.facts_before, "after": self.facts_after or ()}
        about = ("subject", "prompt", "target", "previous")
        frame = data_frame(
            {name: getattr(fact.fact, name) for name in about} | {"side": side, "says": fact.says} | vars(fact.scores)
            for side, facts in sides.items()
            for fact in facts
        )
        return frame.dropna(axis="columns", how="all")

    @cached_property
    def verdict(self) -> Verdict:
        """Return what became of the edit: whether it took, and what it damaged."""
        return judge(self)

    @cached_property
    def intervals_before(self) -> dict[str, Interval]:
        """By score, and by kind as in `kinds`, the 95 % interval of its mean over facts, of two subjects or more."""
        return intervals.intervals(columns(self.facts_before), subjects=subjects(self.facts_before))

    @cached_property
    def intervals_after(self) -> dict[str, Interval]:
        """Return the intervals of the scores after the edit."""
        return intervals.intervals(columns(self.facts_after or ()), subjects=subjects(self.facts_after or ()))

    @cached_property
    def changes(self) -> dict[str, Interval]:
        """By score and by kind, the interval of after − before, paired by fact."""
        if not self.after:
            return {}
        both = columns(self.facts_before), columns(self.facts_after or ())
        return intervals.changes(*both, subjects=subjects(self.facts_before))

    @cached_property
    def known(self) -> tuple[Scores, Scores | None]:
        """Scores before and after of the facts whose old object the unedited model said."""
        known = [bool(fact.scores.knew) for fact in self.facts_before]
        before = mean_scores(fact.scores for fact in compress(self.facts_before, known))
        after = None if self.facts_after is None else mean_scores(f.scores for f in compress(self.facts_after, known))
        return before, after

    @property
    def kinds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Locality and portability by kind, before and after; means over the facts that have probes of the kind."""
        return mean_kinds(self.facts_before), mean_kinds(self.facts_after or ())

    @property
    def references(self) -> int:
        """Return how many reference texts the document frequencies behind consistency were counted over."""
        return sum(len(fact.fact.references) for fact in self.facts_before)
