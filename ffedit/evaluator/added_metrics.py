"""Metrics of other packages: entry points of the group `ffedit.metrics`, whose names are the scores' names.

Each is a function of one fact's questions, of what the model answers now and of what it answered before the edit; it
returns a number, or None where nothing was there to measure. It reads answers and never runs the model. No name of
ffedit's own scores can be taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from ffedit.errors import EditError, FFEditError, brief
from ffedit.files.entry_points import load_entry_points

GROUP = "ffedit.metrics"
# Names that `Scores` has already; filled where it is defined, since it stands above this module.
RESERVED: set[str] = set()
# (questions, responses now, responses before) -> score. `Any`, since these types stand above this module.
Metric: TypeAlias = Callable[[Any, Any, Any], float | None]


@cache
def _found() -> tuple[dict[str, Metric], dict[str, str]]:
    def check(name: str, package: str, found: object) -> Metric:
        if not callable(found):
            raise FFEditError(f"{type(found).__name__} was found; a function was expected")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in RESERVED:
            raise FFEditError(f"{name!r} is no free name of a score; small letters, digits and _ were expected")
        return found

    return load_entry_points(GROUP, check)


def added_metrics() -> Mapping[str, Metric]:
    """Return the metrics of other packages by the name of the score."""
    return _found()[0]


def broken_metrics() -> Mapping[str, str]:
    """Return, by entry point, why it added no metric."""
    return _found()[1]


def added_scores(questions: Any, now: Any, before: Any) -> dict[str, float | None]:
    """Return the scores of one fact by the metrics of other packages.

    Raises:
        EditError: a metric failed, or gave no number.
    """
    found: dict[str, float | None] = {}
    for name, metric in added_metrics().items():
        try:
            value = metric(questions, now, before)
            found[name] = None if value is None else float(value)
        except Exception as error:  # whatever another package does wrong is said, in one line
            raise EditError(
                f"the metric {name!r} failed ({brief(error)}); uninstall its package, or mend it"
            ) from error
    return found
