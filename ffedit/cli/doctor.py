"""`ffedit doctor`: the environment, and the parts of a model that can be edited."""

from __future__ import annotations

from collections.abc import Callable

import click

from ffedit.cli.options import Surface, model_options
from ffedit.display.terminal.model_table import environment, memory_table, model_line
from ffedit.model.editable import Editable


@click.command()
@click.argument("name", required=False, metavar="[MODEL]")
@model_options
def doctor(name: str | None, load_model: Callable[..., Editable]) -> None:
    """Show versions, devices, the cache, and the anatomy of MODEL."""
    context = click.get_current_context()
    if name is not None:  # an alternative to --model
        if context.params["model"] is not None:
            raise click.UsageError("give the model once: MODEL or --model")
        context.forward(doctor, name=None, model=name)
        return
    surface = Surface()
    surface.show(environment())
    editable = load_model()
    surface.show(model_line(editable), memory_table(editable))
