"""`ffedit undo`: a checkpoint without one of its edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ffedit.cli.options import FILE, Surface
from ffedit.shipped import shipped
from ffedit.shipping import unship


@click.command()
@click.argument("checkpoint")
@click.option("--out", type=FILE, required=True, help="The folder to make.")
@click.option("--edit", metavar="N|FINGERPRINT", help="Which; 0 is the oldest.  [default: the last]")
@click.option("--inexact", is_flag=True, help="Where exact undo is not possible, subtract.")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint.")
@click.option(
    "--verify",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "tensors", "logits"]),
    help="What a fresh process compares; auto: logits, too, where the model fits in memory.",
)
@click.option("--force", is_flag=True, help="Replace the folder if it is there.")
def undo(checkpoint: str, out: Path, **how: Any) -> None:
    """Take an edit out of CHECKPOINT (a folder or hub id of `ffedit export`), bit for bit."""
    Surface().show(shipped(unship(checkpoint, out, **how), undone=True))
