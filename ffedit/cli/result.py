"""What the commands write with `--json`: plain numbers, null where there was nothing to measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ffedit.anatomy import Editable
from ffedit.editor import Edit
from ffedit.editor.rome import versions
from ffedit.evaluator import Report, Scores
from ffedit.facts import Fact
from ffedit.locator import Trace, TraceSet


def trace(traced: Trace, layer: int) -> dict[str, Any]:
    """One fact's trace, with the layer that is edited."""
    return {
        "layer": layer,
        "token": traced.subject_last,
        "tokens": list(traced.tokens),
        "kind": traced.kind,
        "window": traced.window,
        "answer": traced.answer,
        "known": traced.known,
        "effects": [[round(float(effect), 6) for effect in row] for row in traced.effects],
        "clean": traced.clean,
        "corrupted": traced.corrupted,
        "noise": traced.noise,
        "samples": traced.samples,
        "seed": traced.seed,
    }


def located(editable: Editable, facts: list[Fact], traces: TraceSet) -> dict[str, Any]:
    """The result of `ffedit locate`."""
    return {
        "model": editable.name,
        "layer": traces.layer,
        "facts": [
            {**_prompt(fact), "trace": trace(traced, traced.layer)}
            for fact, traced in zip(facts, traces.traces, strict=True)
        ],
        "versions": versions(),
    }


def measured(editable: Editable, report: Report, traces: TraceSet | None = None, layer: int = 0) -> dict[str, Any]:
    """Scores per fact and in the mean."""
    rows = []
    for i, before in enumerate(report.facts_before):
        after = report.facts_after[i] if report.facts_after is not None else None
        row: dict[str, Any] = {
            **_prompt(before.fact),
            "before": {**before.scores.to_dict(), "says": before.says},
            "after": {**after.scores.to_dict(), "says": after.says} if after else None,
        }
        if traces is not None:
            row["trace"] = trace(traces.traces[i], layer)
        rows.append(row)
    return {
        "model": editable.name,
        "facts": rows,
        "before": report.before.to_dict(),
        "after": _scores(report.after),
        "versions": versions(),
    }


def applied(
    editable: Editable, edit: Edit, traces: TraceSet, report: Report, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The result of `ffedit apply`."""
    found = measured(editable, report, traces, edit.layers[0])
    return {
        "model": found.pop("model"),
        "method": edit.provenance["method"],
        "layers": edit.layers,
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
