"""Show the contents of an edit as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ffedit.display.terminal.tables import (
    first_names,
    folded,
    named_values,
    plain_table,
    ranges,
    right,
    spaced,
    with_more,
)
from ffedit.editor.config import dotted
from ffedit.editor.edit import Edit
from ffedit.facts.text import number

MOST_FACTS = 20
NOT_MEASURED = "not measured"
# Entries of the provenance that the view shows elsewhere, or that have a number for each value and matrix.
TOLD = (
    *("verdict", "method", "layers", "parts", "norms", "says", "scores", "warnings"),
    *("solved", "matrices", "subjects", "division"),
)


def edit_json(edit: Edit, path: Path) -> dict[str, Any]:
    """Describe an edit as plain JSON: all facts, and the provenance without `matrices`, which identifies W."""
    norms, ratios = _norms(edit)
    return {
        "path": str(path),
        "fingerprint": edit.fingerprint(),
        "layers": edit.layers,
        "rank": edit.rank,
        "bytes": _size(path),
        "norm": norms,
        "norm_ratio": ratios,
        "facts": [
            {**fact.to_dict(), "says": {"before": before, "after": after}}
            for fact, (before, after) in zip(edit.facts, edit.says, strict=True)
        ],
        "provenance": {name: value for name, value in edit.provenance.items() if name != "matrices"},
    }


def edit_view(edit: Edit, path: Path | None = None) -> Group:
    """Render an edit, saved at `path` or not: its facts, how it was computed, and its scores."""
    named = f"edit {edit.fingerprint()}\n"
    heading = Text(named, "bold") if path is None else Text.assemble((str(path), "bold"), f"  {named}")
    scores = edit.provenance.get("scores")
    sections = spaced(_facts(edit), named_values(*_about(edit, path)), *([_scores(scores)] if scores else []))
    warnings = (Text(f"warning: {text}", "yellow") for text in edit.provenance.get("warnings", ()))
    return Group(heading, sections, *warnings)


def _facts(edit: Edit) -> RenderableType:
    """Render the first facts, old and new object and what the model said, and the number of the others."""
    table = plain_table(*folded("prompt", "old object", "new object", "said before", "said after"))
    for fact, answers in islice(zip(edit.facts, edit.says, strict=True), MOST_FACTS):
        measured = (Text(NOT_MEASURED, style="dim") if text is None else Text(text) for text in answers)
        table.add_row(*(Text(cell or "") for cell in (fact.text, fact.previous, fact.target)), *measured)
    return with_more(table, len(edit.facts) - MOST_FACTS)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _norms(edit: Edit) -> tuple[dict[str, float], dict[str, float]]:
    """Return ‖Δ‖ by memory, and ‖Δ‖ / ‖W‖ if the provenance has ‖W‖."""
    norms = {str(address): norm for address, norm in edit.norms().items()}
    weights = edit.provenance.get("norms", {})
    return norms, {at: norm / weights[at] for at, norm in norms.items() if weights.get(at)}


def _about(edit: Edit, path: Path | None) -> Iterator[tuple[str, str]]:
    """Yield pairs of name and value: the verdict, the method, the size of Δ, and the rest of the provenance."""
    provenance = edit.provenance
    yield "verdict", provenance.get("verdict", {}).get("text", NOT_MEASURED)
    layers = f"layer{'' if len(edit.layers) == 1 else 's'} {ranges(edit.layers)}"
    size = "" if path is None else f", {decimal(_size(path))}"
    yield "method", f"{provenance.get('method', 'unknown')}, {layers}, rank {edit.rank}{size}"
    for summand in provenance.get("parts", ()):
        method, layers = summand.get("method", "unknown"), ranges(summand.get("layers", ()))
        yield "", f"{summand['fingerprint']}: {method}, layers {layers}"
    norms, ratios = _norms(edit)
    shares = {at: f" ({ratio:.2%} of ‖W‖)" for at, ratio in ratios.items()}
    yield "‖Δ‖ by layer", first_names([f"{at}: {number(norm)}{shares.get(at, '')}" for at, norm in norms.items()])
    for name, value in provenance.items():
        if name in TOLD or value in (None, [], {}, False):
            continue
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{inner} {_short(item) or 'none'}" for inner, item in dotted(dotted(value)).items())
        else:
            yield name, _short(value)


def _scores(scores: Mapping[str, Any]) -> Table:
    sides = {side: scores[side] for side in ("before", "after") if scores.get(side) is not None}
    table = plain_table(*folded("score"), *right(*sides))
    for name in scores["before"]:
        values = ["" if side[name] is None else number(side[name]) for side in sides.values()]
        if any(values):
            table.add_row(Text(name), *values)
    return table


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
