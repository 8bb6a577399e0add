"""Descriptions of the methods, the parts of a model, and the contents of an edit."""

from __future__ import annotations

from pathlib import Path

import rich_click as click
from rich.table import Column, Table

import ffedit
from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_model
from ffedit.cli.work.result import examined
from ffedit.display.terminal.model_table import environment, memory_table
from ffedit.display.terminal.show import edit_json, edit_view
from ffedit.editor.edit_files import EDITS, embedded
from ffedit.editor.methods import METHODS
from ffedit.editor.recipe import recipe_of, to_yaml
from ffedit.evaluator.metrics import METRICS


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
    else:
        surface.show(*(edit_view(edit, path) for path, edit in edits))
    surface.write_json({"edits": [edit_json(edit, path) for path, edit in edits]})
