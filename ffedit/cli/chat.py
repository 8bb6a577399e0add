"""`ffedit chat`: prompts typed one after another, each answered before and after an edit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import rich_click as click

import ffedit
from ffedit.cli.options import COUNT, LoadModel, Surface, asking_options, edit_folder, output_options
from ffedit.display.terminal.console import PlainConsole
from ffedit.display.terminal.messages import error_line
from ffedit.errors import FFEditError


@click.command()
@output_options
@asking_options
@click.option(
    "--edit",
    "edit_from",
    type=edit_folder,
    metavar="PATH",
    help="Edit to compare.  [default: those in the checkpoint]",
)
@click.option("--tokens", default=24, type=COUNT, help="Number of tokens of an answer.")
def chat(load_model: LoadModel, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Type prompts and read the answers before and after an edit, side by side.

    Each prompt is asked alone, with --chat in the model's chat template. An empty line or Ctrl-D ends the chat. Lines
    from a pipe are answered, too.
    """
    from ffedit.display.terminal.scores import two_columns
    from ffedit.editor.edit import unedited
    from ffedit.inference.generation import completions

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
