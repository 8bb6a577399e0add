"""The model of a command, loaded with its options, and the processes that the command was started in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import transformers

import ffedit
from ffedit.cli.options import Surface
from ffedit.cli.stages import timed_stages
from ffedit.display.terminal.model_table import model_line
from ffedit.editor.edit import Edit
from ffedit.errors import EditError, ModelError
from ffedit.loading.distributed import ProcessGroup, left_alone, process_group
from ffedit.loading.names import NAMED
from ffedit.model.editable import Editable

__all__ = ["STARTED_ALONE", "LoadModel", "base_of", "join", "load_model", "timed_stages"]

STARTED_ALONE = (
    "accelerate started one process; it starts several, on CPUs too, with --multi_gpu: "
    "accelerate launch --multi_gpu --num_processes N -m ffedit …"
)
# Loads a model, with the options of `options.model_options`: the base of an edit if one is passed.
LoadModel: TypeAlias = Callable[..., Editable]


def load_model(
    surface: Surface,
    model: str | None,
    options: Mapping[str, Any],
    edit: Edit | None = None,
    *,
    other: str | None = None,
    by: Callable[..., Any] | None = None,
    show: bool = True,
) -> Any:
    """Load `model`, or without one the base of `edit`, or the default; show it in a line unless `show` is False.

    It can also load an `other` model with the same options, and use another function `by` than `ffedit.load`.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    load = by or ffedit.load
    with surface.progress() as progress:
        if other is not None:
            return load(other, **{**options, "revision": None}, progress=progress)
        with base_of(edit, model) as name:
            loaded = load(name, **options, progress=progress)
    if show:
        surface.show(model_line(loaded))
    return loaded


@contextmanager
def base_of(edit: Edit | None, model: str | None) -> Iterator[str]:
    """Yield the name of the model to load: `model`, or else the base of `edit`; an error says how to name the base."""
    if model is None and edit is not None and "model" not in edit.provenance:
        raise EditError("the edit does not say which model it is of; name its base with --model")
    name = model or ("atlas" if edit is None else edit.provenance["model"])
    try:
        yield name
    except ModelError as error:
        if model is not None or name in NAMED or Path(name).exists():
            raise
        raise ModelError(f"{error} (the edit calls its base {name}; name the base with --model)") from error


def join(surface: Surface) -> ProcessGroup:
    """Return the processes that `accelerate launch` started this command in; it says so where it started only one."""
    if left_alone():
        surface.note(STARTED_ALONE)
    return process_group()
