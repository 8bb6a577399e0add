"""`ffedit ask`: completions of a model, without and with an edit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

import ffedit
from ffedit.cli.options import COUNT, Surface, asking_options, edit_folder, output_options
from ffedit.errors import ModelError

if TYPE_CHECKING:
    from ffedit.model.editable import Editable


@click.command()
@output_options
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@asking_options
@click.option(
    "--edit", "edit_from", type=edit_folder, metavar="PATH", help="Show completions before and after this edit."
)
@click.option("--tokens", default=12, type=COUNT, help="Length of a completion.")
def ask(
    prompts: tuple[str, ...],
    load_model: Callable[..., Editable],
    edit_from: Path | None,
    tokens: int,
    surface: Surface,
) -> None:
    """Complete PROMPTs greedily."""
    from ffedit.display.terminal.scores import sayings
    from ffedit.inference.generation import completions

    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit)
    if tokens >= editable.max_tokens:
        raise ModelError(f"--tokens {tokens} was asked for, but {editable.name} takes {editable.max_tokens} in all")
    answers = [completions(editable, prompts, tokens)]
    if edit is not None:
        with edit.applied(editable):
            answers.append(completions(editable, prompts, tokens))
    surface.show(sayings(prompts, *answers))
    sides = [dict(zip(("before", "after"), said, strict=False)) for said in zip(*answers, strict=True)]
    rows = [{"prompt": prompt, **said} for prompt, said in zip(prompts, sides, strict=True)]
    surface.write_json({"model": editable.name, "prompts": rows})
