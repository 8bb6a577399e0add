"""Traces of facts, shown, drawn and saved; with `--leak` also the map of a fact's sites."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

import ffedit
from ffedit.cli.options import ModelOptions, Solving, parse_layers
from ffedit.cli.surface import Surface
from ffedit.cli.work import result
from ffedit.cli.work.model import load_model
from ffedit.cli.work.solving import config_of
from ffedit.display.figures.plots import average_lines, heat_maps, site_maps
from ffedit.display.figures.saving import save_figure
from ffedit.display.terminal.heat_map import averages_table, heat_map
from ffedit.display.terminal.recall import recalled
from ffedit.display.terminal.site_map import site_map_view
from ffedit.facts.fact import Fact
from ffedit.facts.reading import LeftOutRecords
from ffedit.locator import Kind, Part, aggregate
from ffedit.locator.result import subject_peak
from ffedit.locator.trace import decisive, resolve_window


def locate(
    facts: list[Fact],
    measurements: Sequence[tuple[Kind, Part | None]],
    *,
    model: ModelOptions,
    layers: str,
    averaged: bool,
    leak: bool,
    solving: Solving,
    plot: Path | None,
    surface: Surface,
    left_out: Sequence[LeftOutRecords] = (),
    **settings: Any,
) -> None:
    """Trace facts by each pair of a restored and a severed module; `settings` are those of `locate_all`."""
    config = config_of(solving, "memit")
    editable = load_model(model, surface)
    if layers != "all":
        settings["layers"] = parse_layers(layers, len(editable.layers), ("all",))
    for kind, _ in measurements:
        resolve_window(len(editable.layers), kind, settings["window"])
    settings |= {"resume": averaged, "seed": solving.seed}
    mapped = None
    with surface.progress() as progress:
        measured = [
            ffedit.locate_all(editable, facts, kind, sever=severed, progress=progress, **settings)
            for kind, severed in measurements
        ]
        aggregates = [aggregate(traces) for traces in measured] if averaged else []
        choosing = decisive(measured, averaged)
        if leak:
            mapped = ffedit.site_map(
                editable, facts[0], layers=settings.get("layers"), config=config, progress=progress
            )
    layer, peak = choosing.layer, subject_peak(choosing)
    # If the subject's last token shows no site, the layer is marked at which any token of the subject brings back most.
    marked = layer if choosing.site is not None else peak.layer
    maps = map(averages_table, aggregates) if averaged else (heat_map(traces, marked) for traces in measured)
    surface.show(*maps, recalled(choosing))
    if not editable.resumable:
        surface.show(Text("This model cannot be resumed at a token: whole rows were run (slower, same results)."))
    if mapped is not None:
        surface.show(site_map_view(mapped, choosing.traces[0], marked))
    surface.write_json(result.located(editable, facts, measured, aggregates, layer, mapped, left_out))
    if plot is not None and mapped is not None:
        save_figure(plot, partial(site_maps, choosing.traces[0], mapped, marked))
    elif plot is not None:
        save_figure(plot, lambda: average_lines(aggregates) if averaged else heat_maps(measured, marked))
