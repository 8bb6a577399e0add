"""Registries: objects of ffedit by name, and those that other packages offer by entry points.

An entry point that cannot be loaded is left out and named in `Registry.broken`, so that the rest works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from ffedit.errors import FFEditError, brief


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...


T = TypeVar("T", bound=_Named)


class Registry(Mapping[str, T]):
    """Objects by name; entry points are loaded when a name is first asked for, since their packages import ffedit.

    They are ffedit's `own`, and those that `read` makes from the entry points of `group`: from the name, the package
    and the loaded object of each. `read` raises where that object is not of the expected kind.
    """

    def __init__(self, group: str, own: Iterable[T], read: Callable[[str, str, Any], T]) -> None:
        self._group, self._own, self._read = group, {item.name: item for item in own}, read
        self._here: dict[str, T] = {}

    @cached_property
    def _loaded(self) -> tuple[dict[str, T], dict[str, str]]:
        items, broken = dict(self._own), {}
        for point in entry_points(group=self._group):
            package = point.dist.name if point.dist is not None else point.value
            try:
                item = self._read(point.name, package, point.load())
                if item.name in items:
                    raise FFEditError(f"there is {item.name!r} already, of {items[item.name].package}")
                items[item.name] = item
            except Exception as error:  # any error of another package is reported, in one line
                broken[f"{point.name} ({package})"] = brief(error)
        return items, broken

    @property
    def broken(self) -> Mapping[str, str]:
        """Reason why an entry point added nothing, by "name (package)"."""
        return self._loaded[1]

    def add(self, item: T) -> None:
        """Add an object for as long as this process lives, in place of one that was added before under its name.

        Raises:
            FFEditError: ffedit, or an installed package, has an object of this name.
        """
        if (existing := self._loaded[0].get(item.name)) is not None:
            raise FFEditError(f"there is {item.name!r} already, of {existing.package}; choose another name")
        self._here[item.name] = item

    def __getitem__(self, name: str) -> T:
        return self._here[name] if name in self._here else self._loaded[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._loaded[0], *self._here))

    def __len__(self) -> int:
        return len(self._loaded[0]) + len(self._here)
