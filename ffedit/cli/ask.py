"""`ffedit ask`: completions of a model, without and with an edit."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

import ffedit
from ffedit.cli.options import COUNT, LoadModel, Surface, asking_options, edit_folder, output_options
from ffedit.errors import ModelError


@click.command()
@output_options
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@asking_options
@click.option("--edit", "edit_from", type=edit_folder, metavar="PATH", help="Compare the answers with this edit.")
@click.option("--tokens", default=12, type=COUNT, help="Number of tokens of a completion.")
def ask(prompts: tuple[str, ...], load_model: LoadModel, edit_from: Path | None, tokens: int, surface: Surface) -> None:
    """Complete each PROMPT greedily."""
    from ffedit.display.terminal.scores import sayings
    from ffedit.inference.generation import completions

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
