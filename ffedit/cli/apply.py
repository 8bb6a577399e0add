"""`ffedit apply`: locate, edit, measure, and write what was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import ffedit
from ffedit import heat, plots, render
from ffedit.anatomy import Editable
from ffedit.cli import result
from ffedit.cli.options import FILE, Surface, fact_options, model_options, output_options, parse_layers
from ffedit.editor import METHODS
from ffedit.facts import Fact
from ffedit.folders import check_free
from ffedit.progressbar import progress_bars
from ffedit.require import parse_requirements
from ffedit.verdict import verdict


@click.command()
@fact_options
@model_options
@click.option("--layers", "--layer", default="auto", show_default=True, help="auto, N, or A-B: the best traced within.")
@click.option("--method", default="rome", show_default=True, type=click.Choice(list(METHODS)))
@click.option("--corpus", type=FILE, help="Text file for the key statistics.  [default: sampled from the model]")
@click.option("--out", type=FILE, help="Save the edit in this folder.")
@click.option("--export", "export_to", type=FILE, help="Save the edited checkpoint in this folder.")
@click.option("--force", is_flag=True, help="Replace folders that are there.")
@click.option("--plot", type=FILE, help="Draw the trace of the first fact into this PNG, SVG or PDF.")
@click.option("--require", default="", help='Conditions on the scores after: "efficacy>=0.95,specificity>=0.9".')
@click.option("--seed", default=0, show_default=True)
@output_options
def apply(
    facts: list[Fact],
    load_model: Callable[[], Editable],
    layers: str,
    method: str,
    corpus: Path | None,
    out: Path | None,
    export_to: Path | None,
    force: bool,
    plot: Path | None,
    require: str,
    seed: int,
    surface: Surface,
) -> None:
    """Write the facts of FACTS (a file in any known format, or -) into a model."""
    requirements = parse_requirements(require)
    for folder in filter(None, (out, export_to)):
        check_free(folder, force)
    if plot is not None:
        plots.check_plot(plot)
    clock = Clock()
    editable = load_model()
    allowed = parse_layers(layers, len(editable.layers))
    clock.lap("load")
    surface.show(render.model_line(editable))
    with progress_bars(surface.quiet) as progress:
        traces = ffedit.locate(editable, facts, seed=seed, progress=progress)
        layer = traces.best_within(allowed)
        clock.lap("locate")
        surface.show(heat.heat_map(traces, layer), heat.layer_choice(traces, layer, layers))
        config = ffedit.EditConfig(seed=seed)
        text = ffedit.Corpus(corpus)
        edit = ffedit.edit(editable, facts, method, [layer], config, text, progress)
        clock.lap("edit")
        report = ffedit.evaluate(editable, facts, edit, progress)
        clock.lap("evaluate")
    edit = edit.scored(report)
    surface.show(render.before_after(report), render.what_it_says(report), verdict(report, edit))
    surface.write_json(result.applied(editable, edit, traces, report, clock.seconds))
    if plot is not None:
        plots.save_plot(traces, plot, layer)
    for requirement in requirements:
        assert report.after is not None
        requirement.check(report.after)
    if out is not None:
        edit.save(out, force)
    if export_to is not None:
        ffedit.export(editable, edit, export_to, force)
    surface.show(render.next_steps(next_commands(editable, facts[0], out, export_to)))


def next_commands(editable: Editable, fact: Fact, out: Path | None, export_to: Path | None) -> list[str]:
    """What to type next."""
    model = "" if editable.name == "atlas" else f" --model {editable.name}"
    if export_to is not None:
        return [f'ffedit ask "{fact.text}" --model {export_to}']
    if out is not None:
        return [f'ffedit ask "{fact.text}"{model} --edit {out}', f"ffedit export {out} --out DIR"]
    return ["nothing was saved: add --out EDIT_DIR to keep the edit, --export CHECKPOINT_DIR to keep the edited model"]


class Clock:
    """Seconds of each stage, for the report."""

    def __init__(self) -> None:
        self.seconds: dict[str, Any] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Note the time since the last lap."""
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 3)
        self._last = now
