"""Descriptions: of the methods, of a model's parts, of an edit, and of the memories of a model, a prompt, an edit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import rich_click as click
from rich.console import RenderableType
from rich.table import Column, Table

import ffedit
from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_edited, load_model
from ffedit.cli.work.result import examined
from ffedit.display.html import page
from ffedit.display.terminal.memories import compared, edited_view, memory_view, prompt_view
from ffedit.display.terminal.model_table import environment, memory_table
from ffedit.display.terminal.show import edit_json, edit_view
from ffedit.editor.edit_files import EDITS, embedded
from ffedit.editor.methods import METHODS
from ffedit.editor.recipe import recipe_of, to_yaml
from ffedit.evaluator.metrics import METRICS
from ffedit.files.atomic import write_text
from ffedit.inference.corpus import Corpus
from ffedit.inspector import PromptView
from ffedit.inspector.scaling import parse_scalings
from ffedit.inspector.views import View


def methods(surface: Surface) -> None:
    """List the methods, with the problem that each solves and when to choose it."""
    fields = ("name", "solves", "choose", "source", "package")
    rows = [{field: getattr(method, field) for field in fields} for method in METHODS.values()]
    columns = ("solves", "choose it for", "source", "from")
    table = Table(Column("method", no_wrap=True), *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    surface.show(table)
    broken = {**METHODS.broken, **METRICS.broken}
    for point, why in broken.items():
        surface.note(f"{point} could not be loaded: {why}")
    surface.write_json({"methods": rows, "broken": broken})


def doctor(model: ModelOptions, surface: Surface) -> None:
    """Show versions, devices, the cache, and the value matrices of a model."""
    surface.show(environment())
    editable = load_model(model, surface)
    surface.show(memory_table(editable))
    surface.write_json(examined(editable))


def show(edit_from: Path, recipe: bool, surface: Surface) -> None:
    """Show an edit, or the edits in a checkpoint, in order; or only the recipe from which it is made again."""
    folders = embedded(edit_from) if (edit_from / EDITS).is_dir() else [edit_from]
    edits = [(folder, ffedit.Edit.load(folder)) for folder in folders]
    if recipe:
        click.echo("---\n".join(to_yaml(recipe_of(edit), edit) for _, edit in edits), nl=False)
        return
    surface.show(*(edit_view(edit, path) for path, edit in edits))
    surface.write_json({"edits": [edit_json(edit, path) for path, edit in edits]})


def inspect_memory(
    name: str, top: int, corpus: Corpus, model: ModelOptions, html: Path | None, surface: Surface
) -> None:
    """Show one memory."""
    slot = ffedit.MemoryIndex.parse(name)
    editable = load_model(model, surface)
    with surface.progress() as progress:
        view = ffedit.inspect_memory(editable, slot, corpus=corpus, top=top, progress=progress)
    _show(surface, html, view, memory_view(view))


def inspect_prompt(
    text: str,
    edit_from: Path | None,
    turns: Sequence[str],
    promote: str | None,
    top: int,
    model: ModelOptions,
    html: Path | None,
    surface: Surface,
) -> None:
    """Show the memories that a prompt activates, before and after the edit of a folder."""
    scalings = parse_scalings(turns)
    edit, editable = load_edited(edit_from, model, surface)
    before = ffedit.inspect_prompt(editable, text, scaled=scalings, top=top) if edit is not None else None
    with edit.applied(editable) if edit is not None else nullcontext(), surface.progress() as progress:
        view = ffedit.inspect_prompt(editable, text, scaled=scalings, promoted=promote, top=top, progress=progress)
    surface.show(compared(before, view) if before is not None else None)
    _show(surface, html, view, prompt_view(view), before)


def inspect_edit(
    edit_from: Path, top: int, corpus: Corpus, model: ModelOptions, html: Path | None, surface: Surface
) -> None:
    """Show the memories that the edit of a folder adds."""
    edit = ffedit.Edit.load(edit_from)
    editable = load_model(model, surface, edit)
    with surface.progress() as progress:
        view = ffedit.inspect_edit(editable, edit, corpus=corpus, top=top, progress=progress)
    _show(surface, html, view, edited_view(view))


def _show(
    surface: Surface, html: Path | None, view: View, table: RenderableType, before: PromptView | None = None
) -> None:
    """Show a view, and write it as a page and as JSON where these were asked for."""
    surface.show(table)
    if html is not None:
        write_text(html, page(view, before))
    surface.write_json(view.to_dict() | ({"before": before.to_dict()} if before is not None else {}))
