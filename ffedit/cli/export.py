"""`ffedit export`: an edit written as a checkpoint, an adapter or a delta."""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Any

import click

import ffedit
from ffedit.cli.options import FILE, Surface, base_of, writing_options
from ffedit.display.terminal.messages import Commands, shipped
from ffedit.editor import Edit
from ffedit.exporter import FORMATS, push


@click.command()
@click.argument("edit", type=Edit.load, metavar="EDIT_DIR")
@click.option("--out", type=FILE, required=True, help="The folder, or FILE.gguf, to make.")
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="A whole model, a LoRA adapter (PEFT), what is added to which parameter, or the GGUF file that the base is "
    "from, edited.  [default: gguf for FILE.gguf, else checkpoint]",
)
@click.option(
    "--model", "-m", help="The base: hub id, folder, smollm2, or FILE.gguf.  [default: what the edit was computed on]"
)
@writing_options
@click.option("--no-originals", is_flag=True, help="Leave out the original matrices, which exact undo needs.")
@click.option("--push-to-hub", "hub", metavar="NAME", help="Then upload the folder as this repository of the hub.")
def export(edit: Edit, out: Path, model: str | None, no_originals: bool, hub: str | None, **how: Any) -> None:
    """Write the edit of EDIT_DIR into its base, as a checkpoint that transformers loads, or as an adapter for it."""
    with base_of(edit, model) as base:
        done = ffedit.export(base, edit, out, originals=not no_originals, **how)
    prompts = [fact.text for fact in edit.facts[:1]] if how["format"] not in ("adapter", "delta") else []
    steps = [join(["ffedit", "ask", prompt, "--model", str(out)]) for prompt in prompts]
    Surface().show(shipped(done), Commands(steps) if steps else None)
    if hub is not None:
        Surface().show(f"Pushed to {push(out, hub)}")
