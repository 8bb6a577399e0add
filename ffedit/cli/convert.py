"""`ffedit convert`: a whole checkpoint in safetensors, of an adapter and its base or of pickled weights."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

import ffedit
from ffedit.cli.options import FILE, LOADING, output_options
from ffedit.cli.surface import Surface
from ffedit.files.atomic import check_free


@click.command()
@output_options
@click.argument("folder", type=FILE)
@click.option("--out", type=FILE, required=True, help="Folder to write.")
@click.option("--base", help="Model into which an adapter is merged.  [default: the one that its config names]")
@LOADING["revision"]
@click.option("--force", is_flag=True, help="Replace an existing folder that holds weights.")
def convert(folder: Path, out: Path, base: str | None, revision: str | None, force: bool, surface: Surface) -> None:
    """Make a checkpoint that can be edited: merge the adapter in FOLDER into its base, or unpack pickled weights."""
    check_free(out, force)
    surface.announce(f"writing {out}")
    ffedit.convert(folder, out, base=base, force=force, revision=revision)
    surface.show(f"{out} is a whole checkpoint in safetensors.")
    surface.write_json({"folder": str(out)})
