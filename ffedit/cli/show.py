"""`ffedit show`: the contents of an edit."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from ffedit.cli.options import FILE, Surface, output_options
from ffedit.display.terminal.show import edit_json, edit_view, edits_in
from ffedit.editor.recipe import recipe_of, to_yaml


@click.command()
@output_options
@click.argument("edit_from", type=FILE, metavar="EDIT_DIR")
@click.option("--recipe", is_flag=True, help="Show only the recipe, from which `ffedit run` makes the edit again.")
def show(edit_from: Path, recipe: bool, surface: Surface) -> None:
    """Show what an edit changes and how it was computed; for a checkpoint, show its edits in order."""
    edits = edits_in(edit_from)
    if recipe:
        click.echo("---\n".join(to_yaml(recipe_of(edit), edit) for _, edit in edits), nl=False)
        return
    surface.show(*(edit_view(edit, path) for path, edit in edits))
    surface.write_json({"edits": [edit_json(edit, path) for path, edit in edits]})
