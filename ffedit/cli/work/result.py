"""Results that commands write with `--json`: plain numbers, null where there was nothing to measure.

Those of `apply` and `evaluate` are described by `result.schema.json`; its version counts up with every change that
would break a reader of the last version.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from click import get_current_context

from ffedit.display.terminal.recall import reasons
from ffedit.editor.edit import Edit
from ffedit.editor.provenance import value_searches, versions
from ffedit.editor.recipe import recipe_of
from ffedit.evaluator import Explanation, FactScores, Report
from ffedit.evaluator.verdict import took
from ffedit.exporter import Exported
from ffedit.facts.fact import Fact
from ffedit.facts.reading import LeftOutRecords
from ffedit.layer_choice.choose import ChosenLayer
from ffedit.layer_choice.site_map import SiteMap
from ffedit.locator import Aggregate, Trace, TraceSet
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint

SCHEMA_VERSION = 2


def located(
    editable: Editable,
    facts: list[Fact],
    measured: Sequence[TraceSet],
    aggregates: Sequence[Aggregate],
    layer: int,
    mapped: SiteMap | None = None,
    records: Sequence[LeftOutRecords] = (),
) -> dict[str, Any]:
    """Return the result of `ffedit locate`: `trace` is a fact's first measurement, `traces` are all of several."""
    rows = []
    for i, fact in enumerate(facts):
        traces = [_trace(measurement.traces[i], measurement.traces[i].layer) for measurement in measured]
        rows.append({**_prompt(fact), "trace": traces[0], **({"traces": traces} if len(traces) > 1 else {})})
    if mapped is not None:
        rows[0]["site_map"] = {"axes": ["layer", "token"], **_rounded(mapped.to_dict())}
    averages = [{"axes": ["role", "layer"], **aggregate.to_dict()} for aggregate in aggregates]
    return {
        **_model(editable),
        "fingerprint": fingerprint(editable),
        "layer": layer,
        "facts": rows,
        "left_out": [kind.to_dict() for kind in records],
        **({"aggregates": _rounded(averages)} if averages else {}),
        "versions": versions(),
    }


def applied(
    editable: Editable,
    edit: Edit,
    choice: ChosenLayer,
    report: Report,
    ends: Mapping[str, float],
    saved: Mapping[str, Path | None],
    asked: str = "auto",
    records: Sequence[LeftOutRecords] = (),
) -> dict[str, Any]:
    """Return the result of `ffedit apply`.

    `ends` are the times in seconds of the start and of the end of each stage, `saved` the folders of the `edit` and the
    `checkpoint`, None for one that is not kept, and `asked` the value of `--layers`.
    """
    measured, provenance = _measured(editable, report, records), edit.provenance
    traces = () if choice.traces is None else choice.traces.traces
    for row, trace, search in zip_longest(measured["facts"], traces, value_searches(edit)):
        row["trace"] = None if trace is None else _trace(trace, edit.layers[-1])
        row["value"] = search and asdict(search)
    why = [line for reason in reasons(choice, asked) for line in reason.plain.splitlines()]
    return {
        **{name: measured.pop(name) for name in ("schema_version", "verdict", "model")},
        "method": provenance["method"],
        "layers": edit.layers,
        "layer": {**_rounded(choice.to_dict()), "why": why},
        **measured,
        "edit": {
            "rank": edit.rank,
            "norm_ratio": provenance["norm_ratio"],
            "size": edit.size,
            "seed": provenance["config"]["seed"],
            "fingerprint": edit.fingerprint(),
            **{name: provenance[name] for name in ("base", "gguf") if name in provenance},
        },
        "recipe": recipe_of(edit),
        "saved": {name: path and str(path) for name, path in saved.items()},
        "warnings": provenance.get("warnings", []),
        "seconds": {stage: round(end - begun, 3) for (_, begun), (stage, end) in pairwise(ends.items())},
    }


