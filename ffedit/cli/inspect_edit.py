"""`ffedit inspect edit`: an edit in terms of key-value memories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

import ffedit
from ffedit.cli.inspecting import corpus_options
from ffedit.cli.options import FILE, Surface, html_option, model_options, output_options
from ffedit.display.html import save_page
from ffedit.display.terminal.edit_view import edited_view
from ffedit.display.terminal.model_table import model_line
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.model.editable import Editable


@click.command()
@click.argument("edit_from", type=FILE, metavar="EDIT_DIR")
@click.option("--top", default=5, show_default=True, type=click.IntRange(1), help="How many of each kind to show.")
@corpus_options
@model_options
@html_option
@output_options
def edit(
    edit_from: Path,
    top: int,
    corpus: ffedit.Corpus,
    load_model: Callable[[ffedit.Edit], Editable],
    html: Path | None,
    surface: Surface,
) -> None:
    """Show the memories that EDIT_DIR adds, and which texts read them."""
    found = ffedit.Edit.load(edit_from)
    editable = load_model(found)
    surface.show(model_line(editable))
    with progress_bars(surface.quiet) as progress:
        view = ffedit.inspect_edit(editable, found, corpus, top, progress)
    surface.show(edited_view(view))
    if html is not None:
        save_page(html, view)
    surface.write_json(view.to_dict())
