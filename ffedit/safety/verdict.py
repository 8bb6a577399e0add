"""Summarise an edit in one sentence to act on: whether it took, what else changed, and what to try.

A failure is stated in words and not only by a colour; that other scores held is stated only of those that were
measured.
"""

from __future__ import annotations

from rich.text import Text

from ffedit.editor import Edit
from ffedit.evaluator import Report, Scores
from ffedit.evaluator.scores import FactScores
from ffedit.facts.text import number, quoted

# Damage is a rate that falls by more than FELL, or drift above DRIFTED (nats per token).
FELL, DRIFTED = 0.05, 0.1
ROUNDING = 1e-9
# Paraphrase score below which the edit took in few other wordings only.
FEW_WORDINGS = 0.5
# Share of facts that took, below which a batch did not take.
MOSTLY = 0.5
KEPT = ("specificity", "same_subject")
SPARED = (*KEPT, "locality")
# Number of measured facts from which a rate is shown with its interval.
ENOUGH = 10


def took(score: FactScores) -> bool:
    """Return True if the new object is more likely than the old and is what the model generates."""
    return score.scores.efficacy in (None, 1) and score.scores.generation in (None, 1)


def knew_previous(score: FactScores) -> bool:
    """Return True if the model generated the old object, or if the fact names none."""
    return score.scores.knew in (None, 1)


def fell(before: float, after: float) -> bool:
    """Return True if a rate that should be kept fell by more than the threshold."""
    return before - after > FELL + ROUNDING


def damage(report: Report) -> list[str]:
    """Describe, in words, each rate that fell and the drift, where they exceed their thresholds."""
    before, after, harms = report.before, report.after or Scores(), []
    for name in SPARED:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and fell(old, new):
            harms.append(f"{name} fell from {old:.2f} to {new:.2f}{_interval(report, name)}")
    if after.drift is not None and after.drift > DRIFTED:
        harms.append(f"drift on generic text is {number(after.drift)} nats per token")
    return harms


def verdict(report: Report, edit: Edit | None = None) -> Text:
    """State whether the edit took and what it damaged; then, one per line, caveats about the state before the edit."""
    if report.after is None or report.facts_after is None:
        known = sum(took(score) for score in report.facts_before)
        count = len(report.facts_before)
        text = Text(f"Measured without an edit: the model already gives {known} of {count} new objects.")
    else:
        text = _outcome(report, report.after, report.facts_after, edit)
        for warning in _warnings(report.facts_before):
            text.append(f"\n{warning}", style="not bold yellow")
    return text


def _outcome(report: Report, after: Scores, facts_after: tuple[FactScores, ...], edit: Edit | None) -> Text:
    count = len(facts_after)
    failed = [score for score in facts_after if not took(score)]
    broken = damage(report)
    few = after.paraphrase is not None and after.paraphrase < FEW_WORDINGS
    if failed:
        if len(failed) > (1 - MOSTLY) * count:
            head, style = "THE EDIT DID NOT TAKE", "bold red"
        else:
            head, style = f"The edit took in part, for {count - len(failed)} of {count} facts", "bold yellow"
        also = f" Besides, {' and '.join(broken)}." if broken else ""
        return Text(f"{head}: {_failure(failed, count)}.{also} {_advice(edit)}", style=style)
    done = _success(report.facts_before, facts_after)
    if broken:
        line = f"Done, but something else broke: {done}, but {' and '.join(broken)}. {_advice(edit, steps=False)}"
        return Text(line, style="bold yellow")
    if few:
        short = f"in few other wordings (paraphrase {after.paraphrase:.2f}{_interval(report, 'paraphrase')})"
        return Text(f"Done, but narrowly: {done}, {short}. {_advice(edit)}", style="bold yellow")
    return Text(f"Done: {done}{_rest(report, after)}.", style="bold green")


def _interval(report: Report, name: str) -> str:
    """Format the 95 % interval of a rate after the edit; empty if fewer than `ENOUGH` facts were measured."""
    measured = sum(getattr(fact.scores, name) is not None for fact in report.facts_after or ())
    interval = report.intervals_after.get(name) if measured >= ENOUGH else None
    return f" [{interval.low:.2f}, {interval.high:.2f}]" if interval else ""


def _failure(failed: list[FactScores], count: int) -> str:
    weaker = [score for score in failed if score.scores.efficacy == 0]
    if count == 1:
        (score,) = failed
        new = quoted(score.fact.new_object)
        if weaker:
            return f"{new} is not more likely than the old object; the model says {quoted(score.says)}"
        return f"{new} is now more likely than the old object, but by itself the model says {quoted(score.says)}"
    reasons = []
    if weaker:
        reasons.append(f"for {len(weaker)} of {count} facts the new object is not more likely than the old")
    if len(failed) > len(weaker):
        reasons.append(f"for {len(failed) - len(weaker)} of {count} it is, but the model says something else by itself")
    return ", and ".join(reasons)


def _success(before: tuple[FactScores, ...], after: tuple[FactScores, ...]) -> str:
    if len(after) > 1:
        return f"the model now says all {len(after)} new objects"
    fact = after[0].fact
    instead = fact.previous is not None and knew_previous(before[0]) and not took(before[0])
    old = f" instead of {quoted(fact.previous or '')}" if instead else ""
    return f"the model now says {quoted(fact.new_object)}{old}"


def _rest(report: Report, after: Scores) -> str:
    """List the other scores that were measured and held, and those that were not measured."""
    before = report.before
    held = [
        f"{name} {getattr(before, name):.2f} → {getattr(after, name):.2f}{_interval(report, name)}"
        for name in SPARED
        if getattr(before, name) is not None and getattr(after, name) is not None
    ]
    missing = [name for name in KEPT if getattr(after, name) is None]
    if after.drift is not None:
        held.append(f"drift {number(after.drift)} nats per token")
    text = f", and what else was measured held ({', '.join(held)})" if held else ""
    return text + (f"; {' and '.join(missing)} could not be measured" if missing else "")


def _advice(edit: Edit | None, steps: bool = True) -> str:
    """Suggest what to try; with `steps`, also more optimisation steps, which make a weak edit stronger."""
    if edit is None:
        return "Try another layer (--layers N)."
    layers = ", ".join(map(str, edit.layers))
    tried = edit.provenance.get("config", {}).get("value", {}).get("steps") if steps else None
    more = f" or, from Python, more than {tried} steps (EditConfig.value.steps)" if tried else ""
    return f"Try another layer than {layers} (--layers N){more}."


def _warnings(before: tuple[FactScores, ...]) -> list[str]:
    """List signs that the success is not due to the edit: the state of the model before it."""
    notes, count = [], len(before)
    believed = [score for score in before if score.scores.efficacy == 1]
    if believed and count == 1:
        new = quoted(believed[0].fact.new_object)
        notes.append(f"Even before the edit the model found {new} more likely than the old object.")
    elif believed:
        notes.append(f"{len(believed)} of {count} new objects were more likely than the old ones even before the edit.")
    if said := sum(score.scores.efficacy is None and took(score) for score in before):
        which = "the new object" if count == 1 else f"{said} of {count} new objects"
        notes.append(f"The model said {which} even before the edit.")
    ignorant = [score for score in before if not knew_previous(score)]
    if ignorant and count == 1:
        (score,) = ignorant
        old = quoted(score.fact.previous or "")
        notes.append(f"It did not know the old object {old}: before the edit it said {quoted(score.says)}.")
    elif ignorant:
        share = f"{len(ignorant)} of {count} old objects"
        notes.append(f"{share} were not known: the model said something else before the edit.")
    return notes
