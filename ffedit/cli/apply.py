"""`ffedit apply`: locate, edit, measure, and write what was asked for."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

import ffedit
from ffedit import averages, choice, heat, plots, render
from ffedit.anatomy import Editable
from ffedit.cli import result
from ffedit.cli.options import FILE, SEED, Surface, fact_options, model_options, output_options, parse_layers
from ffedit.editor import METHODS, PRESETS, Edit, EditConfig, applied_edits, by_subject, tokens_for
from ffedit.errors import EditError
from ffedit.facts import Fact
from ffedit.folders import check_free
from ffedit.guardrails import breaches, refusal, warnings
from ffedit.locator import TraceSet
from ffedit.memory import Address
from ffedit.moments import KeyMoments
from ffedit.progress import Progress
from ffedit.progressbar import progress_bars
from ffedit.require import parse_requirements, unmet
from ffedit.verdict import verdict


@click.command()
@fact_options
@model_options
@click.option("--layers", "--layer", default="auto", show_default=True, help="auto, sweep, N, or A-B.")
@click.option("--spread", default=1, show_default=True, type=click.IntRange(1), help="Layers that share the work.")
@click.option("--method", default="memit", show_default=True, type=click.Choice(list(METHODS)), help="See `methods`.")
@click.option("--preset", default="default", show_default=True, type=click.Choice(list(PRESETS)), help="Numbers.")
@click.option("--corpus", help="Text or dataset for the key statistics.  [default: sampled from the model]")
@click.option("--stats", "stats_from", type=FILE, help="Key statistics that `ffedit stats --out` collected.")
@click.option("--out", type=FILE, help="Save the edit in this folder.")
@click.option("--export", "export_to", type=FILE, help="Save the edited checkpoint in this folder.")
@click.option("--force", is_flag=True, help="Replace folders that are there.")
@click.option("--plot", type=FILE, help="Draw the trace (of several facts, the average) as PNG, SVG or PDF.")
@click.option("--require", default="", help='Conditions on the scores after: "efficacy>=0.95,specificity>=0.9".')
@click.option("--strict", is_flag=True, help="Refuse an edit that breaks a guardrail, instead of warning.")
@click.option("--seed", default=0, show_default=True, type=SEED)
@output_options
def apply(
    facts: list[Fact],
    load_model: Callable[[], Editable],
    layers: str,
    spread: int,
    method: str,
    preset: str,
    corpus: str | None,
    stats_from: Path | None,
    out: Path | None,
    export_to: Path | None,
    force: bool,
    plot: Path | None,
    require: str,
    strict: bool,
    seed: int,
    surface: Surface,
) -> None:
    """Write the facts of FACTS (a file in any known format, or -) into a model."""
    requirements = parse_requirements(require)
    check_places(out, export_to, force, plot)
    config = replace(PRESETS[preset], seed=seed)
    text = ffedit.Corpus(corpus, tokens_for(len(by_subject(facts))), seed)
    text.check()
    clock = Clock()
    editable = load_model()
    allowed = parse_layers(layers, len(editable.layers))
    stats = ffedit.load_stats(stats_from, editable) if stats_from is not None else text
    clock.lap("load")
    surface.show(render.model_line(editable))
    with progress_bars(surface.quiet) as progress:
        traces, layer, why = find_layer(editable, facts, layers, allowed, config, stats, progress)
        clock.lap("locate")
        surface.show(heat.heat_map(traces, layer), *why)
        written = range(layer + 1 - spread, layer + 1)
        if written.start < 0:
            raise EditError(
                f"--spread {spread} was asked for, but layer {layer} has only {layer} below it; spread less"
            )
        edit = ffedit.edit(editable, facts, method, written, config, stats, applied_edits(editable), progress)
        clock.lap("edit")
        report = ffedit.evaluate(editable, facts, edit, progress)
        clock.lap("evaluate")
    broken = breaches(editable, edit, report)
    edit = edit.scored(report).noted(warnings=[breach.words for breach in broken])
    surface.show(render.before_after(report), render.what_it_says(report), verdict(report, edit), warnings(broken))
    failure = unmet(requirements, report.after or report.before) or (refusal(broken) if strict else None)
    if failure is None:
        save(editable, edit, out, export_to, force)
    surface.write_json(result.applied(editable, edit, traces, report, clock.seconds))
    if plot is not None:
        plots.save_plot(traces, plot, layer)
    if failure is not None:
        raise failure
    surface.show(next_step(facts[0], out, export_to))


def find_layer(
    editable: Editable,
    facts: list[Fact],
    asked: str,
    allowed: range,
    config: EditConfig,
    stats: ffedit.Corpus | Mapping[Address, KeyMoments],
    progress: Progress,
) -> tuple[TraceSet, int, list[RenderableType]]:
    """Trace, or sweep, or take what is remembered of this model; in the last case only the first fact is traced."""
    how: choice.How = "sweep" if asked == "sweep" else "trace"
    kept = choice.remembered(editable, how) if asked in ("auto", "sweep") else None
    traces = choice.by_trace(editable, facts[:1] if kept else facts, config.seed, progress)
    if kept:
        over = f"remembered from a {kept.how} over {kept.facts} fact{'s' if kept.facts > 1 else ''}"
        return traces, kept.layer, [Text(f"Layer {kept.layer}: {over} (`ffedit cache clear` forgets it).")]
    if asked == "sweep":
        sweep = choice.by_sweep(editable, facts, traces, config, stats, progress)
        return traces, sweep.layer, [averages.compare_layers(sweep)]
    layer = traces.best_within(allowed)
    return traces, layer, [heat.layer_choice(traces, layer, asked)]


def check_places(out: Path | None, export_to: Path | None, force: bool, plot: Path | None) -> None:
    """Find out before the long work whether its results can be kept.

    Raises:
        EditError: a folder exists or cannot be written, both are the same, or the picture cannot be drawn.
    """
    for folder in filter(None, (out, export_to)):
        check_free(folder, force)
    if out is not None and export_to is not None and out.absolute() == export_to.absolute():
        raise EditError(f"{out}: --out and --export are the same folder; name two")
    if plot is not None:
        plots.check_plot(plot)


def save(editable: Editable, edit: Edit, out: Path | None, export_to: Path | None, force: bool) -> None:
    """Write what was asked for; first the checkpoint, which may be refused."""
    if export_to is not None:
        ffedit.export(editable, edit, export_to, force)
    if out is not None:
        edit.save(out, force)


def next_step(fact: Fact, out: Path | None, export_to: Path | None) -> RenderableType:
    """What to type next."""
    if export_to is not None:
        return render.next_steps([shlex.join(["ffedit", "ask", fact.text, "--model", str(export_to)])])
    if out is not None:
        ask = ["ffedit", "ask", fact.text, "--edit", str(out)]
        return render.next_steps([shlex.join(ask), shlex.join(["ffedit", "export", str(out), "--out", "DIR"])])
    return Text("Nothing was saved: keep the edit with --out DIR, or the edited model with --export DIR.")


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
