"""`ffedit doctor`: the environment, and the parts of a model that can be edited."""

from __future__ import annotations

import rich_click as click
from click import get_current_context

from ffedit.cli.options import LoadModel, Surface, model_options, output_options


@click.command()
@output_options
@click.argument("name", required=False, metavar="[MODEL]")
@model_options
def doctor(name: str | None, load_model: LoadModel, surface: Surface) -> None:
    """Show versions, devices, the cache, and the anatomy of MODEL."""
    context = get_current_context()
    if name is not None:  # an alternative to --model
        if context.params["model"] is not None:
            raise click.UsageError("give the model once: MODEL or --model")
        context.forward(doctor, name=None, model=name)
        return

    from ffedit.cli import result
    from ffedit.display.terminal.model_table import environment, memory_table

    surface.show(environment())
    editable = load_model()
    surface.show(memory_table(editable))
    surface.write_json(result.examined(editable))
