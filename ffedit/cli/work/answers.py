"""Completions of a model, without an edit and with it: of some prompts, or of those that are typed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import rich_click as click

import ffedit
from ffedit.cli.options import Surface
from ffedit.cli.work.model import LoadModel
from ffedit.display.terminal.console import PlainConsole
from ffedit.display.terminal.messages import error_line
from ffedit.display.terminal.scores import sayings, two_columns
from ffedit.editor.edit import unedited
from ffedit.errors import FFEditError, ModelError
from ffedit.inference.generation import completions


def ask(prompts: Sequence[str], load_model: LoadModel, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Complete prompts greedily, with the edit of a folder side by side."""
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit, show=False)
    if tokens >= editable.max_tokens:
        raise ModelError(f"--tokens {tokens} was asked for, but {editable.name} takes {editable.max_tokens} in all")
    answers = {"before": completions(editable, prompts, tokens)}
    if edit is not None:
        with edit.applied(editable):
            answers["after"] = completions(editable, prompts, tokens)
    surface.show(sayings(prompts, *answers.values()))
    rows = [{"prompt": prompt, **{side: said[i] for side, said in answers.items()}} for i, prompt in enumerate(prompts)]
    surface.write_json({"model": editable.name, "prompts": rows})


def chat(load_model: LoadModel, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Read prompts, and show the answers before and after the edit of a folder, or those in the checkpoint."""
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit, show=False)
    if edit is None and not editable.history.originals:
        raise click.UsageError(f"{editable.name} carries no edit that can be taken out; give --edit PATH")
    console, rows = PlainConsole(quiet=surface.quiet), []
    surface.show()
    console.print(two_columns("before", "after", style="bold"))
    for prompt in _prompts(console):
        try:
            with unedited(editable) if edit is None else nullcontext():
                (before,) = completions(editable, [prompt], tokens)
            with edit.applied(editable) if edit is not None else nullcontext():
                (after,) = completions(editable, [prompt], tokens)
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
