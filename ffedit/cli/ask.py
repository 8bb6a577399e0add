"""`ffedit ask`: completions of a model, without and with an edit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

import ffedit
from ffedit.cli.options import FILE, Surface, asking_options
from ffedit.display.terminal import render
from ffedit.errors import ModelError
from ffedit.inference import generation
from ffedit.model.editable import Editable


@click.command()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@asking_options
@click.option("--edit", "edit_from", type=FILE, help="Show completions before and after this edit.")
@click.option("--tokens", default=12, show_default=True, type=click.IntRange(1), help="Length of a completion.")
def ask(prompts: tuple[str, ...], load_model: Callable[..., Editable], edit_from: Path | None, tokens: int) -> None:
    """Complete PROMPTs greedily."""
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit.provenance["model"]) if edit is not None else load_model()
    if tokens >= editable.max_tokens:
        raise ModelError(f"--tokens {tokens} was asked for, but {editable.name} takes {editable.max_tokens} in all")
    said = [generation.completions(editable, prompts, tokens)]
    if edit is not None:
        with edit.applied(editable):
            said.append(generation.completions(editable, prompts, tokens))
    Surface().show(render.sayings(prompts, *said))
