"""Load the model of a command with its options."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers

import ffedit
from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.display.terminal.model_table import model_line
from ffedit.editor.edit import Edit
from ffedit.errors import EditError, ModelError
from ffedit.loading.names import NAMED
from ffedit.model.editable import Editable


def load_model(model: ModelOptions, surface: Surface, edit: Edit | None = None, *, show: bool = True) -> Editable:
    """Load the model that the options name, or the base of `edit`, or the default; `show` it in a line."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    with surface.progress() as progress, base_of(edit, model.name) as name:
        loaded = ffedit.load(name, **model.loading, progress=progress)
    if show:
        surface.show(model_line(loaded))
    return loaded


def load_edited(
    edit_from: Path | None, model: ModelOptions, surface: Surface, *, show: bool = True
) -> tuple[Edit | None, Editable]:
    """Load the edit of a folder, if one is named, and its model; the edit is not applied."""
    edit = None if edit_from is None else ffedit.Edit.load(edit_from)
    return edit, load_model(model, surface, edit, show=show)


@contextmanager
def base_of(edit: Edit | None, model: str | None) -> Iterator[str]:
    """Yield the name of the model to load: `model`, or else the base of `edit`; an error says how to name the base."""
    if model is None and edit is not None and "model" not in edit.provenance:
        raise EditError("the edit does not name its model; name its base with --model")
    name = model or ("atlas" if edit is None else edit.provenance["model"])
    try:
        yield name
    except ModelError as error:
        if model is not None or name in NAMED or Path(name).exists():
            raise
        raise ModelError(f"{error} (the edit calls its base {name}; name the base with --model)") from error
