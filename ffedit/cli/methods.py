"""`ffedit methods`: the editing methods, and when to choose each."""

from __future__ import annotations

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import output_options
from ffedit.cli.surface import Surface


@click.command()
@output_options
def methods(surface: Surface) -> None:
    """List the methods, with the problem that each solves and when to choose it."""
    work.methods(surface)
