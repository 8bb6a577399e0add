"""The results of an inspection as one HTML file that needs no network and no script.

A page has one section per view; a memory that has its own section is linked wherever another section names it. All
markup is in the templates. The text in a view comes from a corpus or a tokenizer and is not trusted: Jinja2 escapes
it, and invisible characters and those that reverse the text direction are shown by their code point.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ffedit.display.html import charts, words
from ffedit.display.terminal.model_view import columns, sentences
from ffedit.display.terminal.prompt_view import placed, share
from ffedit.facts.text import number
from ffedit.files.atomic import write_text
from ffedit.inspector.analyses.activity import ACTIVE
from ffedit.inspector.views.cards import MemoryCard
from ffedit.inspector.views.edit_view import EditView
from ffedit.inspector.views.memory_view import MemoryView
from ffedit.inspector.views.prompt_view import PromptView
from ffedit.inspector.views.report import ModelReport
from ffedit.inspector.views.view import View

KINDS: dict[type[View], str] = {ModelReport: "model", PromptView: "prompt", EditView: "edit", MemoryView: "memory"}


def page(*views: View, cards: Sequence[MemoryCard] = (), before: PromptView | None = None) -> str:
    """Render views as one HTML page.

    Args:
        views: views of a model, of prompts, of edits or of memories; the first one gives the page its title.
        cards: short descriptions of memories for the end of the page; memories with a view of their own are left out.
        before: the first view, of a prompt, measured without the edit.
    """
    whole = {str(view.slot) for view in views if isinstance(view, MemoryView)}
    brief = [card for card in cards if str(card.slot) not in whole]
    return (
        _templates()
        .get_template("page.html")
        .render(
            parts=[(KINDS[type(view)], view) for view in views],
            cards=brief,
            linked=whole | {str(card.slot) for card in brief},
            before=before,
        )
    )


def save_page(target: str | Path, *views: View, **more: Any) -> Path:
    """Write a page atomically; all further arguments are those of `page`.

    Raises:
        EditError: it cannot be written.
    """
    path = Path(target)
    write_text(path, page(*views, **more))
    return path


@functools.cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("ffedit.display.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=words.finished,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "share": share,
        "number": number,
        "bare": words.bare,
        "percent": words.percent,
        "end": words.end,
        "start": words.start,
        "tenths": words.tenths,
        "placed": placed,
    }
    found.globals |= {"charts": charts, "columns": columns, "sentences": sentences, "ACTIVE": ACTIVE}
    return found
