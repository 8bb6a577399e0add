"""`ffedit bench`: comparison of editing methods on one model and one data set."""

from __future__ import annotations

from typing import Any

import rich_click as click

from ffedit.cli import options, work
from ffedit.cli.fact_options import reading_options
from ffedit.editor.names import check_method_name, method_names


@click.command()
@options.output_options
@click.argument("sources", nargs=-1, required=True, metavar="FACTS...")
@reading_options
@click.option("--methods", default=",".join(method_names()), help="Methods to compare, separated by commas.")
@click.option("--mode", default="single", help="single (facts one by one), batch:N or sequential[:N].")
@click.option(
    "--out",
    type=options.FILE,
    required=True,
    metavar="DIR",
    help="Folder for the results; a run there is resumed.",
)
@click.option("--limit", type=options.COUNT, help="Number of facts to use, from the first on.")
@click.option("--where", metavar="NAME=VALUE", help="Use only records in which this field has this value.")
@options.layers_option("auto, or one layer (4).")
@options.solving_options
@options.TEXT
@click.option("--full/--no-full", default=True, help="Also measure sampled text, which takes longest.")
@click.option("--force", is_flag=True, help="Replace the results of another run.")
@options.asking_options
@options.html_option
def bench(methods: str, **kwargs: Any) -> None:
    """Write the facts of FACTS into a model by several methods, and measure each before and after."""
    names = [check_method_name(name.strip()) for name in methods.split(",")]
    work.bench(methods=names, **kwargs)
