"""`ffedit undo`: a checkpoint with one of its edits undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import FILE, output_options, writing_options
from ffedit.cli.surface import Surface
from ffedit.files.atomic import check_free
from ffedit.loading.names import check_name


@click.command()
@output_options
@click.argument("checkpoint")
@click.option("--out", type=FILE, required=True, help="Folder to write.")
@click.option("--edit", metavar="N|FINGERPRINT", help="Edit to undo; 0 is the oldest.  [default: the last]")
@writing_options
def undo(checkpoint: str, out: Path, force: bool, surface: Surface, **kwargs: Any) -> None:
    """Remove an edit from CHECKPOINT (a folder or hub id of `ffedit export`), bit for bit."""
    check_name(checkpoint)
    check_free(out, force, folder=True)
    surface.announce(f"writing and verifying {out}")
    work.undo(checkpoint, out, surface, force=force, **kwargs)
