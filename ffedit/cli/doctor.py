"""`ffedit doctor`: the environment, and the parts of a model that can be edited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import ModelOptions, model_options, output_options
from ffedit.loading.names import check_name


@click.command()
@output_options
@click.argument("name", required=False, metavar="[MODEL]")
@model_options
def doctor(name: str | None, model: ModelOptions, **kwargs: Any) -> None:
    """Show versions, devices, the cache, and the editable parts of MODEL."""
    if name is not None:  # an alternative to --model
        if model.name is not None:
            raise click.UsageError("give the model once: MODEL or --model")
        check_name(name)
        model = replace(model, name=name)
    work.doctor(model=model, **kwargs)
