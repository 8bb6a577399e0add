"""`ffedit methods`: what can write facts, and when to choose which."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Column, Table

from ffedit.editor import METHODS
from ffedit.evaluator.metrics import METRICS


@click.command()
def methods() -> None:
    """List the methods: what each solves, and when to choose it."""
    columns = ("solves", "choose it for", "source", "from")
    table = Table(Column("method", no_wrap=True), *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for method in METHODS.values():
        table.add_row(method.name, method.solves, method.choose, method.source, method.package)
    Console(highlight=False).print(table)
    for point, why in {**METHODS.broken, **METRICS.broken}.items():
        click.echo(f"{point} could not be loaded: {why}", err=True)
