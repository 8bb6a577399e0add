"""The contents of an edit, and the differences between two checkpoints, as tables in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ffedit.display.terminal.model_table import named_values, plain_table, ranges
from ffedit.editor import Edit
from ffedit.editor.config import dotted
from ffedit.exporter.diff import Change, Diff
from ffedit.exporter.embedded_edits import EDITS, history
from ffedit.facts.fact import Fact
from ffedit.facts.text import counted, number
from ffedit.loading.gguf import in_words

MOST_FACTS, MOST_CHANGES, MOST_NAMES = 20, 40, 8


def edit_view(edit: Edit, path: Path) -> Group:
    """Render an edit: its facts, how it was computed, and its scores."""
    heading = Text(str(path), style="bold").append(f"  edit {edit.fingerprint()}", style="not bold")
    parts: list[RenderableType] = [
        heading,
        Text(""),
        fact_table(edit.facts),
        Text(""),
        named_values(*_about(edit, path)),
    ]
    if scores := edit.provenance.get("scores"):
        parts += [Text(""), _scores(scores)]
    parts += [Text(f"warning: {text}", style="yellow") for text in edit.provenance.get("warnings", ())]
    return Group(*parts)


def fact_table(facts: Sequence[Fact]) -> RenderableType:
    """Render the first facts with the objects that they replace, and the number of the others."""
    table = plain_table()
    for heading in ("prompt", "before", "now"):
        table.add_column(heading, overflow="fold")
    for fact in facts[:MOST_FACTS]:
        table.add_row(*(Text(cell or "") for cell in (fact.text, fact.previous, fact.target)))
    if len(facts) <= MOST_FACTS:
        return table
    return Group(table, Text(f" … and {len(facts) - MOST_FACTS} more", style="dim"))


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def ratios(edit: Edit) -> dict[str, float]:
    """Return ‖Δ‖ / ‖W‖ per memory, where the provenance has ‖W‖."""
    known = edit.provenance.get("norms", {})
    return {at: norm / known[at] for at, norm in _norms(edit).items() if known.get(at)}


def edit_json(edit: Edit, path: Path) -> dict[str, Any]:
    """Describe an edit as plain JSON: all facts, and the provenance without `matrices`, which identifies W."""
    about = {name: value for name, value in edit.provenance.items() if name != "matrices"}
    return {
        "path": str(path),
        "fingerprint": edit.fingerprint(),
        "layers": edit.layers,
        "rank": edit.rank,
        "bytes": size_of(path),
        "norm": _norms(edit),
        "norm_ratio": ratios(edit),
        "facts": [fact.to_dict() for fact in edit.facts],
        "provenance": about,
    }


def edits_in(path: Path) -> list[tuple[Path, Edit]]:
    """Load the edit in a folder, or the edits in a checkpoint's weights, oldest first.

    Raises:
        EditError: there is none, or one is damaged.
    """
    if (path / EDITS).is_dir():
        return [(path / EDITS / f"{i:03}", edit) for i, edit in enumerate(history(path))]
    return [(path, Edit.load(path))]


def _norms(edit: Edit) -> dict[str, float]:
    return {str(address): norm for address, norm in edit.norms().items()}


def _about(edit: Edit, path: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs of name and value; entries that the provenance lacks are left out."""
    told = edit.provenance
    layers = f"layer{'' if len(edit.layers) == 1 else 's'} {ranges(edit.layers)}"
    yield "method", f"{told.get('method', 'unknown')}, {layers}, rank {edit.rank}, {size_of(path) / 1000:.1f} kB"
    for part in told.get("parts", ()):
        yield "", f"{part['fingerprint']}: {part.get('method', 'unknown')}, layers {ranges(part.get('layers', ()))}"
    relative = ratios(edit)
    norms = [
        f"{at}: {number(norm)}" + (f" ({relative[at]:.2%} of ‖W‖)" if at in relative else "")
        for at, norm in _norms(edit).items()
    ]
    yield "‖Δ‖ by layer", _most(norms)
    if not relative and "norm_ratio" in told:
        yield "‖Δ‖ / ‖W‖", f"{told['norm_ratio']:.2%} at most"
    computed = told.get("computed_in") if told.get("computed_in") != told.get("dtype") else None
    precision = _prefixed(", ", told.get("dtype")) + _prefixed(", computed in ", computed)
    yield "model", f"{told.get('model', 'unknown')}, fingerprint {edit.base}{precision}"
    if source := told.get("source"):
        yield "converted from", in_words(source)
    if guarantees := told.get("guarantee"):
        yield "null space", _most([f"layer {at}: {_guarantee(one)}" for at, one in guarantees.items()])
    if told.get("after"):
        yield "computed upon", _most([f"edit {name}" for name in told["after"]])
    if config := told.get("config"):
        yield "config", ", ".join(f"{name} {_short(value)}" for name, value in dotted(config).items())
    if contexts := _contexts(told.get("solved", ())):
        yield "contexts", contexts
    if statistics := told.get("statistics"):
        yield "statistics", _statistics(statistics)
    if versions := told.get("versions"):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _statistics(statistics: Mapping[str, Any]) -> str:
    """Describe the text that the key statistics were collected on, with a fingerprint per layer."""
    each = [statistics] if "tokens" in statistics else list(statistics.values())
    texts = dict.fromkeys(f"{one['tokens']:,} tokens of {one['corpus']}" for one in each)
    apart = [number(one["convergence"]) for one in each if one.get("convergence") is not None]
    halves = f"; halves solve {_most(apart)} apart" if apart else ""
    return f"{', '.join(texts)}{halves}; fingerprint {_most([str(one['fingerprint']) for one in each])}"


