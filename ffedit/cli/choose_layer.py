"""`ffedit choose-layer`: the layer to edit, chosen by trial edits at several layers."""

from __future__ import annotations

from typing import Any

import rich_click as click

from ffedit.cli import options, work
from ffedit.cli.fact_options import Reading, reading_options
from ffedit.cli.surface import Surface
from ffedit.editor.names import method_names


@click.command()
@options.output_options
@click.argument("sources", nargs=-1, metavar="[FACTS]...")
@reading_options
@options.layers_option("Layers to try: auto (several, at fixed shares of the depth), N, or A-B.")
@click.option("--method", default="memit", type=click.Choice(method_names()), help="Method of the trial edits.")
@options.asking_options
def choose_layer(sources: tuple[str, ...], reading: Reading, surface: Surface, **kwargs: Any) -> None:
    """Try edits at several layers, with facts of FACTS or with built-in ones, and name the best layer."""
    sifted = reading.sift(sources, surface) if sources else None
    work.choose_layer(sifted, surface=surface, **kwargs)
