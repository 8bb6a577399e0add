"""Set numbers of an edit by their dotted names, those of every method included: `value.steps`, `memit.ridge`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ffedit.editor.config import EditConfig, dotted
from ffedit.editor.methods import METHODS
from ffedit.errors import EditError


def all_numbers(config: EditConfig) -> dict[str, Any]:
    """Return every number of `config` by its dotted name, with those of all methods."""
    return dotted(_with_all_methods(config).to_dict())


def _with_all_methods(config: EditConfig) -> EditConfig:
    records = {name: config.of(name, method.numbers) for name, method in METHODS.items() if method.numbers is not None}
    return replace(config, methods=records)


def set_number(config: EditConfig, name: str, value: Any) -> EditConfig:
    """Return `config` with another value of the number `name`; a list stands for a tuple, as in JSON.

    Raises:
        EditError: there is no such number, or the value is of another type or has no meaning.
    """
    known = all_numbers(config)
    if name not in known:
        raise EditError(f"{name}: there is no such number; there is {', '.join(known)}")
    kind = type(known[name])
    value = tuple(value) if isinstance(value, list) else value
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise EditError(f"{name}: {value!r} is of type {type(value).__name__}, expected {kind.__name__}")
    record, _, field = name.rpartition(".")
    change = {field: kind(value)}
    if not record:
        return replace(config, **change)
    if record in METHODS:
        numbers = _with_all_methods(config).methods[record]
        return replace(config, methods={**config.methods, record: replace(numbers, **change)})
    return replace(config, **{record: replace(getattr(config, record), **change)})


def set_numbers(config: EditConfig, settings: Iterable[str]) -> EditConfig:
    """Return `config` with other numbers, each NAME=VALUE, where VALUE is a word or JSON: "value.optimizer=adam".

    Raises:
        EditError: as `set_number`.
    """
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        config = set_number(config, name, value)
    return config


def config_from_dict(numbers: Mapping[str, Any]) -> EditConfig:
    """Read what `EditConfig.to_dict` made, also by way of JSON; numbers that are not known are left out."""
    config = EditConfig()
    known = all_numbers(config)
    for name, value in dotted(numbers).items():
        if name in known:
            config = set_number(config, name, value)
    return config
