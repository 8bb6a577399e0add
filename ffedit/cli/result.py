"""The results that commands write with `--json`: plain numbers, null where there was nothing to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise, zip_longest
from typing import Any

from ffedit.display.terminal.routing import plain
from ffedit.editor import Edit
from ffedit.editor.provenance import versions
from ffedit.editor.recipe import recipe_of
from ffedit.evaluator import Report
from ffedit.exporter import Exported
from ffedit.facts.fact import Fact
from ffedit.inference.routing import Routes
from ffedit.layer_choice.calibrate import Choice
from ffedit.layer_choice.choose import Found, Sweep
from ffedit.locator import Aggregate, Trace, TraceSet
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint


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
        traces = [_trace(measurement.traces[i], measurement.traces[i].layer) for measurement in measured]
        rows.append({**_prompt(fact), "trace": traces[0], **({"traces": traces} if len(traces) > 1 else {})})
        if i < len(routes) and routes[i]:
            rows[-1]["routing"] = _rounded(plain(routes[i]))
    averages = [{"axes": ["role", "layer"], **aggregate.to_dict()} for aggregate in aggregates]
    return {
        **_model(editable),
        "fingerprint": fingerprint(editable),
        "layer": layer,
        "facts": rows,
        **({"aggregates": _rounded(averages)} if averages else {}),
        **({"sweep": _rounded(sweep.to_dict())} if sweep is not None else {}),
        **({"choice": _rounded(choice.to_dict())} if choice is not None else {}),
        "versions": versions(),
    }


def applied(editable: Editable, edit: Edit, choice: Found, report: Report, ends: Mapping[str, float]) -> dict[str, Any]:
    """Return the result of `ffedit apply`.

    `choice` is the layer and the grounds for it, `ends` the seconds at which the start and then each stage ended.
    """
    measured = _measured(editable, report)
    for row, trace in zip_longest(measured["facts"], choice.traces.traces):
        row["trace"] = None if trace is None else _trace(trace, edit.layers[-1])
    return {
        "model": measured.pop("model"),
        "method": edit.provenance["method"],
        "layers": edit.layers,
        "layer": _rounded(choice.to_dict()),
        **measured,
        "edit": {
            "rank": edit.rank,
            "norm_ratio": edit.provenance["norm_ratio"],
            "seed": edit.provenance["config"]["seed"],
            "fingerprint": edit.fingerprint(),
            **({"gguf": edit.provenance["gguf"]} if "gguf" in edit.provenance else {}),
        },
        "recipe": recipe_of(edit),
        "seconds": {stage: round(end - begun, 3) for (_, begun), (stage, end) in pairwise(ends.items())},
    }


def evaluated(editable: Editable, report: Report, unusable: Sequence[tuple[int, str]] = ()) -> dict[str, Any]:
    """Return the result of `ffedit evaluate`: means with intervals, means over known facts, and means by kind.

    `unusable` are the records that could not be made into facts, each with its number and reason. In the result,
    `left_out` lists what a score was not measured on, and `references` is the number of texts over which the document
    frequencies of consistency were counted.
    """
    (before, after), kinds = report.known, report.kinds
    sides = {"before": report.intervals_before, "after": report.intervals_after, "change": report.changes}
    return {
        **_measured(editable, report),
        "intervals": {
            side: {name: asdict(interval) for name, interval in intervals.items()} for side, intervals in sides.items()
        },
        "known": {
            "facts": sum(fact.scores.knew == 1 for fact in report.facts_before),
            "before": before.to_dict(),
            "after": after and after.to_dict(),
        },
        "kinds": {"before": kinds[0], "after": kinds[1] if report.after else None},
        "references": report.references,
        "left_out": [omission.to_dict() for omission in report.left_out],
        "unusable": [{"record": number, "reason": reason} for number, reason in unusable],
    }


def written(done: Exported) -> dict[str, Any]:
    """Return the result of `ffedit export` and `ffedit undo`: bytes moved, and what a fresh process found equal."""
    return {
        "folder": str(done.folder),
        "edit": done.edit.fingerprint(),
        "exact": done.exact,
        "bytes": done.moved and asdict(done.moved),
        "verified": {name: getattr(done.checked, name) for name in ("tensors", "logits", "peft")},
    }


def examined(editable: Editable) -> dict[str, Any]:
    """Return the result of `ffedit doctor`: versions, and the value matrix of each memory."""
    memories = [
        {"at": str(at), "value_matrix": memory.name, "shape": list(memory.shape), "quantised": memory.quantised}
        for at, memory in editable.memories.items()
    ]
    return {**_model(editable), "versions": versions(), "device": str(editable.device), "memories": memories}


def _measured(editable: Editable, report: Report) -> dict[str, Any]:
    """Return the scores per fact and their means."""
    rows = []
    for before, after in zip_longest(report.facts_before, report.facts_after or ()):
        sides = {"before": before, "after": after}
        scores = {side: fact and {**fact.scores.to_dict(), "says": fact.says} for side, fact in sides.items()}
        rows.append({**_prompt(before.fact), **scores})
    return {
        **_model(editable),
        "facts": rows,
        "before": report.before.to_dict(),
        "after": report.after and report.after.to_dict(),
        "versions": versions(),
    }


def _model(editable: Editable) -> dict[str, Any]:
    return {"model": editable.name, **({"chat": True} if editable.chat else {})}


def _prompt(fact: Fact) -> dict[str, Any]:
    return {"subject": fact.subject, "prompt": fact.prompt, "target": fact.target, "previous": fact.previous}


def _trace(traced: Trace, layer: int) -> dict[str, Any]:
    """Return one fact's trace, with the layer that is edited."""
    about = {"layer": layer, "token": traced.subject_last, "axes": ["layer", "token"]}
    return {**about, **_rounded(traced.to_dict())}


def _rounded(value: Any) -> Any:
    """Round all floats to six decimals, finer than any sample can resolve."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value
