"""`ffedit inspect memory`: one memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

import ffedit
from ffedit.cli.inspecting import corpus_options, stack_options
from ffedit.cli.options import Surface, html_option, output_options

if TYPE_CHECKING:
    from ffedit.inference.corpus import Corpus
    from ffedit.model.editable import Stack


@click.command()
@output_options
@click.argument("name", metavar="L[.E].I")
@click.option("--top", default=10, type=click.IntRange(1), help="Tokens and triggers to show.")
@corpus_options
@stack_options
@html_option
def memory(
    name: str, top: int, corpus: Corpus, load_stack: Callable[[], Stack], html: Path | None, surface: Surface
) -> None:
    """Show memory I of layer L (L.E.I in expert E): what its value says, and which texts fire its key."""
    from ffedit.display.html import save_page
    from ffedit.display.terminal.memories import memory_view
    from ffedit.display.terminal.model_table import model_line

    slot = ffedit.Slot.parse(name)
    stack = load_stack()
    surface.show(model_line(stack))
    with surface.progress() as progress:
        view = ffedit.inspect_memory(stack, slot, corpus, top, progress)
    surface.show(memory_view(view))
    if html is not None:
        save_page(html, view)
    surface.write_json(view.to_dict())
