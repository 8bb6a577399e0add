"""Results as one HTML file that needs no network and no script: inspections here, edits in `result`, runs in `bench`.

All markup is in the templates. Text of a corpus, a tokenizer or a fact is not trusted: see `rendering`.
"""

from __future__ import annotations

from pathlib import Path

from ffedit.display.html.rendering import render
from ffedit.files.atomic import write_text
from ffedit.inspector.edit_view import EditView
from ffedit.inspector.memory_view import MemoryView
from ffedit.inspector.model_view import ModelReport
from ffedit.inspector.prompt_view import PromptView
from ffedit.inspector.views import View

KINDS: dict[type[View], str] = {ModelReport: "model", PromptView: "prompt", EditView: "edit", MemoryView: "memory"}


def page(view: View, before: PromptView | None = None) -> str:
    """Render a view of a model, a prompt, an edit or a memory; `before` is a prompt measured without the edit."""
    return render("inspect.html", kind=KINDS[type(view)], view=view, before=before)


def save_page(target: Path, view: View, before: PromptView | None = None) -> None:
    """Write a page atomically; EditError where it cannot be written."""
    write_text(target, page(view, before))
