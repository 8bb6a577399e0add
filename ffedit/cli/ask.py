"""`ffedit ask`: completions of a model, without and with an edit."""

from __future__ import annotations

from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import COUNT, asking_options, edit_option, output_options


@click.command()
@output_options
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@asking_options
@edit_option("Show the answers before and after this edit.")
@click.option("--tokens", default=12, type=COUNT, help="Number of tokens of a completion.")
def ask(**given: Any) -> None:
    """Complete each PROMPT greedily."""
    work.ask(**given)
