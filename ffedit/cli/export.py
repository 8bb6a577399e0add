"""`ffedit export`: an edit written as a checkpoint, an adapter or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import FILE, edit_folder, output_options, writing_options
from ffedit.cli.surface import Surface
from ffedit.files.atomic import check_free
from ffedit.loading.names import check_name


@click.command()
@output_options
@click.argument("edit_from", type=edit_folder, metavar="EDIT_DIR")
@click.option("--out", type=FILE, required=True, help="Folder or FILE.gguf to write.")
@click.option(
    "--format",
    type=click.Choice(["checkpoint", "adapter", "gguf"]),
    help="A whole model, a LoRA adapter (for PEFT; FILE.gguf for llama.cpp), or the GGUF file that the base is from, "
    "edited.  [default: gguf for FILE.gguf, else checkpoint]",
)
@click.option("--model", "-m", help="Hub id, folder, smollm2, or FILE.gguf of the base.  [default: that of the edit]")
@writing_options
def export(out: Path, format: str | None, model: str | None, force: bool, surface: Surface, **kwargs: Any) -> None:
    """Write the edit of EDIT_DIR into its base, as a checkpoint that transformers loads, or as an adapter for it."""
    check_free(out, force, folder=format == "checkpoint")
    if model is not None:
        check_name(model)
    surface.announce(f"writing and verifying {out}")
    work.export(out=out, format=format, model=model, force=force, surface=surface, **kwargs)
