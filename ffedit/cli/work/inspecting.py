"""Views of one memory, of the memories that a prompt activates, and of those that an edit adds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import RenderableType

import ffedit
from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_edited, load_model
from ffedit.display.html import page
from ffedit.display.terminal.memories import compared, edited_view, memory_view, prompt_view
from ffedit.files.atomic import write_text
from ffedit.inference.corpus import Corpus
from ffedit.inspector import PromptView
from ffedit.inspector.scaling import parse_scalings
from ffedit.inspector.views import View


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
    top: int,
    model: ModelOptions,
    html: Path | None,
    surface: Surface,
) -> None:
    """Show the memories that a prompt activates, before and after the edit of a folder."""
    scalings = parse_scalings(turns)
    edit, editable = load_edited(edit_from, model, surface)
    before = ffedit.inspect_prompt(editable, text, scaled=scalings, top=top) if edit is not None else None
    with edit.applied(editable) if edit is not None else nullcontext():
        view = ffedit.inspect_prompt(editable, text, scaled=scalings, top=top)
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
    """Show a view, and write the page and the JSON that were asked for."""
    surface.show(table)
    if html is not None:
        write_text(html, page(view, before))
    surface.write_json(view.to_dict() | ({"before": before.to_dict()} if before is not None else {}))
