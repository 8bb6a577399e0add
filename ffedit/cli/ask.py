"""`ffedit ask`: completions of a model, without and with an edit."""

from __future__ import annotations

from collections.abc import Callable

import click

from ffedit.cli.options import COUNT, Surface, asking_options
from ffedit.display.terminal.scores import sayings
from ffedit.editor import Edit
from ffedit.errors import ModelError
from ffedit.inference.generation import completions
from ffedit.model.editable import Editable


@click.command()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@asking_options
@click.option("--edit", type=Edit.load, metavar="PATH", help="Show completions before and after this edit.")
@click.option("--tokens", default=12, type=COUNT, help="Length of a completion.")
def ask(prompts: tuple[str, ...], load_model: Callable[..., Editable], edit: Edit | None, tokens: int) -> None:
    """Complete PROMPTs greedily."""
    editable = load_model(edit)
    if tokens >= editable.max_tokens:
        raise ModelError(f"--tokens {tokens} was asked for, but {editable.name} takes {editable.max_tokens} in all")
    answers = [completions(editable, prompts, tokens)]
    if edit is not None:
        with edit.applied(editable):
            answers.append(completions(editable, prompts, tokens))
    Surface().show(sayings(prompts, *answers))
