"""Results as one HTML file that needs no network and no script: inspections here, edits in `result`, runs in `bench`.

All markup is in the templates. Text of a corpus, a tokenizer or a fact is not trusted: every text is escaped, and
invisible characters are shown by their code point.
"""

from __future__ import annotations

import functools
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ffedit.display.picture import NEGATIVE, RAMP, layer_step, shade
from ffedit.display.terminal.memories import placed, tenths
from ffedit.display.terminal.tables import share
from ffedit.facts.text import change, counted, number, token, visible
from ffedit.inspector.edit_view import EditView
from ffedit.inspector.memory_view import MemoryView
from ffedit.inspector.prompt_view import PromptView
from ffedit.inspector.views import View

KINDS: dict[type[View], str] = {PromptView: "prompt", EditView: "edit", MemoryView: "memory"}
MOST = 160


def page(view: View, before: PromptView | None = None) -> str:
    """Render a view of a prompt, an edit or a memory; `before` is a prompt measured without the edit."""
    return render("inspect.html", kind=KINDS[type(view)], view=view, before=before)


def render(template: str, **values: Any) -> str:
    """Render a template of `templates/`."""
    return _templates().get_template(template).render(**values)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ffedit.display.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finished,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (share, number, shade, layer_step, placed, tenths, token, prose, lines, end, start)
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= {"NEGATIVE": NEGATIVE, "RAMP": RAMP, "counted": counted, "change": change}
    return environment


def finished(value: Any) -> Any:
    """Convert a value for output by a template: markup and numbers unchanged, invisible characters of text visible."""
    return value if isinstance(value, Markup | int | float) else visible(str(value))


def prose(text: str) -> Markup:
    """Format a sentence of ffedit's own: text between backticks is code."""
    pieces = (escape(visible(piece)) for piece in text.split("`"))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if i % 2 else piece for i, piece in enumerate(pieces)
    )


def lines(text: str) -> Markup:
    """Format text of several lines, each with invisible characters visible."""
    return Markup("\n").join(escape(visible(line)) for line in text.split("\n"))


def end(text: str, most: int = MOST) -> str:
    """Return the last characters of a long text, beginning at a word where one starts near the cut."""
    if len(text) <= most:
        return text.lstrip(" ")
    cut = text[1 - most :]
    _, space, rest = cut[:20].partition(" ")
    return f"…{rest + cut[20:] if space else cut}"


def start(text: str, most: int = MOST) -> str:
    """Return the first characters of a long text."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
