"""`ffedit apply`: locate, edit, measure, and write the requested results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

import ffedit
from ffedit.cli import result
from ffedit.cli.clock import Clock
from ffedit.cli.destinations import Destinations
from ffedit.cli.options import FILE, SEED, Surface, asking_options, fact_options, output_options, parse_layers
from ffedit.display.terminal import render
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.editor import METHODS, applied_edits, by_subject, preset, preset_names, tokens_for
from ffedit.evaluator import FULL
from ffedit.evaluator.prompts import questions
from ffedit.facts.fact import Fact
from ffedit.layer_choice import choose
from ffedit.model.editable import Editable
from ffedit.model.tokenization import FactToken
from ffedit.safety.guardrails import breaches, refusal, warnings
from ffedit.safety.require import parse_requirements, unmet
from ffedit.safety.verdict import verdict


@click.command()
@fact_options
@asking_options
@click.option(
    "--layers",
    "--layer",
    default="auto",
    show_default=True,
    help="auto (the model's), trace (the facts'), sweep, N, or A-B.",
)
@click.option(
    "--fact-token",
    default="subject_last",
    show_default=True,
    type=click.Choice(get_args(FactToken)),
    help="Where the key is read.",
)
@click.option("--spread", default=1, show_default=True, type=click.IntRange(1), help="Layers that share the work.")
@click.option("--method", default="memit", show_default=True, type=click.Choice(list(METHODS)), help="See `methods`.")
@click.option(
    "--preset",
    "numbers",
    default="default",
    show_default=True,
    type=click.Choice(preset_names()),
    help="paper: the numbers for v* that were published with the method.",
)
@click.option("--corpus", help="Text or dataset for the key statistics.  [default: what ships, or sampled]")
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
    fact_token: FactToken,
    spread: int,
    method: str,
    numbers: str,
    corpus: str | None,
    stats_from: Path | None,
    require: str,
    strict: bool,
    seed: int,
    surface: Surface,
    **places: Any,
) -> None:
    """Write the facts of FACTS (a file in any known format, a data set, or -) into a model."""
    requirements, config = parse_requirements(require), preset(numbers, method)
    config = replace(config, seed=seed, key=replace(config.key, fact_token=fact_token))
    place = Destinations(**places, json_to=surface.json_to)
    text = ffedit.Corpus(corpus, tokens_for(len(by_subject(facts))), seed)
    in_full = any(requirement.name in FULL for requirement in requirements)
    place.check()
    text.check()
    clock, editable = Clock(), load_model()
    allowed = parse_layers(layers, len(editable.layers))
    questions(editable, facts, facts)  # a fact that cannot be asked should fail now and not after the long computation
    stats = ffedit.load_stats(stats_from, editable) if stats_from is not None else text
    clock.lap("load")
    surface.show(render.model_line(editable))
    with progress_bars(surface.quiet) as progress:
        found = choose.find_layer(editable, facts, layers, allowed, method, config, stats, progress)
        clock.lap("locate")
        surface.show(render.heat_map(found.traces, found.layer), render.why_layer(found, layers))
        written = choose.spread_below(found.layer, spread)
        edit = ffedit.edit(editable, facts, method, written, config, stats, applied_edits(editable), progress)
        clock.lap("edit")
        report = ffedit.evaluate(editable, facts, edit, progress, full=in_full)
        clock.lap("evaluate")
    broken = breaches(editable, edit, report)
    edit = edit.scored(report).noted(warnings=[breach.words for breach in broken])
    surface.show(render.before_after(report), render.what_it_says(report), verdict(report, edit), warnings(broken))
    failure = unmet(requirements, report.after or report.before) or (refusal(broken) if strict else None)
    told = result.applied(editable, edit, found, report, clock.seconds)
    with surface.json_ready(told), place.plot_ready(found):
        if failure is None:
            place.save(editable, edit)
    if failure is not None:
        raise failure
    surface.show(place.next_step(facts[0], editable.chat))