def evaluated(
    editable: Editable,
    report: Report,
    records: Sequence[LeftOutRecords] = (),
    explanation: Explanation | None = None,
) -> dict[str, Any]:
    """Return the result of `ffedit evaluate`: means with intervals, means over known facts, and means by kind.

    In it, `references` is the number of texts over which the document frequencies of consistency were counted.
    """
    (before, after), kinds = report.known, report.kinds
    return {
        **_measured(editable, report, records),
        "known": {
            "facts": sum(fact.scores.knew == 1 for fact in report.facts_before),
            "before": before.to_dict(),
            "after": after and after.to_dict(),
        },
        "kinds": {"before": kinds[0], "after": kinds[1] if report.after else None},
        "references": report.references,
        "unusable": [{"record": number, "reason": why} for kind in records for number, why in kind.records],
        **({} if explanation is None else {"explanation": _rounded(explanation.to_dict())}),
    }


def written(done: Exported) -> dict[str, Any]:
    """Return the result of `ffedit export` and `ffedit undo`: bytes moved, and the comparison in a fresh process."""
    return {
        "folder": str(done.folder),
        "edit": done.edit.fingerprint(),
        "bytes": done.moved and asdict(done.moved),
        "verified": {name: getattr(done.checked, name) for name in ("tensors", "logits", "peft")},
        **({"gguf": [matrix.to_dict() for matrix in done.packed]} if done.packed else {}),
    }


def examined(editable: Editable) -> dict[str, Any]:
    """Return the result of `ffedit doctor`: versions, and the value matrix of each memory."""
    memories = [
        {"at": str(at), "value_matrix": memory.name, "shape": list(memory.shape), "quantised": memory.quantised}
        for at, memory in editable.memories.items()
    ]
    return {**_model(editable), "versions": versions(), "device": str(editable.device), "memories": memories}


def _measured(editable: Editable, report: Report, records: Sequence[LeftOutRecords]) -> dict[str, Any]:
    """Return the scores per fact, their means and intervals, what was left out, and the command line."""
    rows = []
    for before, after in zip_longest(report.facts_before, report.facts_after or ()):
        sides = {"before": before, "after": after}
        scores = {side: fact and {**fact.scores.to_dict(), "says": fact.says} for side, fact in sides.items()}
        rows.append({**_prompt(before.fact), **scores, "took": took(after or before), "asked": _asked(before, after)})
    intervals = {"before": report.intervals_before, "after": report.intervals_after, "change": report.changes}
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": report.verdict.to_dict(),
        **_model(editable),
        "facts": rows,
        "before": report.before.to_dict(),
        "after": report.after and report.after.to_dict(),
        "intervals": {
            side: {name: asdict(interval) for name, interval in by_name.items() if not interval.is_point}
            for side, by_name in intervals.items()
        },
        "left_out": [*(omission.to_dict() for omission in report.left_out), *(kind.to_dict() for kind in records)],
        "command": command_line(),
        "versions": versions(),
    }


def _asked(before: FactScores, after: FactScores | None) -> list[dict[str, Any]]:
    """Return a fact's other prompts with the model's continuations before and after, None where it was not edited."""
    rows = []
    for old, new in zip_longest(before.asked, after.asked if after else ()):
        row = asdict(old)
        says, _ = row.pop("says"), row.pop("right")
        rows.append({**row, "before": says, "after": new and new.says})
    return rows


def command_line() -> str:
    """Return the running command as it was typed; `ffedit` alone if no command runs."""
    context = get_current_context(silent=True)
    return shlex.join(["ffedit", *map(str, context.obj if context is not None and context.obj else ())])


def _model(editable: Editable) -> dict[str, Any]:
    return {"model": editable.name, **({"chat": True} if editable.chat else {})}


def _prompt(fact: Fact) -> dict[str, Any]:
    return {"subject": fact.subject, "prompt": fact.prompt, "target": fact.target, "previous": fact.previous}


def _trace(traced: Trace, layer: int) -> dict[str, Any]:
    site = {"layer": layer, "token": traced.subject_last, "axes": ["layer", "token"]}
    return {**site, **_rounded(traced.to_dict())}


def _rounded(value: Any) -> Any:
    """Round all floats to six decimals, finer than any sample can resolve."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value
