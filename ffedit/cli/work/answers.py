"""Completions of a model, without an edit and with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_edited
from ffedit.display.terminal.scores import sayings
from ffedit.editor.edit import Edit, unedited
from ffedit.errors import ModelError
from ffedit.inference.generation import completions
from ffedit.model.editable import Editable


def before_and_after(
    editable: Editable, edit: Edit | None, prompts: Sequence[str], tokens: int
) -> tuple[list[str], list[str]]:
    """Complete prompts without and with `edit`, or, if it is None, without and with the edits in the model."""
    with unedited(editable) if edit is None else nullcontext():
        before = completions(editable, prompts, tokens)
    with nullcontext() if edit is None else edit.applied(editable):
        return before, completions(editable, prompts, tokens)


def ask(prompts: Sequence[str], model: ModelOptions, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Complete prompts greedily; if a folder of an edit is named, before and after it, side by side."""
    edit, editable = load_edited(edit_from, model, surface, show=False)
    if tokens >= editable.max_tokens:
        raise ModelError(f"--tokens {tokens} was asked for, but {editable.name} takes {editable.max_tokens} in all")
    if edit is None:
        sides = {"before": completions(editable, prompts, tokens)}
    else:
        sides = dict(zip(("before", "after"), before_and_after(editable, edit, prompts, tokens), strict=True))
    surface.show(sayings(prompts, *sides.values()))
    rows = [{"prompt": prompt, **{side: texts[i] for side, texts in sides.items()}} for i, prompt in enumerate(prompts)]
    surface.write_json({"model": editable.name, "prompts": rows})
