"""`ffedit show`: the contents of an edit."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import FILE, output_options
from ffedit.cli.surface import Surface
from ffedit.editor.edit_files import EDITS, check_edit_folder


@click.command()
@output_options
@click.argument("edit_from", type=FILE, metavar="EDIT_DIR")
@click.option("--recipe", is_flag=True, help="Show only the recipe, from which `ffedit run` makes the edit again.")
def show(edit_from: Path, recipe: bool, surface: Surface) -> None:
    """Show what an edit changes and how it was computed; for a checkpoint, show its edits in order."""
    if recipe and surface.json_to == "-":
        raise click.UsageError("--recipe and --json - both write to standard output; name a file: --json FILE")
    if not (edit_from / EDITS).is_dir():
        check_edit_folder(edit_from)
    work.show(edit_from, recipe, surface)
