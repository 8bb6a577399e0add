"""`ffedit doctor`: the environment, and the parts of a model that can be edited."""

from __future__ import annotations

from typing import Any

import rich_click as click
from click import get_current_context

from ffedit.cli import work
from ffedit.cli.options import model_options, output_options


@click.command()
@output_options
@click.argument("name", required=False, metavar="[MODEL]")
@model_options
def doctor(name: str | None, **given: Any) -> None:
    """Show versions, devices, the cache, and the editable parts of MODEL."""
    context = get_current_context()
    if name is not None:  # an alternative to --model
        if context.params["model"] is not None:
            raise click.UsageError("give the model once: MODEL or --model")
        context.forward(doctor, name=None, model=name)
        return
    work.doctor(**given)
