"""`ffedit ask`: completions of a model, without and with an edit."""

from __future__ import annotations

import sys
from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import COUNT, asking_options, edit_option, output_options


@click.command()
@output_options
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@asking_options
@edit_option("Show the answers before and after this edit.")
@click.option("--tokens", default=12, type=COUNT, help="Number of tokens of a completion.")
def ask(prompts: tuple[str, ...], **kwargs: Any) -> None:
    """Complete each PROMPT greedily; without one, each line of standard input."""
    lines = prompts or [line.strip() for line in sys.stdin or () if line.strip()]  # None if it is closed
    if not lines:
        raise click.UsageError("no prompt: give PROMPT, or a line on standard input")
    work.ask(prompts=lines, **kwargs)
