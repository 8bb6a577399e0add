"""`ffedit export`: an edit written as a checkpoint, an adapter or a delta."""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Any

import click

import ffedit
from ffedit.cli.options import FILE, Surface, elsewhere, writing_options
from ffedit.display.terminal import render
from ffedit.display.terminal.shipped import shipped
from ffedit.exporter import push, ship


@click.command()
@click.argument("edit_from", type=FILE, metavar="EDIT_DIR")
@click.option("--out", type=FILE, required=True, help="The folder to make.")
@click.option(
    "--format",
    default="checkpoint",
    show_default=True,
    type=click.Choice(["checkpoint", "adapter", "delta"]),
    help="A whole model, a LoRA adapter (PEFT), or what is added to which parameter.",
)
@click.option(
    "--model", "-m", help="The base: hub id, folder, smollm2, or FILE.gguf.  [default: what the edit was computed on]"
)
@writing_options
@click.option("--no-originals", is_flag=True, help="Leave out the original matrices, which exact undo needs.")
@click.option("--push-to-hub", "hub", metavar="NAME", help="Then upload the folder as this repository of the hub.")
def export(edit_from: Path, out: Path, model: str | None, no_originals: bool, hub: str | None, **how: Any) -> None:
    """Write the edit of EDIT_DIR into its base, as a checkpoint that transformers loads, or as an adapter for it."""
    edit = ffedit.Edit.load(edit_from)
    named = edit.provenance["model"]
    with elsewhere(named if model is None else None):
        done = ship(named if model is None else model, edit, out, originals=not no_originals, **how)
    asked = [fact.text for fact in edit.facts[:1]] if how["format"] == "checkpoint" else []
    steps = [join(["ffedit", "ask", text, "--model", str(out)]) for text in asked]
    Surface().show(shipped(done), render.next_steps(steps) if steps else None)
    if hub is not None:
        Surface().show(f"Pushed to {push(out, hub)}")
