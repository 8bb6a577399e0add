"""Templates with their filters: every text is escaped, and invisible characters are shown by their code point."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from ffedit.display.html import charts, words
from ffedit.display.picture import NEGATIVE, RAMP, UNITS, shade
from ffedit.display.terminal.model_view import columns, sentences
from ffedit.display.terminal.prompt_view import placed, share
from ffedit.facts.text import change, counted, number
from ffedit.inspector.values import ACTIVE


def render(template: str, **values: Any) -> str:
    """Render a template of `templates/`."""
    return _templates().get_template(template).render(**values)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ffedit.display.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=words.finished,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (words.bare, words.prose, words.lines, words.percent, words.end, words.start, words.tenths)
    environment.filters |= {function.__name__: function for function in (share, number, shade, placed, *formats)}
    constants = {"ACTIVE": ACTIVE, "NEGATIVE": NEGATIVE, "RAMP": RAMP, "UNITS": UNITS}
    functions = (columns, sentences, counted, change)
    environment.globals |= {"charts": charts, **constants, **{function.__name__: function for function in functions}}
    return environment
