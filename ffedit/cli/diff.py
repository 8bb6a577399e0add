"""`ffedit diff`: what changed between two checkpoints."""

from __future__ import annotations

import click

import ffedit
from ffedit.cli.options import Surface, output_options
from ffedit.progressbar import progress_bars
from ffedit.showing import diff_view


@click.command()
@click.argument("base")
@click.argument("edited")
@output_options
def diff(base: str, edited: str, surface: Surface) -> None:
    """Compare two checkpoint folders (or cached hub ids, or atlas), tensor by tensor."""
    with progress_bars(surface.quiet) as progress:
        found = ffedit.diff(base, edited, progress=progress)
    surface.show(diff_view(found))
    surface.write_json(found.to_dict())
