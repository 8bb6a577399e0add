"""Tables of records: parquet and arrow files, folders of them, and data sets of the hub, read with `datasets`.

A table is named by its path, or as owner/name on the hub, optionally with the path of one file in it; #configuration
and :split may follow. A path that exists always wins. The package `datasets` is an extra: it is imported when
the first table is read, and it runs no code that comes with a data set.

A column belongs to every row, so a field that a record does not have is null in a table. The nulls are removed.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffedit.errors import FactError

NAME = re.compile(r"(?P<path>.+?)(#(?P<configuration>[\w.-]+))?(:(?P<split>[\w.-]+))?", re.DOTALL)
HUB = re.compile(r"(?P<set>\w[\w.-]*/\w[\w.-]*)(/(?P<file>[\w./-]+))?")
FILES = {".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Table:
    """Named table, not read yet; `path` is a path or a name on the hub."""

    name: str
    path: str
    configuration: str | None = None
    split: str | None = None

    def records(self) -> list[dict[str, Any]]:
        """Return all rows, without their nulls. Raises FactError, one line, where they cannot be read."""
        try:
            import datasets
        except ImportError as error:
            raise FactError(f"{self.name}: to read it, pip install 'ffedit[datasets]'") from error
        with _explained(self):
            splits = self._splits(datasets)
        only = next(iter(splits)) if len(splits) == 1 else ""
        if (split := self.split or only) not in splits:
            raise FactError(f"{self.name}: the splits are {', '.join(splits)}; add one behind a colon")
        with _explained(self):
            rows = [_without_nulls(row) for row in splits[split]]
        if not rows:
            raise FactError(f"{self.name} holds no facts; expected at least one record")
        return rows

    def _splits(self, datasets: Any) -> Mapping[str, Any]:
        """Return the rows of each split, as `datasets` gives them. Local files are streamed: no second copy is made."""
        path = Path(self.path)
        if path.is_file():
            return dict(datasets.load_dataset(FILES[path.suffix], data_files=glob.escape(self.path), streaming=True))
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(self.path)
            return saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        if path.is_dir():
            return dict(datasets.load_dataset(os.path.abspath(path), self.configuration, streaming=True))
        hub = HUB.fullmatch(self.path)
        assert hub is not None
        return dict(datasets.load_dataset(hub["set"], self.configuration, data_files=hub["file"]))


def find(name: str) -> Table | None:
    """Return the table that `name` names; None for a file of JSON, standard input, or a path that does not exist.

    Raises:
        FactError: a folder without tables.
    """
    match = NAME.fullmatch(name)
    if name == "-" or match is None:
        return None
    table = Table(name, name) if os.path.exists(name) else Table(name, **match.groupdict())
    path = Path(table.path)
    if path.is_dir():
        if not any(file.suffix in FILES for file in path.rglob("*")):
            raise FactError(f"{name} is a folder; expected a file of facts, or a folder of parquet or arrow files")
        return table
    if path.exists():
        return table if path.suffix in FILES else None
    hub = HUB.fullmatch(table.path)
    # A name that ends as a file does, or lies in an existing folder, is a missing file.
    missing = hub is None or (path.suffix[1:].isalpha() if hub["file"] is None else Path(path.parts[0]).exists())
    return None if missing else table


@contextmanager
def _explained(table: Table) -> Iterator[None]:
    """Raise one-line errors for failures of `datasets`, the hub or the network, and silence their own logs."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # the errors that `datasets` and the hub raise have no common class
        why = " ".join(str(error).split())[:200] or type(error).__name__
        if Path(table.path).exists():
            raise FactError(f"{table.name} is no table that can be read: {why}") from error
        raise FactError(
            f"{table.name}: no such path, and not to be had as a data set of the hub ({why}); "
            "download a file of it and give that"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value if inner is not None] if isinstance(value, list) else value
