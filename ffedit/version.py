"""Version of ffedit, and the names of its API that this version changed.

An old name works for one release and warns with the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import ParamSpec, TypeVar

from ffedit.errors import warn_renamed

# Version of the tag from which ffedit was installed, and the commits since then.
__version__ = version("ffedit")

P = ParamSpec("P")
R = TypeVar("R")

# Names of the package `ffedit` that this version changed, old to new.
RENAMED = {
    "Choice": "LayerChoice",
    "Slot": "MemoryIndex",
    "stats": "collect_stats",
}


def renamed_options(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function accept options by their old names as well: `@renamed_options(after="preserve")`."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            for old in new_names.keys() & options.keys():
                new = new_names[old]
                warn_renamed(f"{function.__name__}({old}=…)", f"{new}=…")
                if new in options:
                    raise TypeError(f"{function.__name__} got both {new} and its old name {old}")
                options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return wrap
