"""`ffedit diff`: the differences between two checkpoints."""

from __future__ import annotations

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import output_options
from ffedit.cli.surface import Surface


@click.command()
@output_options
@click.argument("base")
@click.argument("edited")
def diff(base: str, edited: str, surface: Surface) -> None:
    """Compare two checkpoint folders (or cached hub ids, or embedded models), tensor by tensor."""
    surface.announce(f"comparing {base} and {edited}")
    work.diff(base, edited, surface)
