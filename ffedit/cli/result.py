"""The results that commands write with `--json`: plain numbers, null where there was nothing to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ffedit.display.terminal.routing import plain
from ffedit.editor import Edit
from ffedit.editor.provenance import versions
from ffedit.evaluator import Report, Scores
from ffedit.facts.fact import Fact
from ffedit.inference.routing import Routes
from ffedit.layer_choice.calibrate import Choice
from ffedit.layer_choice.choose import Found, Sweep
from ffedit.locator import Aggregate, Trace, TraceSet
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint


def trace(traced: Trace, layer: int) -> dict[str, Any]:
    """Return one fact's trace, with the layer that is edited."""
    return {
        "layer": layer,
        "token": traced.subject_last,
        "axes": ["layer", "token"],
        **_rounded(traced.to_dict()),
    }


def located(
    editable: Editable,
    facts: list[Fact],
    measured: Sequence[TraceSet],
    aggregates: Sequence[Aggregate],
    sweep: Sweep | None,
    layer: int,
    routes: Sequence[Mapping[int, Routes]] = (),
    choice: Choice | None = None,
) -> dict[str, Any]:
    """Return the result of `ffedit locate`: `trace` is a fact's first measurement, `traces` are all of several.

    `choice` is the model's layer, `sweep` the edits of these facts at each layer, where they were asked for.
    """
    rows = []
    for i, fact in enumerate(facts):
        traces = [trace(some.traces[i], some.traces[i].layer) for some in measured]
        rows.append({**_prompt(fact), "trace": traces[0], **({"traces": traces} if len(traces) > 1 else {})})
        if i < len(routes) and routes[i]:
            rows[-1]["routing"] = _rounded(plain(routes[i]))
    found: dict[str, Any] = {
        **_model(editable),
        "fingerprint": fingerprint(editable),
        "layer": layer,
        "facts": rows,
    }
    if aggregates:
        found["aggregates"] = [
            {"axes": ["role", "layer"], **{name: _rounded(v) for name, v in one.to_dict().items()}}
            for one in aggregates
        ]
    if sweep is not None:
        found["sweep"] = _rounded(sweep.to_dict())
    if choice is not None:
        found["choice"] = _rounded(choice.to_dict())
    return {**found, "versions": versions()}


def _model(editable: Editable) -> dict[str, Any]:
    return {"model": editable.name, **({"chat": True} if editable.chat else {})}


def _rounded(value: Any) -> Any:
    """Round all floats to six decimals, finer than any sample can resolve."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value


def measured(editable: Editable, report: Report, traces: TraceSet | None = None, layer: int = 0) -> dict[str, Any]:
    """Return the scores per fact and their means."""
    rows = []
    for i, before in enumerate(report.facts_before):
        after = report.facts_after[i] if report.facts_after is not None else None
        row: dict[str, Any] = {
            **_prompt(before.fact),
            "before": {**before.scores.to_dict(), "says": before.says},
            "after": {**after.scores.to_dict(), "says": after.says} if after else None,
        }
        if traces is not None:
            row["trace"] = trace(traces.traces[i], layer) if i < len(traces.traces) else None
        rows.append(row)
    return {
        **_model(editable),
        "facts": rows,
        "before": report.before.to_dict(),
        "after": _scores(report.after),
        "versions": versions(),
    }


def evaluated(editable: Editable, report: Report, unusable: Sequence[tuple[int, str]] = ()) -> dict[str, Any]:
    """Return the result of `ffedit evaluate`: means with intervals, means over known facts, and means by kind.

    `unusable` are the records that could not be made into facts, each with its number and reason. In the result,
    `left_out` lists what a score was not measured on, and `references` is the number of texts over which the document
    frequencies of consistency were counted.
    """
    found, (before, after), kinds = measured(editable, report), report.known, report.kinds
    sides = {"before": report.intervals_before, "after": report.intervals_after, "change": report.changes}
    return {
        **found,
        "intervals": {side: {name: asdict(one) for name, one in some.items()} for side, some in sides.items()},
        "known": {
            "facts": sum(one.scores.knew == 1 for one in report.facts_before),
            "before": before.to_dict(),
            "after": _scores(after),
        },
        "kinds": {"before": kinds[0], "after": kinds[1] if report.after else None},
        "references": report.references,
        "left_out": [one.to_dict() for one in report.left_out],
        "unusable": [{"record": number, "reason": reason} for number, reason in unusable],
    }


def applied(
    editable: Editable, edit: Edit, layer: Found, report: Report, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return the result of `ffedit apply`; `layer` is the layer chosen and the grounds for it."""
    found = measured(editable, report, layer.traces, edit.layers[-1])
    return {
        "model": found.pop("model"),
        "method": edit.provenance["method"],
        "layers": edit.layers,
        "layer": _rounded(layer.to_dict()),
        **found,
        "edit": {
            "rank": edit.rank,
            "norm_ratio": edit.provenance["norm_ratio"],
            "seed": edit.provenance["config"]["seed"],
            "fingerprint": edit.fingerprint(),
        },
        "seconds": dict(seconds),
    }


def _prompt(fact: Fact) -> dict[str, Any]:
    return {"subject": fact.subject, "prompt": fact.prompt, "target": fact.target, "previous": fact.previous}


def _scores(scores: Scores | None) -> dict[str, float | None] | None:
    return None if scores is None else scores.to_dict()
