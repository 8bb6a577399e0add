"""Editing methods, one file each, those of other packages (entry points `ffedit.methods`), and all their numbers.

A number is set by its dotted name, whether common or a method's own: `value.steps`, `memit.ridge`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ffedit.editor.config import EditConfig, dotted
from ffedit.editor.job import Method as Method
from ffedit.editor.methods.alphaedit import ALPHAEDIT
from ffedit.editor.methods.emmet import EMMET
from ffedit.editor.methods.finetune import FT, FT_L
from ffedit.editor.methods.memit import MEMIT
from ffedit.editor.methods.rome import ROME
from ffedit.editor.names import GROUP
from ffedit.errors import EditError, choices
from ffedit.files.entry_points import Registry


def _added(point: str, package: str, loaded: object) -> Method:
    """Check what an entry point of another package holds."""
    if not isinstance(loaded, Method):
        raise EditError(f"{type(loaded).__name__} was found; an ffedit.Method was expected")
    if loaded.name != point:
        raise EditError(f"the entry point is called {point!r}, its method {loaded.name!r}; the same name was expected")
    return replace(loaded, package=package)


METHODS = Registry(GROUP, (ROME, EMMET, MEMIT, ALPHAEDIT, FT, FT_L), _added)


def add_method(method: Method) -> None:
    """Make a method known by its name in this process, as an entry point `ffedit.methods` does in every process.

    Adding a method again under the same name replaces it, so that a cell of a notebook can be run twice.

    Raises:
        EditError: it is not a `Method`.
        FFEditError: ffedit, or an installed package, has a method of this name.
    """
    EditError.require(method, Method, "an ffedit.Method was expected")
    METHODS.add(replace(method, package="this process"))


def check_method(name: str) -> Method:
    """Return the method of this name; EditError if there is none."""
    if name not in METHODS:
        broken = "".join(f"; {point} could not be loaded: {why}" for point, why in METHODS.broken.items())
        raise EditError(f"method {name!r} is not known; known are {choices(name, METHODS)}{broken}")
    return METHODS[name]


def check_config(config: object) -> None:
    """Refuse anything but an `EditConfig`, and numbers of an unknown method; EditError."""
    EditError.require(config, EditConfig, "an EditConfig was expected: ffedit.EditConfig(seed=1)")
    assert isinstance(config, EditConfig)
    for name in config.methods:
        check_method(name)


def preset(name: str, method: str) -> EditConfig:
    """Return the numbers of a preset: "default", or what was published, as far as it holds on other models."""
    presets = {"default": EditConfig(), **check_method(method).presets}
    if name not in presets:
        raise EditError(f"{method} has no preset {name!r}; it has {', '.join(presets)}")
    return presets[name]


def _with_all_methods(config: EditConfig) -> EditConfig:
    """Return `config` with the numbers of every method, by default or as set."""
    records = {name: config.of(name, method.numbers) for name, method in METHODS.items() if method.numbers is not None}
    return replace(config, methods=records)


def set_number(config: EditConfig, name: str, value: Any) -> EditConfig:
    """Return `config` with another value of the number `name`; a list stands for a tuple, as in JSON.

    EditError where there is no such number, or the value is of another type or has no meaning.
    """
    whole = _with_all_methods(config)
    numbers = dotted(whole.to_dict())
    if name not in numbers:
        raise EditError(f"{name} is not a setting; the settings are {', '.join(numbers)}")
    kind = type(numbers[name])
    value = tuple(value) if isinstance(value, list) else value
    if kind is str and type(value) is int:  # a word that is a number (key.fact_token=-2)
        value = str(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise EditError(f"{name}: {value!r} is of type {type(value).__name__}, expected {kind.__name__}")
    record, _, field = name.rpartition(".")
    change = {field: kind(value)}
    if not record:
        return replace(config, **change)
    if record in METHODS:
        return replace(config, methods={**config.methods, record: replace(whole.methods[record], **change)})
    return replace(config, **{record: replace(getattr(config, record), **change)})


def set_numbers(config: EditConfig, settings: Iterable[str]) -> EditConfig:
    """Return `config` with other numbers, each NAME=VALUE, where VALUE is a word or JSON; errors as in `set_number`."""
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # no JSON: a word
            value = text
        config = set_number(config, name, value)
    return config


def config_from_dict(numbers: Mapping[str, Any]) -> EditConfig:
    """Read what `EditConfig.to_dict` returned, also after a round trip through JSON; unknown numbers are left out."""
    config = EditConfig()
    settings = dotted(_with_all_methods(config).to_dict())
    for name, value in dotted(numbers).items():
        if name in settings:
            config = set_number(config, name, value)
    return config
