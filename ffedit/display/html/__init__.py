"""The results of an inspection as one HTML file that needs no network and no script.

All markup is in the templates. The text in a view comes from a corpus or a tokenizer and is not trusted: Jinja2 escapes
it, and invisible characters and those that reverse the text direction are shown by their code point.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2

from ffedit.display.html import charts, words
from ffedit.display.terminal.model_view import columns, sentences
from ffedit.display.terminal.prompt_view import placed, share
from ffedit.facts.text import number
from ffedit.files.atomic import write_text
from ffedit.inspector.analyses.activity import ACTIVE
from ffedit.inspector.slots import View
from ffedit.inspector.views.edit_view import EditView
from ffedit.inspector.views.memory_view import MemoryView
from ffedit.inspector.views.prompt_view import PromptView
from ffedit.inspector.views.report import ModelReport

KINDS: dict[type[View], str] = {ModelReport: "model", PromptView: "prompt", EditView: "edit", MemoryView: "memory"}


def page(view: View, before: PromptView | None = None) -> str:
    """Render a view of a model, a prompt, an edit or a memory; `before` is a prompt measured without the edit."""
    return _templates().get_template("page.html").render(kind=KINDS[type(view)], view=view, before=before)


def save_page(target: Path, view: View, before: PromptView | None = None) -> None:
    """Write a page atomically.

    Raises:
        EditError: it cannot be written.
    """
    write_text(target, page(view, before))


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
