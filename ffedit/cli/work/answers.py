"""Completions of a model, without an edit and with it: of some prompts, or of those that are typed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import rich_click as click

from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_edited
from ffedit.display.terminal.console import PlainConsole, error_line
from ffedit.display.terminal.scores import sayings, two_columns
from ffedit.editor.edit import Edit, unedited
from ffedit.errors import FFEditError, ModelError
from ffedit.inference.generation import completions
from ffedit.model.editable import Editable


def before_and_after(
    editable: Editable, edit: Edit | None, prompts: Sequence[str], tokens: int
) -> tuple[list[str], list[str]]:
    """Complete prompts without and with an edit, or without and with those that the model carries."""
    with unedited(editable) if edit is None else nullcontext():
        before = completions(editable, prompts, tokens)
    with nullcontext() if edit is None else edit.applied(editable):
        return before, completions(editable, prompts, tokens)


def ask(prompts: Sequence[str], model: ModelOptions, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Complete prompts greedily, with the edit of a folder side by side."""
    edit, editable = load_edited(edit_from, model, surface, show=False)
    if tokens >= editable.max_tokens:
        raise ModelError(f"--tokens {tokens} was asked for, but {editable.name} takes {editable.max_tokens} in all")
    if edit is None:
        answers = {"before": completions(editable, prompts, tokens)}
    else:
        answers = dict(zip(("before", "after"), before_and_after(editable, edit, prompts, tokens), strict=True))
    surface.show(sayings(prompts, *answers.values()))
    rows = [{"prompt": prompt, **{side: said[i] for side, said in answers.items()}} for i, prompt in enumerate(prompts)]
    surface.write_json({"model": editable.name, "prompts": rows})


def chat(model: ModelOptions, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Read prompts, and show the answers before and after the edit of a folder, or those in the checkpoint."""
    edit, editable = load_edited(edit_from, model, surface, show=False)
    if edit is None and not editable.history.originals:
        raise click.UsageError(f"{editable.name} carries no edit that can be taken out; give --edit PATH")
    console, rows = PlainConsole(quiet=surface.quiet), []
    surface.show()
    console.print(two_columns("before", "after", style="bold"))
    for prompt in _prompts(console):
        try:
            (before,), (after,) = before_and_after(editable, edit, [prompt], tokens)
        except FFEditError as error:  # a prompt that is too long, say; the next may be well
            console.print(error_line(str(error)), soft_wrap=True)
            continue
        console.print(two_columns(before, after, style="" if after == before else "bold"))
        rows.append({"prompt": prompt, "before": before, "after": after})
    surface.write_json({"model": editable.name, "prompts": rows})


def _prompts(console: PlainConsole) -> Iterator[str]:
    """Yield lines until an empty one or the end; those that are piped in are shown as if they were typed."""
    typed = sys.stdin.isatty()
    try:
        while (line := console.input("> " if typed else "")).strip():
            if not typed:
                console.print(f"> {line}")
            yield line
    except EOFError:
        return
