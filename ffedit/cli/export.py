"""`ffedit export`: an edit written as a checkpoint, an adapter or a delta."""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Any

import rich_click as click

import ffedit
from ffedit.cli.options import FILE, PUSH, Surface, base_of, edit_folder, output_options, pushed, writing_options
from ffedit.display.terminal.messages import Commands, shipped
from ffedit.files.atomic import check_free
from ffedit.loading.names import check_name


@click.command()
@output_options
@click.argument("edit_from", type=edit_folder, metavar="EDIT_DIR")
@click.option("--out", type=FILE, required=True, help="Folder or FILE.gguf to write.")
@click.option(
    "--format",
    type=click.Choice(["checkpoint", "adapter", "delta", "gguf"]),
    help="A whole model, a LoRA adapter (for PEFT; FILE.gguf for llama.cpp), what is added to which parameter, or the "
    "GGUF file that the base is from, edited.  [default: gguf for FILE.gguf, else checkpoint]",
)
@click.option("--model", "-m", help="Hub id, folder, smollm2, or FILE.gguf of the base.  [default: that of the edit]")
@writing_options
@click.option("--no-originals", is_flag=True, help="Leave out the original matrices, although exact undo needs them.")
@PUSH
def export(
    edit_from: Path, out: Path, model: str | None, no_originals: bool, hub: str | None, surface: Surface, **how: Any
) -> None:
    """Write the edit of EDIT_DIR into its base, as a checkpoint that transformers loads, or as an adapter for it."""
    check_free(out, how["force"])
    if model is not None:
        check_name(model)
    surface.announce(f"writing and verifying {out}")

    from ffedit.cli import result

    edit = ffedit.Edit.load(edit_from)
    with base_of(edit, model) as base:
        done = ffedit.export(base, edit, out, originals=not no_originals, **how)
    can_ask = edit.facts and how["format"] not in ("adapter", "delta")
    ask = Commands([join(["ffedit", "ask", edit.facts[0].text, "--model", str(out)])]) if can_ask else None
    surface.show(shipped(done), ask)
    surface.show(pushed(out, hub))
    surface.write_json(result.written(done))
