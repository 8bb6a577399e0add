"""`ffedit locate`: causal tracing of facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from rich.text import Text

import ffedit
from ffedit.cli import result
from ffedit.cli.options import FILE, SEED, Surface, asking_options, fact_options, output_options, parse_layers
from ffedit.display.figures import averages as averages_figure
from ffedit.display.figures import trace as trace_figure
from ffedit.display.terminal import averages, heat_map, render
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.display.terminal.routing import routing_table
from ffedit.editor import METHODS, preset
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.files.atomic import check_file
from ffedit.layer_choice import choose
from ffedit.locator import TraceSet, aggregate, subject_routes
from ffedit.locator.corruption import Corruption, Sigma
from ffedit.locator.trace import resolve_window
from ffedit.model.editable import Editable
from ffedit.progress import Progress

KINDS = {"feed-forward": ["feed_forward"], "state": ["state"], "attention": ["attention"]}
KINDS["all"] = ["state", "feed_forward", "attention"]
SEVERS: dict[str, list[str | None]] = {
    "none": [None],
    "feed-forward": ["feed_forward"],
    "attention": ["attention"],
    "all": [None, "feed_forward", "attention"],
}
METRICS = ("probability", "log-probability", "logit-difference")
CORRUPTIONS = ("gaussian", "covariance", "uniform", "replacement")
# Number of facts on which an estimate is compared with exact effects.
COMPARED = 8


@click.command()
@fact_options
@asking_options
@click.option("--layers", default="all", show_default=True, help="Where something is restored: all, N, or A-B.")
@click.option("--kind", default="feed-forward", show_default=True, type=click.Choice(list(KINDS)))
@click.option(
    "--window", type=click.IntRange(1), help="Layers restored together.  [default: a third of the depth, 3 to 10]"
)
@click.option("--sever", default="none", show_default=True, type=click.Choice(list(SEVERS)), help="Hold corrupted.")
@click.option("--corruption", default="gaussian", show_default=True, type=click.Choice(CORRUPTIONS))
@click.option(
    "--noise",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Size of the noise, in σ of the embeddings.",
)
@click.option(
    "--noise-scale",
    default="vocabulary",
    show_default=True,
    type=click.Choice(get_args(Sigma)),
    help="Whose embeddings σ is of: the whole vocabulary's, or as in ROME's published code the subjects' in FACTS.",
)
@click.option("--samples", default=10, show_default=True, type=click.IntRange(1), help="Corrupted runs.")
@click.option("--metric", default="probability", show_default=True, type=click.Choice(METRICS))
@click.option("--approximate", is_flag=True, help="First-order estimates: one gradient for all effects.")
@click.option("--aggregate", "averaged", is_flag=True, help="Averages over facts by role of the token; can be resumed.")
@click.option("--sweep", is_flag=True, help="Edit at each layer too, and compare with the trace and the model's layer.")
@click.option("--method", default="memit", show_default=True, type=click.Choice(list(METHODS)), help="Of these edits.")
@click.option("--seed", default=0, show_default=True, type=SEED)
@click.option("--plot", type=FILE, help="Draw what was traced as PNG, SVG or PDF.")
@click.option("--save", type=FILE, metavar="FILE.npz", help="Write the numbers, with the names of their axes.")
@output_options
def locate(
    facts: list[Fact],
    load_model: Callable[[], Editable],
    layers: str,
    kind: str,
    sever: str,
    corruption: str,
    noise: float,
    noise_scale: str,
    metric: str,
    averaged: bool,
    sweep: bool,
    method: str,
    plot: Path | None,
    save: Path | None,
    surface: Surface,
    **settings: Any,
) -> None:
    """Trace where a model recalls the facts of FACTS (a file in any known format, a data set, or -)."""
    check_places(plot, save, facts, averaged, KINDS[kind], SEVERS[sever])
    if settings["approximate"] and sever != "none":
        raise EditError("severed parts have no first-order estimate; trace exactly, or without --sever")
    if layers != "all" and (averaged or sweep or settings["approximate"]):
        raise EditError("--aggregate, --sweep and --approximate are of all layers; leave --layers out")
    settings |= {
        "corruption": f"{corruption}:{noise}:{noise_scale}",
        "metric": metric.replace("-", "_"),
        "resume": averaged,
    }
    editable = load_model()
    if layers != "all":
        settings["layers"] = parse_layers(layers, len(editable.layers), ("all",))
    for each in KINDS[kind]:
        resolve_window(len(editable.layers), each, settings["window"])  # type: ignore[arg-type]
    surface.show(render.model_line(editable))
    with progress_bars(surface.quiet) as progress:
        measured = [
            ffedit.locate(editable, facts, each, sever=cut, progress=progress, **settings)  # type: ignore[call-overload]
            for each in KINDS[kind]
            for cut in SEVERS[sever]
        ]
        aggregates = [aggregate(traces) for traces in measured] if averaged else []
        chosen = chooser(measured, averaged)
        layer = chosen.layer
        swept = model = None
        if sweep:
            feeding = chosen.traces[0].kind == "feed_forward"
            traced = chosen if feeding else ffedit.locate(editable, facts, seed=settings["seed"], progress=progress)
            config = replace(preset("default", method), seed=settings["seed"])
            swept = choose.by_sweep(editable, facts, traced, method, config, progress=progress)
            model = ffedit.choose_layer(editable, method, progress=progress)
        agreement = agreements(editable, facts, measured, settings, progress) if settings["approximate"] else None
        routes = subject_routes(editable, facts, settings["seed"])
    for traces in [] if averaged else measured:
        surface.show(heat_map.heat_map(traces, layer))
    surface.show(*map(averages.averages_table, aggregates), heat_map.layer_choice(chosen, layer), agreement)
    surface.show(routing_table(facts, routes, layer))
    if not editable.resumable:
        surface.show(Text("This model cannot be resumed at a token: whole rows were run (slower, same results)."))
    if swept is not None:
        surface.show(averages.compare_layers(swept))
    if model is not None:
        surface.show(render.model_choice(model), averages.candidates_table(model) if model.rows else None)
    last = swept.layer if swept else layer
    surface.write_json(result.located(editable, facts, measured, aggregates, swept, last, routes, model))
    if save is not None:
        (aggregates[0] if averaged else measured[0].traces[0]).save(save)
    if plot is not None and averaged:
        averages_figure.save_aggregate(aggregates, plot)
    elif plot is not None:
        trace_figure.save_plot(measured, plot, layer)


def check_places(
    plot: Path | None, save: Path | None, facts: list[Fact], averaged: bool, kinds: list[str], severs: Sequence[Any]
) -> None:
    """Check before the long computation that its results can be written.

    Raises:
        EditError: a file cannot be written, or would have to hold several measurements.
    """
    if plot is not None:
        trace_figure.check_plot(plot)
    if save is None:
        return
    check_file(save)
    if save.suffix != ".npz":
        raise EditError(f"{save}: numbers are saved as .npz; rename it, or use --json")
    if len(kinds) * len(severs) > 1 or not (averaged or len(facts) == 1):
        raise EditError(
            f"{save}: holds one measurement of one fact, or one average (--aggregate); use --json for several"
        )


def chooser(measured: Sequence[TraceSet], averaged: bool) -> TraceSet:
    """Select the traces that choose the layer: those of unsevered feed-forward outputs, or else the first measurement.

    If an average was asked for, only the facts that the model knows are used.
    """
    feeding = [traces for traces in measured if (one := traces.traces[0]).kind == "feed_forward" and not one.sever]
    chosen = (feeding or measured)[0]
    return TraceSet(tuple(trace for trace in chosen.traces if trace.known)) if averaged else chosen


def agreements(
    editable: Editable, facts: list[Fact], measured: Sequence[TraceSet], settings: dict[str, Any], progress: Progress
) -> Text:
    """Compare the estimates with exact effects on the first few facts, in words."""
    lines = []
    # A corruption that takes other facts' subjects would be a different one with fewer facts.
    sample = facts if Corruption.parse(settings["corruption"]).depends_on_others else facts[:COMPARED]
    for traces in measured:
        one = traces.traces[0]
        exact, guess = (
            ffedit.locate(
                editable, sample, one.kind, progress=progress,
                **{**settings, "approximate": approximate, "resume": False},
            )
            for approximate in (False, True)
        )  # fmt: skip
        lines.append(averages.agreement(guess, exact))
    return Text("\n".join(lines))
