"""`ffedit choose-layer`: the layer to edit, by trial edits at a few."""

from __future__ import annotations

import rich_click as click

import ffedit
from ffedit.cli import options
from ffedit.cli.fact_options import Reading, reading_options
from ffedit.editor.names import method_names


@click.command()
@options.output_options
@click.argument("sources", nargs=-1, metavar="[FACTS]...")
@reading_options
@click.option(
    "--layers",
    "--layer",
    default="auto",
    help="Layers to try: N, A-B, or auto, which takes some at fixed shares of the depth.",
)
@click.option("--method", default="memit", type=click.Choice(method_names()), help="Method of the edits.")
@options.asking_options
def choose_layer(
    sources: tuple[str, ...],
    reading: Reading,
    layers: str,
    method: str,
    load_model: options.LoadModel,
    surface: options.Surface,
) -> None:
    """Try edits at several layers, with facts of FACTS or with built-in ones, and name the best layer."""
    sifted = reading.sift(sources, surface) if sources else None
    facts = None if sifted is None else list(sifted.facts)

    from ffedit.display.terminal.layer_choice import trial_edits

    editable = load_model()
    tried = None if layers == "auto" else options.parse_layers(layers, len(editable.layers), ("auto",))
    with surface.progress() as progress:
        choice = ffedit.choose_layer(editable, method=method, facts=facts, layers=tried, progress=progress)
    surface.show(trial_edits(choice))
    left_out = [] if sifted is None else [records.to_dict() for records in sifted.by_kind]
    surface.write_json({"model": editable.name, **choice.to_dict(), "left_out": left_out})
