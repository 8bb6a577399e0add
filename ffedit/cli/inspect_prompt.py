"""`ffedit inspect prompt`: the memories that a prompt activates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

import ffedit
from ffedit.cli.options import Surface, asking_options, edit_folder, html_option, output_options

if TYPE_CHECKING:
    from ffedit.model.editable import Editable


@click.command()
@output_options
@click.argument("text", metavar="PROMPT")
@click.option("--edit", "edit_from", type=edit_folder, help="Show the prompt before and after this edit.")
@click.option(
    "--set", "turns", multiple=True, metavar="L.I=FACTOR", help="Turn a memory (or L.E.I): 0 suppresses, 3 amplifies."
)
@click.option("--promote", metavar="TOKEN", help="Which memories would one have to turn to get TOKEN?")
@click.option("--top", default=3, type=click.IntRange(1), help="Memories of each layer to show.")
@asking_options
@html_option
def prompt(
    text: str,
    edit_from: Path | None,
    turns: tuple[str, ...],
    promote: str | None,
    top: int,
    load_model: Callable[..., Editable],
    html: Path | None,
    surface: Surface,
) -> None:
    """Show which memories PROMPT fires at its last token, and in which layer its answer is made."""
    from ffedit.display.html import save_page
    from ffedit.display.terminal.memories import compared, prompt_view
    from ffedit.display.terminal.model_table import model_line
    from ffedit.inspector.prompt_view import parse_scalings

    scaled = parse_scalings(turns)
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit)
    surface.show(model_line(editable))
    before = ffedit.inspect_prompt(editable, text, scaled, top=top) if edit is not None else None
    with edit.applied(editable) if edit is not None else nullcontext(), surface.progress() as progress:
        view = ffedit.inspect_prompt(editable, text, scaled, promote, top, progress)
    surface.show(compared(before, view) if before is not None else None, prompt_view(view))
    if html is not None:
        save_page(html, view, before)
    surface.write_json(view.to_dict() | ({"before": before.to_dict()} if before is not None else {}))
