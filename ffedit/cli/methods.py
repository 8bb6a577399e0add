"""`ffedit methods`: what can write facts, and when to choose which."""

from __future__ import annotations

import rich_click as click
from rich.table import Column, Table

from ffedit.cli.options import Surface, output_options
from ffedit.evaluator.metrics import METRICS


@click.command()
@output_options
def methods(surface: Surface) -> None:
    """List the methods, with the problem that each solves and when to choose it."""
    from ffedit.editor.methods import METHODS

    columns = ("solves", "choose it for", "source", "from")
    table = Table(Column("method", no_wrap=True), *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for method in METHODS.values():
        table.add_row(method.name, method.solves, method.choose, method.source, method.package)
    surface.show(table)
    broken = {**METHODS.broken, **METRICS.broken}
    for point, why in broken.items():
        surface.note(f"{point} could not be loaded: {why}")
    fields = ("name", "solves", "choose", "source", "package")
    rows = [{field: getattr(method, field) for field in fields} for method in METHODS.values()]
    surface.write_json({"methods": rows, "broken": broken})
