"""The verdict on an edit as the last words of a command: what became of it, why, and what to try.

A failure is stated in words and not only by a colour. The advice names only what is possible for this model and these
facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ffedit.display.terminal.tables import ranges
from ffedit.editor import METHODS, Edit, in_reach
from ffedit.editor.provenance import ValueSearch, value_searches
from ffedit.evaluator import Report
from ffedit.evaluator.verdict import took
from ffedit.facts.text import counted, number, quoted
from ffedit.model.editable import Editable

STYLES = {"took": "bold green", "nothing to change": "bold green", "no edit": "", "did not take": "bold red"}
# Probability below which a new object was not reached, where the search aimed at a loss.
REACHED = 0.5


def verdict_view(report: Report, edit: Edit | None = None, editable: Editable | None = None) -> Text:
    """Render the verdict, a line for each caveat about the state before the edit, and, of an edit, what to try."""
    verdict = report.verdict
    words = [verdict.text]
    if edit is not None and editable is not None and verdict.outcome not in ("took", "nothing to change", "no edit"):
        missed = _missed(report, edit)
        words += [*_why(missed), *_advice(editable, report, edit, missed)]
    text = Text(" ".join(words), style=STYLES.get(verdict.outcome, "bold yellow"))
    for caveat in verdict.caveats:
        text.append(f"\n{caveat}", style="not bold yellow")
    return text


def _missed(report: Report, edit: Edit) -> list[tuple[str, ValueSearch]]:
    """List the new objects that failed for want of a value, each with how far the search for it came."""
    failed = {score.fact.text for score in report.facts_after or () if not took(score)}
    searches = zip(edit.facts, value_searches(edit), strict=True)
    return [
        (fact.new_object, search)
        for fact, search in searches
        if fact.text in failed and search is not None and search.probability < (search.wanted or REACHED)
    ]


def _why(missed: list[tuple[str, ValueSearch]]) -> Iterator[str]:
    """Say how far the search for a value came where it did not come far enough; of several, for the nearest."""
    if not missed:
        return
    new, search = max(missed, key=lambda pair: pair[1].probability)
    aim = "" if search.wanted is None else f"; {number(search.wanted)} was aimed at"
    which = "" if len(missed) == 1 else f"for {len(missed)} facts no value was found, the nearest for "
    yield (
        f"{which.capitalize()}{quoted(new)} ({counted(search.tokens, 'token')}){' with' if which else ' reached'} the "
        f"probability {number(search.probability)} after {search.steps} of {search.most_steps} steps{aim}."
    )


def _advice(editable: Editable, report: Report, edit: Edit, missed: list[tuple[str, ValueSearch]]) -> Iterator[str]:
    """Suggest other layers, fewer layers, or more steps where the steps ended before a value was found."""
    about, depth = edit.provenance, len(editable.layers)
    facts = [score.fact for score in report.facts_before]
    method = METHODS[about["method"]] if about.get("method") in METHODS else METHODS["memit"]
    token = about.get("config", {}).get("key", {}).get("fact_token", "subject_last")
    reach = in_reach(editable, facts, method, range(depth), token) if depth > 1 else range(0)
    others, options = [layer for layer in reach if layer not in edit.layers], []
    if others:
        which = f"{others[0]})" if len(others) == 1 else f"N, one of {ranges(others)})"
        options.append(f"another layer (--layers {which}")
    if len(edit.layers) > 1:
        options.append("a single layer (--spread 1)")
    if steps := [search.steps for _, search in missed if search.steps == search.most_steps]:
        options.append(f"more than {steps[0]} steps (--set value.steps={2 * steps[0]})")
    if options:
        yield f"Try {', or '.join(options)}."
