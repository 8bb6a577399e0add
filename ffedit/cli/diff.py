"""`ffedit diff`: the differences between two checkpoints."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import FILE, output_options
from ffedit.cli.surface import Surface
from ffedit.files.atomic import check_free


@click.command()
@output_options
@click.argument("base")
@click.argument("edited")
@click.option("--rank", type=click.IntRange(1), help="Number of directions to recover.  [default: all above rounding]")
@click.option("--out", type=FILE, metavar="EDIT_DIR", help="Save the difference as an edit of BASE.")
@click.option("--force", is_flag=True, help="Replace EDIT_DIR.")
def diff(base: str, edited: str, rank: int | None, out: Path | None, force: bool, surface: Surface) -> None:
    """Compare two checkpoint folders (or cached hub ids, or embedded models), tensor by tensor."""
    if out is not None:
        check_free(out, force)
    surface.announce(f"comparing {base} and {edited}")
    work.diff(base, edited, rank, out, force, surface)
