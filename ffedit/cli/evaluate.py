"""`ffedit evaluate`: scores of facts on a model, before and after an edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from ffedit.cli import options, work
from ffedit.cli.fact_options import fact_options
from ffedit.loading.names import check_name


@click.command()
@options.output_options
@fact_options
@options.asking_options
@options.edit_option("Measure before and after this edit.")
@click.option("--edited", help="Compare with this checkpoint, edited by any tool: hub id or folder.")
@options.TEXT
@click.option("--explain", is_flag=True, help="Explain each wrong answer of --edit: did its key or its value fail?")
@options.html_option
def evaluate(edit_from: Path | None, edited: str | None, explain: bool, **kwargs: Any) -> None:
    """Score the facts of FACTS (files of any shape, a data set, or -) on a model."""
    if edit_from is not None and edited is not None:
        raise click.UsageError("give either --edit or --edited")
    if explain and edit_from is None:
        raise click.UsageError("--explain takes an edit apart; give it with --edit")
    if edited is not None:
        check_name(edited)
    work.evaluate(edit_from=edit_from, edited=edited, explain=explain, **kwargs)
