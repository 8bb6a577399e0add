"""Show the contents of an edit as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
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
from ffedit.loading.names import in_words

MOST_FACTS = 20
NOT_MEASURED = "not measured"


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
    for fact, said in islice(zip(edit.facts, edit.says, strict=True), MOST_FACTS):
        measured = (Text(NOT_MEASURED, style="dim") if text is None else Text(text) for text in said)
        table.add_row(*(Text(cell or "") for cell in (fact.text, fact.previous, fact.target)), *measured)
    return with_more(table, len(edit.facts) - MOST_FACTS)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _norms(edit: Edit) -> tuple[dict[str, float], dict[str, float]]:
    """Return by memory ‖Δ‖, and ‖Δ‖ / ‖W‖ where the provenance has ‖W‖."""
    norms = {str(address): norm for address, norm in edit.norms().items()}
    weights = edit.provenance.get("norms", {})
    return norms, {at: norm / weights[at] for at, norm in norms.items() if weights.get(at)}


def _about(edit: Edit, path: Path | None) -> Iterator[tuple[str, str]]:
    """Yield pairs of name and value; entries that the provenance lacks are left out, except the verdict."""
    about = edit.provenance
    yield "verdict", about.get("verdict", {}).get("text", NOT_MEASURED)
    layers = f"layer{'' if len(edit.layers) == 1 else 's'} {ranges(edit.layers)}"
    size = "" if path is None else f", {_size(path) / 1000:.1f} kB"
    yield "method", f"{about.get('method', 'unknown')}, {layers}, rank {edit.rank}{size}"
    for summand in about.get("parts", ()):
        method, layers = summand.get("method", "unknown"), ranges(summand.get("layers", ()))
        yield "", f"{summand['fingerprint']}: {method}, layers {layers}"
    norms, ratios = _norms(edit)
    shares = {at: f" ({ratio:.2%} of ‖W‖)" for at, ratio in ratios.items()}
    yield "‖Δ‖ by layer", first_names([f"{at}: {number(norm)}{shares.get(at, '')}" for at, norm in norms.items()])
    if not ratios and "norm_ratio" in about:
        yield "‖Δ‖ / ‖W‖", f"{about['norm_ratio']:.2%} at most"
    dtype, computed = about.get("dtype"), about.get("computed_in")
    precision = [*([dtype] if dtype else []), *([f"computed in {computed}"] if computed not in (None, dtype) else [])]
    yield "model", ", ".join([about.get("model", "unknown"), f"fingerprint {edit.base}", *precision])
    if source := about.get("source"):
        yield "converted from", in_words(source)
    if about.get("after"):
        yield "computed upon", first_names([f"edit {name}" for name in about["after"]])
    if config := about.get("config"):
        yield "config", ", ".join(f"{name} {_short(value) or 'none'}" for name, value in dotted(config).items())
    if (solved := about.get("solved")) and (prefixes := solved[0].get("contexts")):
        yield "contexts", " | ".join(" ".join(prefix.split()) for prefix in prefixes)
    if statistics := about.get("statistics"):
        yield "statistics", _statistics(statistics)
    if versions := about.get("versions"):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _statistics(statistics: Mapping[str, Any]) -> str:
    layers = statistics.values()
    texts = dict.fromkeys(f"{layer['tokens']:,} tokens of {layer.get('corpus', 'unknown text')}" for layer in layers)
    shares = [f"{layer['convergence']:.1%}" for layer in layers if layer.get("convergence") is not None]
    more = f"; with more text, the edit would disturb other text {first_names(shares)} less" if shares else ""
    prints = [layer["fingerprint"] for layer in layers if "fingerprint" in layer]
    return f"{', '.join(texts)}{more}{f'; fingerprint {first_names(prints)}' if prints else ''}"


def _scores(scores: Mapping[str, Any]) -> Table:
    sides = {side: scores[side] for side in ("before", "after") if scores.get(side) is not None}
    table = plain_table(Column("score", no_wrap=True), *right(*sides))
    for name in scores["before"]:
        values = ["" if side[name] is None else number(side[name]) for side in sides.values()]
        if any(values):
            table.add_row(Text(name), *values)
    return table


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
