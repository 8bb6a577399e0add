"""`ffedit apply`: locate, edit, measure, and write the requested results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import rich_click as click

import ffedit
from ffedit.cli import options
from ffedit.cli.destinations import Destinations
from ffedit.editor.names import method_names
from ffedit.facts.fact import Fact, FactToken, by_subject
from ffedit.safety.require import Requirement, not_taken, parse_requirements, unmet


@click.command()
@options.output_options
@options.fact_options
@options.asking_options
@click.option("--layers", "--layer", default="auto", help="auto (the usual), trace (the facts'), sweep, N, or A-B.")
@click.option(
    "--fact-token", default="subject_last", type=click.Choice(get_args(FactToken)), help="Where the key is read."
)
@click.option("--method", default="memit", type=click.Choice(method_names()), help="See `methods`.")
@options.solving_options
@click.option("--out", type=options.FILE, help="Save the edit in this folder.")
@click.option("--save-recipe", type=options.FILE, help="Write the recipe of this edit, a YAML file for `ffedit run`.")
@click.option("--export", "export_to", type=options.FILE, help="Save the edited model in this folder, or FILE.gguf.")
@options.PUSH
@click.option("--force", is_flag=True, help="Replace folders that are there; save also an edit that did not take.")
@click.option("--plot", type=options.FILE, help="Draw the trace (of several facts, the average) as PNG, SVG or PDF.")
@click.option(
    "--require",
    default="",
    show_default=False,
    callback=lambda context, option, text: parse_requirements(text),
    help='Conditions on the scores after: "efficacy>=0.95,specificity>=0.9".',
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, how long it takes, and edit nothing.")
@click.option("--strict", is_flag=True, help="Refuse an edit that breaks a guardrail, instead of warning.")
@options.html_option
def apply(
    facts: list[Fact],
    load_model: options.LoadModel,
    layers: str,
    fact_token: FactToken,
    method: str,
    spread: int,
    solving: options.Solving,
    require: Sequence[Requirement],
    strict: bool,
    dry_run: bool,
    surface: options.Surface,
    html: Path | None,
    **paths: Any,
) -> None:
    """Write the facts of FACTS (a file in any known format, a data set, or -) into a model."""
    destinations = Destinations(json_to=surface.json_to, html=html, **paths)
    destinations.check()
    text = solving.text(len(by_subject(facts)))
    config = solving.config(method)
    config = replace(config, key=replace(config.key, fact_token=fact_token))

    from ffedit.benchmark.estimate import estimate
    from ffedit.cli import result
    from ffedit.display.terminal.heat_map import heat_map
    from ffedit.display.terminal.layer_choice import why_layer
    from ffedit.display.terminal.messages import packing
    from ffedit.display.terminal.plan import plan
    from ffedit.display.terminal.scores import before_after, verdict_view, what_it_says
    from ffedit.editor.edit import applied_edits
    from ffedit.evaluator import METRICS, questions
    from ffedit.layer_choice import choose
    from ffedit.safety.guardrails import breaches, refusal, warnings

    ends, group = {"start": perf_counter()}, options.join(surface)
    editable = load_model()
    destinations.check_model(editable)
    allowed = options.parse_layers(layers, len(editable.layers))
    questions(editable, facts, facts)  # a fact that cannot be asked should fail now and not after the long computation
    stats = solving.stats(text, editable)
    ends["load"] = perf_counter()
    if dry_run:
        group.disband()
        layer = choose.known_layer(editable, facts, layers, allowed, method, config)
        to_read = text if stats is text else None
        planned = estimate(editable, facts, method, layer, layers, spread, config, to_read)
        surface.show(plan(planned, destinations.words()))
        return surface.write_json({"model": editable.name, "estimate": planned.to_dict()})
    with surface.progress() as progress:
        choices: list[choose.Found] = []

        def find_layer() -> int:
            choices.append(choose.find_layer(editable, facts, layers, allowed, method, config, stats, progress))
            surface.show(heat_map(choices[0].traces, choices[0].layer), why_layer(choices[0], layers))
            return choices[0].layer

        written = choose.spread_below(group.by_first(find_layer), spread)
        ends["locate"] = perf_counter()
        edit = ffedit.edit(editable, facts, method, written, config, stats, applied_edits(editable), progress, group)
        ends["edit"] = perf_counter()
        measured = destinations.to_measure(editable, edit)
        full = any(METRICS[requirement.name].full for requirement in require)
        report = ffedit.evaluate(editable, facts, measured, progress, full=full, process_group=group)
        ends["evaluate"] = perf_counter()
    group.disband()
    if not group.first:
        return
    (choice,) = choices
    broken = breaches(editable, edit, report)
    edit = replace(measured, updates=edit.updates).scored(report)
    edit = edit.noted(warnings=[breach.words for breach in broken], inputs=solving.inputs)
    verdict = verdict_view(report, edit, editable)
    surface.show(packing(measured), before_after(report), what_it_says(report), verdict, warnings(broken))
    failure = unmet(require, report.after or report.before) or (refusal(broken) if strict else None)
    failure = failure or (None if destinations.force else not_taken(report.verdict))
    saved = {"edit": destinations.out, "checkpoint": destinations.export_to} if failure is None else {}
    applied = result.applied(editable, edit, choice, report, ends, saved, layers)
    with surface.json_ready(applied), destinations.pictures_ready(applied, choice):
        if failure is None:
            destinations.save(editable, edit)
    if failure is not None:
        raise failure
    surface.show(
        options.pushed(destinations.export_to, destinations.hub), destinations.next_step(facts[0], editable.chat)
    )
