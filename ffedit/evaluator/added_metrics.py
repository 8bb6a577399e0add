"""Metrics of other packages: entry points of the group `ffedit.metrics`, whose names are the scores' names.

Each is a function of one fact's questions, of what the model answers now and of what it answered before the edit; it
returns a number, or None where nothing was there to measure. It reads answers and never runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from ffedit.errors import FFEditError
from ffedit.files.entry_points import load_entry_points

GROUP = "ffedit.metrics"
# (questions, responses now, responses before) -> score. `Any`, since these types stand above this module.
Metric: TypeAlias = Callable[[Any, Any, Any], float | None]


@cache
def _found() -> tuple[dict[str, Metric], dict[str, str]]:
    def check(name: str, package: str, found: object) -> Metric:
        if not callable(found):
            raise FFEditError(f"{type(found).__name__} was found; a function was expected")
        if not name.isidentifier():
            raise FFEditError(f"{name!r} is no name of a score; letters, digits and _ were expected")
        return found

    return load_entry_points(GROUP, check)


def added_metrics() -> Mapping[str, Metric]:
    """Return the metrics of other packages by the name of the score."""
    return _found()[0]


def broken_metrics() -> Mapping[str, str]:
    """Return, by entry point, why it added no metric."""
    return _found()[1]
