"""`ffedit chat`: prompts typed one after another, each answered before and after an edit."""

from __future__ import annotations

from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import COUNT, asking_options, edit_option, output_options


@click.command()
@output_options
@asking_options
@edit_option("Edit to compare.  [default: those in the checkpoint]")
@click.option("--tokens", default=24, type=COUNT, help="Number of tokens of an answer.")
def chat(**given: Any) -> None:
    """Type prompts and read the answers before and after an edit, side by side.

    Each prompt is asked alone, with --chat in the model's chat template. An empty line or Ctrl-D ends the chat. Lines
    from a pipe are answered, too.
    """
    work.chat(**given)
