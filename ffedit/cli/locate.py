"""`ffedit locate`: causal tracing of facts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from rich.text import Text

import ffedit
from ffedit.cli import options
from ffedit.cli.fact_options import fact_options
from ffedit.display.figures.saving import check_plot, save_figure
from ffedit.editor.names import method_names
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.facts.reading import LeftOutRecords
from ffedit.files.atomic import check_file

if TYPE_CHECKING:
    from ffedit.locator import Kind, Part

KINDS: dict[str, list[Kind]] = {
    "feed-forward": ["feed_forward"],
    "state": ["state"],
    "attention": ["attention"],
    "all": ["state", "feed_forward", "attention"],
}
SEVERS: dict[str, list[Part | None]] = {
    "none": [None],
    "feed-forward": ["feed_forward"],
    "attention": ["attention"],
    "all": [None, "feed_forward", "attention"],
}


@click.command()
@options.output_options
@fact_options
@options.asking_options
@click.option("--layers", default="all", help="Layers to restore: all, N, or A-B.")
@click.option("--kind", default="feed-forward", type=click.Choice(list(KINDS)))
@click.option(
    "--window",
    type=options.COUNT,
    help="Layers restored together.  [default: a third of the depth, 3 to 10]",
)
@click.option(
    "--sever", default="none", type=click.Choice(list(SEVERS)), help="Keep this module at its corrupted output."
)
@click.option(
    "--corruption", default="gaussian", type=click.Choice(["gaussian", "covariance", "uniform", "replacement"])
)
@click.option(
    "--noise",
    default=3.0,
    type=click.FloatRange(0, min_open=True),
    help="Size of the noise, in σ of the embeddings.",
)
@click.option(
    "--noise-scale",
    default="vocabulary",
    type=click.Choice(["vocabulary", "subjects"]),
    help="Embeddings from which σ is estimated: the whole vocabulary, or the subjects in FACTS, as in ROME's code.",
)
@click.option("--samples", default=10, type=options.COUNT, help="Number of corrupted runs.")
@click.option(
    "--metric", default="probability", type=click.Choice(["probability", "log-probability", "logit-difference"])
)
@click.option(
    "--leak",
    is_flag=True,
    help="Map, for one fact, how far an edit at each site reaches and how much it leaks to other names.",
)
@click.option("--aggregate", "averaged", is_flag=True, help="Average over facts by the role of the token.")
@click.option("--sweep", is_flag=True, help="Also edit at each layer, and compare the scores with the trace.")
@click.option("--method", default="memit", type=click.Choice(method_names()), help="Method used by --sweep.")
@options.number_options
@click.option("--plot", type=options.FILE, help="Draw the traces as PNG, SVG or PDF.")
@click.option("--save", type=options.FILE, metavar="FILE.npz", help="Write the effects and the names of their axes.")
def locate(
    facts: list[Fact],
    left_out: Sequence[LeftOutRecords] = (),
    *,
    load_model: options.LoadModel,
    layers: str,
    kind: str,
    sever: str,
    corruption: str,
    noise: float,
    noise_scale: str,
    metric: str,
    leak: bool,
    averaged: bool,
    sweep: bool,
    method: str,
    solving: options.Solving,
    plot: Path | None,
    save: Path | None,
    surface: options.Surface,
    **settings: Any,
) -> None:
    """Trace where a model recalls the facts of FACTS (files of any shape, a data set, or -)."""
    combinations = [(each, cut) for each in KINDS[kind] for cut in SEVERS[sever]]
    _check_files(plot, save, len(combinations), averaged or len(facts) == 1)
    if layers != "all" and (averaged or sweep):
        raise EditError("--aggregate and --sweep are of all layers; leave --layers out")
    if leak and (averaged or sweep or len(facts) != 1):
        raise EditError(f"--leak is of one fact, found {len(facts)}; name one, without --aggregate and --sweep")
    config, seed = solving.config(method), solving.seed
    if not (sweep or leak) and (solving.settings or solving.preset_name != "default"):
        raise EditError("--set and --preset are of the edits of a sweep or a leak; add --sweep or --leak")
    settings["corruption"] = f"{corruption}:{noise}:{noise_scale}"
    settings |= {"metric": metric.replace("-", "_"), "resume": averaged, "seed": seed}

    from ffedit.cli import result
    from ffedit.display.figures.plots import average_lines, heat_maps, site_maps
    from ffedit.display.terminal.heat_map import averages_table, heat_map
    from ffedit.display.terminal.layer_choice import auto_in_words, compare_layers, layer_choice
    from ffedit.display.terminal.routing import routing_table
    from ffedit.display.terminal.site_map import site_map_view
    from ffedit.inference.routing import subject_routes
    from ffedit.layer_choice.calibrate import by_sweep
    from ffedit.layer_choice.published import auto_layer
    from ffedit.locator import aggregate
    from ffedit.locator.result import subject_peak
    from ffedit.locator.trace import decisive, resolve_window

    editable = load_model()
    if layers != "all":
        settings["layers"] = options.parse_layers(layers, len(editable.layers), ("all",))
    for each in KINDS[kind]:
        resolve_window(len(editable.layers), each, settings["window"])
    swept = mapped = None
    with surface.progress() as progress:
        measured = [
            ffedit.locate_all(editable, facts, each, sever=cut, progress=progress, **settings)
            for each, cut in combinations
        ]
        aggregates = [aggregate(traces) for traces in measured] if averaged else []
        choosing = decisive(measured, averaged)
        if sweep:
            of_feed_forward = choosing.traces[0].kind == "feed_forward"
            traced = choosing if of_feed_forward else ffedit.locate_all(editable, facts, seed=seed, progress=progress)
            swept = by_sweep(editable, facts, traced, method, config, progress=progress)
        if leak:
            mapped = ffedit.site_map(
                editable, facts[0], layers=settings.get("layers"), config=config, progress=progress
            )
        routes = subject_routes(editable, facts, seed)
    layer, peak = choosing.layer, subject_peak(choosing)
    # Where the subject's last token tells no layer, the one is marked at which another brings back most.
    marked = layer if choosing.site is not None else peak.layer
    maps = map(averages_table, aggregates) if averaged else (heat_map(traces, marked) for traces in measured)
    surface.show(*maps, layer_choice(choosing, layer), routing_table(facts, routes, layer))
    if not editable.resumable:
        surface.show(Text("This model cannot be resumed at a token: whole rows were run (slower, same results)."))
    if mapped is not None:
        surface.show(site_map_view(mapped, choosing.traces[0], marked))
    if swept is not None:
        surface.show(compare_layers(swept), auto_in_words(auto_layer(editable, method)))
    chosen = layer if swept is None else swept.layer
    surface.write_json(result.located(editable, facts, measured, aggregates, chosen, routes, swept, mapped, left_out))
    if save is not None:
        (aggregates[0] if averaged else measured[0].traces[0]).save(save)
    if plot is not None and mapped is not None:
        save_figure(plot, partial(site_maps, choosing.traces[0], mapped, marked))
    elif plot is not None:
        save_figure(plot, lambda: average_lines(aggregates) if averaged else heat_maps(measured, marked))


def _check_files(plot: Path | None, save: Path | None, measurements: int, single: bool) -> None:
    """Check that the files can be written, and that what is saved is one measurement. Raises EditError otherwise."""
    if plot is not None:
        check_plot(plot)
    if save is None:
        return
    check_file(save)
    if save.suffix != ".npz":
        raise EditError(f"{save}: numbers are saved as .npz; rename it, or use --json")
    if measurements > 1 or not single:
        raise EditError(
            f"{save}: holds one measurement of one fact, or one average (--aggregate); use --json for several"
        )
