"""`ffedit locate`: causal tracing of facts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import ffedit
from ffedit import heat, plots, render
from ffedit.anatomy import Editable
from ffedit.cli import result
from ffedit.cli.options import FILE, SEED, Surface, fact_options, model_options, output_options
from ffedit.facts import Fact
from ffedit.locator import Kind
from ffedit.progressbar import progress_bars

KINDS: dict[str, Kind] = {"state": "state", "feed-forward": "feed_forward"}


@click.command()
@fact_options
@model_options
@click.option("--kind", default="feed-forward", show_default=True, type=click.Choice(list(KINDS)))
@click.option(
    "--window", type=click.IntRange(1), help="Layers restored together.  [default: a third of the depth, 3 to 10]"
)
@click.option("--samples", default=10, show_default=True, type=click.IntRange(1), help="Noise draws.")
@click.option(
    "--noise",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Standard deviation of the noise, in σ of the embeddings.",
)
@click.option("--seed", default=0, show_default=True, type=SEED)
@click.option("--plot", type=FILE, help="Draw the trace (of several facts, the average) as PNG, SVG or PDF.")
@output_options
def locate(
    facts: list[Fact],
    load_model: Callable[[], Editable],
    kind: str,
    plot: Path | None,
    surface: Surface,
    **settings: Any,
) -> None:
    """Trace where a model recalls the facts of FACTS (a file in any known format, or -)."""
    if plot is not None:
        plots.check_plot(plot)
    editable = load_model()
    surface.show(render.model_line(editable))
    with progress_bars(surface.quiet) as progress:
        traces = ffedit.locate(editable, facts, KINDS[kind], progress=progress, **settings)
    surface.show(heat.heat_map(traces, traces.layer), heat.layer_choice(traces, traces.layer, "auto"))
    surface.write_json(result.located(editable, facts, traces))
    if plot is not None:
        plots.save_plot(traces, plot)
