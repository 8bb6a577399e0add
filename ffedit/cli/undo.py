"""`ffedit undo`: a checkpoint with one of its edits undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import ffedit
from ffedit.cli.options import FILE, Surface, writing_options
from ffedit.display.terminal.messages import shipped


@click.command()
@click.argument("checkpoint")
@click.option("--out", type=FILE, required=True, help="The folder to make.")
@click.option("--edit", metavar="N|FINGERPRINT", help="Which; 0 is the oldest.  [default: the last]")
@click.option("--inexact", is_flag=True, help="Where exact undo is not possible, subtract.")
@writing_options
def undo(checkpoint: str, out: Path, **how: Any) -> None:
    """Take an edit out of CHECKPOINT (a folder or hub id of `ffedit export`), bit for bit."""
    Surface().show(shipped(ffedit.undo(checkpoint, out, **how), undone=True))
