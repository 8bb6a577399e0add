"""Result of `ffedit apply` or `ffedit evaluate` as a page, made from nothing but the record of `--json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from shlex import quote
from typing import Any, TypeAlias

from ffedit.algebra.bootstrap import Interval
from ffedit.display.html import render
from ffedit.display.picture import Picture, pictures
from ffedit.display.terminal.explanation import LEGEND
from ffedit.display.terminal.scores import WANTED, figure, signed
from ffedit.editor.recipe import yaml_of
from ffedit.evaluator import METRICS
from ffedit.facts.fact import fill
from ffedit.locator import Trace, TraceSet

Record: TypeAlias = Mapping[str, Any]
# The other prompts of a fact, by the score measured on them; prompts with answers that should stay come first.
ASKED = {
    "same_subject": "Other facts of the subject: the answer should stay",
    "specificity": "Other subjects: the answer should stay",
    "locality": "Unrelated questions: the answer should stay",
    "keep": "What the edit was to keep: the answer should stay",
    "paraphrase": "The fact in other words: the answer should be the new one",
    "also": "Wordings that the edit was made on, too: the answer should be the new one",
    "portability": "What follows from the fact: the answer should be the new one",
    "cross_lingual": "The fact in other languages: the answer should be the new one",
}
MOST_MOVED = 20
# Defaults of fields that the record of `evaluate` lacks, or that only some records have.
OF_APPLY = {"explanation": None, "edit": None, "layer": None, "chat": False, "warnings": ()}
NOT_MEASURED = "not measured", ""
# The colour of the verdict, by its outcome.
TONES = {"took": "good", "did not take": "bad", "nothing to change": "plain", "no edit": "plain"}


def result_page(record: Record) -> str:
    """Render the result of `apply`, or of `evaluate`, which has no layer, trace, costs or undo."""
    facts = sorted(record["facts"], key=lambda fact: (fact["took"], -len(changed(fact))))
    traces = [fact["trace"] for fact in facts if fact.get("trace")]
    return render(
        "result.html",
        record={**OF_APPLY, **record},
        facts=facts,
        tone=TONES.get(record["verdict"]["outcome"], "partly"),
        scores=list(score_rows(record)),
        asked=_asked,
        changed=changed,
        guarded=any(_stays(probe) for fact in facts for probe in fact["asked"]),
        moved=list({probe["prompt"]: probe for fact in facts for probe in changed(fact)}.values()),
        text=lambda fact: fill(fact["prompt"], fact["subject"]),
        heat_map=_heat_map,
        heats=len(traces),
        average=_heat_map(traces),
        traced=traces[0]["prompt"] if len(traces) == 1 and len(facts) > 1 else "",
        quote=quote,
        MOST=MOST_MOVED,
        LEGEND=LEGEND,
        recipe=yaml_of(record["recipe"]) if "recipe" in record else "",
    )


def score_rows(record: Record) -> Iterator[Record]:
    """Yield the scores that were measured, without magnitudes, and after them those by kind of probe.

    Means and intervals are text, "" where there is none; those of the headline without prompts are "not measured".
    """
    kinds = record.get("kinds") or {}
    sides = {side: {**(record[side] or {}), **(kinds.get(side) or {})} for side in ("before", "after")}
    for name in sides["before"]:
        old, new = sides["before"][name], sides["after"].get(name)
        missing = old is None and new is None
        if name.endswith("_magnitude") or (missing and name not in WANTED):
            continue
        change = None if old is None or new is None else new - old
        metric, words = METRICS[name.partition("/")[0]], partial(figure, name)
        yield {
            "name": name,
            "should": metric.direction,
            "before": NOT_MEASURED if missing else _with_interval(record["intervals"]["before"].get(name), old, words),
            "after": _with_interval(record["intervals"]["after"].get(name), new, words),
            "change": _with_interval(record["intervals"]["change"].get(name), change, signed),
            "meaning": metric.meaning if metric.name == name else "",
            "harm": name in record["verdict"]["damage"],
        }


def _with_interval(bounds: Record | None, value: float | None, words: Callable[[float], str]) -> tuple[str, str]:
    if value is None:
        return "", ""
    return words(value), "" if bounds is None else Interval(**bounds).ends(words)


def changed(fact: Record) -> list[Record]:
    """Return the prompts whose answer should have stayed and did not."""
    return [
        probe
        for probe in fact["asked"]
        if _stays(probe) and probe["after"] is not None and probe["after"] != probe["before"]
    ]


def _stays(probe: Record) -> bool:
    return METRICS[probe["score"]].direction == "keep"


def _asked(fact: Record) -> dict[str, list[Record]]:
    """Group a fact's other prompts by what is asked of them, changed answers first."""
    harmed = changed(fact)
    groups = {
        title: sorted((probe for probe in fact["asked"] if probe["score"] == score), key=lambda p: p not in harmed)
        for score, title in ASKED.items()
    }
    return {title: prompts for title, prompts in groups.items() if prompts}


def _heat_map(traces: Sequence[Record]) -> Picture | None:
    """Arrange the traces of the record as one heat map: of one fact, or the average of several."""
    if not traces:
        return None
    fields = [{name: trace[name] for name in trace if name not in ("layer", "token", "axes")} for trace in traces]
    measured = TraceSet(tuple(map(Trace.from_dict, fields)))
    return pictures([measured if len(traces) > 1 else measured.traces[0]], traces[0]["layer"])[0]
