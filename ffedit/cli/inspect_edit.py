"""`ffedit inspect edit`: an edit in terms of key-value memories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

import ffedit
from ffedit.cli.inspecting import corpus_options
from ffedit.cli.options import Surface, edit_folder, html_option, model_options, output_options

if TYPE_CHECKING:
    from ffedit.inference.corpus import Corpus
    from ffedit.model.editable import Editable


@click.command()
@output_options
@click.argument("edit_from", type=edit_folder, metavar="EDIT_DIR")
@click.option("--top", default=5, type=click.IntRange(1), help="How many of each kind to show.")
@corpus_options
@model_options
@html_option
def edit(
    edit_from: Path,
    top: int,
    corpus: Corpus,
    load_model: Callable[..., Editable],
    html: Path | None,
    surface: Surface,
) -> None:
    """Show the memories that EDIT_DIR adds, and which texts read them."""
    from ffedit.display.html import save_page
    from ffedit.display.terminal.memories import edited_view
    from ffedit.display.terminal.model_table import model_line

    found = ffedit.Edit.load(edit_from)
    editable = load_model(found)
    surface.show(model_line(editable))
    with surface.progress() as progress:
        view = ffedit.inspect_edit(editable, found, corpus, top, progress)
    surface.show(edited_view(view))
    if html is not None:
        save_page(html, view)
    surface.write_json(view.to_dict())
