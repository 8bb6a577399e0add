"""`ffedit export`: an edit becomes a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import join

import click

import ffedit
from ffedit import render
from ffedit.anatomy import Editable
from ffedit.cli.options import FILE, Surface, model_options
from ffedit.folders import check_free


@click.command()
@click.argument("edit_from", type=FILE, metavar="EDIT_DIR")
@model_options
@click.option("--out", type=FILE, required=True, help="The folder to make.")
@click.option("--force", is_flag=True, help="Replace the folder if it is there.")
def export(edit_from: Path, load_model: Callable[..., Editable], out: Path, force: bool) -> None:
    """Write the model of EDIT_DIR (or --model) with its edit as a checkpoint that transformers loads."""
    check_free(out, force)
    edit = ffedit.Edit.load(edit_from)
    editable = load_model(edit.provenance["model"])
    ffedit.export(editable, edit, out, force)
    Surface().show(render.next_steps([join(["ffedit", "ask", edit.facts[0].text, "--model", str(out)])]))