def _guarantee(told: Mapping[str, Any]) -> str:
    """Describe `alphaedit`'s guarantee for a layer, and the measured movement beside its bound."""
    text, kept = told["text"], told["kept"]
    of = f"of {told['of']} " if "of" in told else ""  # edits of early versions lack this entry
    words = (
        f"Δ acts on {told['directions']} {of}directions, {told['share']:.1%} of what text uses, and moves text by "
        f"{number(text['moved'])} (at most {number(text['bound'])})"
    )
    keys = f", {counted(kept['keys'], 'kept key')} by {number(kept['moved'])} (at most {number(kept['bound'])})"
    return words + (keys if kept["keys"] else "")


def _contexts(solved: Sequence[Mapping[str, Any]]) -> str:
    """Return the context prefixes of the first fact's prompt on one line."""
    prefixes = solved[0].get("contexts", ()) if solved else ()
    return " | ".join(" ".join(prefix.split()) for prefix in prefixes)


def _scores(scores: Mapping[str, Any]) -> Table:
    before, after = scores["before"], scores.get("after")
    table = plain_table()
    table.add_column("score", no_wrap=True)
    for heading in ("before", "after")[: 1 if after is None else 2]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, value in before.items():
        cells = [value] if after is None else [value, after[name]]
        if any(cell is not None for cell in cells):
            table.add_row(Text(name), *(Text("" if cell is None else number(cell)) for cell in cells))
    return table


def diff_view(found: Diff) -> Group:
    """Render the differences between two checkpoints, or say that there are none."""
    parts: list[RenderableType] = [Text(f"{found.base} → {found.edited}", style="bold"), Text("")]
    if found.identical:
        parts.append(Text(f"No difference: all {counted(found.same, 'tensor')} are the same."))
    else:
        recast = f", {len(found.retyped)} the same but for the dtype" if found.retyped else ""
        parts.append(Text(f"{counted(len(found.changes), 'tensor')} changed{recast}, {found.same} the same."))
    if found.changes:
        parts += [Text(""), _changes(found.changes)]
    kinds = Counter(name.rpartition(": ")[2] for name in found.retyped)
    lists = {
        "missing": found.missing,
        "added": found.added,
        "other shape": found.reshaped,
        "other dtype": [f"{counted(many, 'tensor')} {kind}" for kind, many in kinds.items()],
        "other files": found.files,
    }
    lines = [(name, _most(names)) for name, names in lists.items() if names]
    if lines:
        parts += [Text(""), named_values(*lines)]
    return Group(*parts)


def _changes(changes: Sequence[Change]) -> RenderableType:
    table = plain_table()
    table.add_column("tensor", overflow="fold", min_width=16)
    for heading in ("shape", "dtype", "rank", "‖Δ‖", "‖Δ‖ / ‖W‖", "changed"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = sorted(changes, key=lambda change: -change.norm_ratio)[:MOST_CHANGES]
    for change in shown:
        cells = [change.name, " × ".join(map(str, change.shape)), change.dtype, _rank(change)]
        table.add_row(*map(Text, [*cells, f"{change.norm:.3g}", f"{change.norm_ratio:.2%}", _share(change.share)]))
    notes = ["rank: singular values of Δ above the rounding noise of the stored dtype"]
    if any(change.rank is not None and not change.exact and not change.more for change in shown):
        notes.append("~: many entries rounded back to what they were, so the rank is an estimate")
    if any(change.more for change in shown):
        notes.append("≥: larger ranks were not looked for")
    if len(changes) > len(shown):
        notes.insert(0, f"… and {len(changes) - len(shown)} more, which changed less")
    return Group(table, Text("\n".join(notes), style="dim"))


def _rank(change: Change) -> str:
    sign = "≥ " if change.more else "" if change.exact else "~ "
    return "" if change.rank is None else f"{sign}{change.rank}"


def _share(share: float) -> str:
    return f"{share:.1%}" if 0.001 <= share < 0.9995 or share == 1 else "< 0.1%" if share < 0.5 else "> 99.9%"


def _most(names: Sequence[str]) -> str:
    more = f", … and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _prefixed(prefix: str, value: object) -> str:
    return "" if value is None else f"{prefix}{value}"


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
