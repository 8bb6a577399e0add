"""`ffedit apply`: locate, edit, measure, and write the requested results (`ffedit.cli.work.applying`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from ffedit.cli import options, work
from ffedit.cli.destinations import Destinations
from ffedit.cli.fact_options import fact_options
from ffedit.cli.surface import Surface
from ffedit.editor.names import method_names


@click.command()
@options.output_options
@fact_options
@options.asking_options
@options.layers_option("auto (published or default), trace (where the facts are recalled), N, or A-B.")
@click.option(
    "--fact-token",
    default="subject_last",
    help="Token of the key: subject_last, subject_first, last, a number (-2: the subject's last but one), or a word.",
)
@click.option(
    "--method",
    default="memit",
    type=click.Choice(method_names()),
    help="Method of editing; `ffedit methods` explains each.",
)
@options.solving_options
@click.option("--out", type=options.FILE, help="Save the edit in this folder.")
@click.option(
    "--save-recipe",
    type=options.FILE,
    callback=options.written_file,
    help="Write the recipe of this edit, a YAML file for `ffedit run`.",
)
@click.option("--export", "export_to", type=options.FILE, help="Save the edited model in this folder, or FILE.gguf.")
@click.option("--force", is_flag=True, help="Replace existing folders, and save an edit even if it did not take.")
@click.option("--plot", type=options.FILE, help="Draw the trace, or the average of several, as PNG, SVG or PDF.")
@options.REQUIRE
@click.option("--dry-run", is_flag=True, help="Show the facts as they are read and the steps, and edit nothing.")
@click.option("--strict", is_flag=True, help="Refuse an edit that breaks a guardrail; the default is to warn.")
@options.html_option
def apply(solving: options.Solving, surface: Surface, html: Path | None, **kwargs: Any) -> None:
    """Write the facts of FACTS (files of any shape, a data set, or -) into a model."""
    paths = {name: kwargs.pop(name) for name in ("out", "save_recipe", "export_to", "force", "plot")}
    destinations = Destinations(json_to=surface.json_to, html=html, **paths)
    destinations.check()
    work.apply(surface=surface, destinations=destinations, solving=solving, **kwargs)
