"""`ffedit show`: the contents of an edit."""

from __future__ import annotations

from pathlib import Path

import click

from ffedit.cli.options import FILE, Surface, output_options
from ffedit.display.terminal.show import edit_json, edit_view, edits_in


@click.command()
@click.argument("edit_from", type=FILE, metavar="EDIT_DIR")
@output_options
def show(edit_from: Path, surface: Surface) -> None:
    """Show what EDIT_DIR writes and how it was found; of a checkpoint, each of its edits in order."""
    edits = edits_in(edit_from)
    surface.show(*(edit_view(edit, path) for path, edit in edits))
    surface.write_json({"edits": [edit_json(edit, path) for path, edit in edits]})
