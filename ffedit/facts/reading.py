"""From a file or data set of facts, in any known format, to checked facts.

A source is a file of JSON, standard input, or a table. A file is any number of JSON values, one after the other: one
object, one list, or JSON lines. A table is a parquet or arrow file, a folder of them, or a data set of the hub, read
with the package `datasets` (an extra, imported when the first table is read; it runs no code that comes with a data
set). Each record is read by its own shape (`formats.py`).

No record is skipped silently: `sift_facts` lists each record that cannot be used with its reason, and
`read_facts` refuses a source with such a record.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ffedit.errors import FactError, brief
from ffedit.facts.fact import Fact, as_protected, show
from ffedit.facts.formats import parse

# Number of unusable records that are listed one by one.
SHOWN = 5
# A table by its path or its name on the hub, then #configuration and :split; and the path of a file in a data set.
TABLE = re.compile(r"(?P<path>.+?)(#(?P<configuration>[\w.-]+))?(:(?P<split>[\w.-]+))?", re.DOTALL)
HUB = re.compile(r"(?P<set>\w[\w.-]*/\w[\w.-]*)(/(?P<file>[\w./-]+))?")
SUFFIXES = {".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Sifted:
    """Content of a source of facts. Records are numbered from 1.

    - `source`: its name, for messages; `records`: how many it has.
    - `facts`: those that can be used, in order.
    - `left_out`: (record, reason) for each record that cannot be used.
    - `notes`: (record, note) for each item of a used record that a fact cannot hold.
    """

    source: str
    records: int
    facts: tuple[Fact, ...]
    left_out: tuple[tuple[int, str], ...]
    notes: tuple[tuple[int, str], ...]

    def whole(self) -> list[Fact]:
        """Return all facts. Raises FactError, one line, where a record was left out."""
        if self.left_out:
            number, reason = self.left_out[0]
            more = f" ({len(self.left_out)} records of {self.records} cannot be used)"
            raise FactError(f"{self.source}, record {number}: {reason}{more if len(self.left_out) > 1 else ''}")
        return list(self.facts)

    def refused(self) -> list[str]:
        """Return one line for each record left out, with the reason; of many, the first few."""
        lines = [f"{self.source}, record {number}, is left out: {reason}" for number, reason in self.left_out[:SHOWN]]
        more = len(self.left_out) - SHOWN
        return [*lines, f"{self.source}: {more} more records are left out"] if more > 0 else lines

    def noted(self) -> list[str]:
        """Return the notes: equal ones in one line, with the number of records they are about."""
        counts = Counter(note for _, note in self.notes)
        return [f"{self.source}: {note} ({n} record{'s' if n > 1 else ''})" for note, n in counts.items()]


def read_facts(path: str | os.PathLike[str], stdin: IO[Any] | None = None, need_targets: bool = True) -> list[Fact]:
    """Read all facts of a file, of a data set, or of standard input where `path` is "-".

    Args:
        path: a file of JSON, a list or JSON lines; a .parquet or .arrow file; a folder that `datasets` wrote; or a
            data set of the hub as owner/name[/file][#configuration][:split]. A path that exists always wins.
        stdin: read instead of standard input.
        need_targets: False also takes records without a new object (tracing sets).

    Records that ask the same of the same subject with the same target become one fact with the probes of all; with
    different targets they contradict each other.

    Raises:
        FactError: one line, with the source and the first record that cannot be used.
    """
    return sift_facts(path, stdin, need_targets).whole()


def sift_facts(
    path: str | os.PathLike[str],
    stdin: IO[Any] | None = None,
    need_targets: bool = True,
    together: bool = True,
    where: tuple[str, str] | None = None,
) -> Sifted:
    """Read as `read_facts` does, but list the records that cannot be used instead of refusing the source.

    Facts that are `together` are for one model. Where each is edited alone, records that ask the same stay separate
    facts and may disagree, as some of CounterFact do. `where` is a field and its value, as text: only records that have
    it are read. They keep their numbers.

    Raises:
        FactError: there is no such source, it holds no records, or none that matches `where` and can be used.
    """
    name = "standard input" if os.fspath(path) == "-" else os.fspath(path)
    records = list(enumerate(load_records(path, stdin), 1))
    if where is not None:
        field, value = where
        records = [(n, r) for n, r in records if isinstance(r, Mapping) and field in r and str(r[field]) == value]
        if not records:
            raise FactError(f"{name}: no record has {field!r} of {value!r}; name a field of the data and its value")
    facts: list[tuple[int, Fact]] = []
    left_out: list[tuple[int, str]] = []
    notes: list[tuple[int, str]] = []
    for number, record in records:
        try:
            parsed = parse(record)
            if need_targets:
                _ = [fact.new_object for fact in parsed.facts]
        except FactError as error:
            left_out.append((number, str(error)))
            continue
        facts += [(number, fact) for fact in parsed.facts]
        notes += [(number, note) for note in parsed.notes]
    if together:
        facts = _merge_repeats(facts, left_out)
    facts = _with_own_ids(facts, left_out)
    sifted = Sifted(name, len(records), tuple(fact for _, fact in facts), tuple(sorted(left_out)), tuple(notes))
    if not facts:
        sifted.whole()  # raises the first reason
    return sifted


def load_records(path: str | os.PathLike[str], stdin: IO[Any] | None = None) -> list[Any]:
    """Read the records of a table, or the JSON values of a file or standard input ("-"); a list gives its items."""
    name = "standard input" if os.fspath(path) == "-" else os.fspath(path)
    if (table := find_table(os.fspath(path))) is not None:
        return table.records()
    text = _read_text(path, stdin, name)
    values, decoder, end = [], json.JSONDecoder(), 0
    try:
        while space := re.compile(r"[ \t\r\n]*(?=[^ \t\r\n])").match(text, end):
            value, end = decoder.raw_decode(text, space.end())
            values.append(value)
    except json.JSONDecodeError as error:
        why = f"(line {error.lineno}, column {error.colno}): {error.msg.removesuffix(' starting at')}"
        raise FactError(f"{name} is not JSON {why}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        raise FactError(f"{name} is not JSON that can be read: {error}") from None
    records = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not records:
        raise FactError(f"{name} holds no facts; expected a JSON object, a list, or JSON lines")
    return records


def read_protected(path: Path) -> tuple[str, ...]:
    """Read names and texts that an edit must not touch: one a line, or a JSON list. FactError where there are none."""
    expected = "expected names and texts, one a line or as a JSON list"
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line for line in text.split("\n") if line.strip()]
        entries = json.loads(text) if text.lstrip().startswith("[") else lines
    except (OSError, ValueError, RecursionError) as error:
        raise FactError(f"{path} cannot be read ({brief(error)}); {expected}") from None
    if not entries:
        raise FactError(f"{path} holds nothing to protect; {expected}")
    return as_protected(str(path), entries)


def _merge_repeats(facts: Iterable[tuple[int, Fact]], left_out: list[tuple[int, str]]) -> list[tuple[int, Fact]]:
    """Merge the facts that ask the same; add to `left_out` the records that contradict an earlier one."""
    merged: dict[tuple[str, str], tuple[int, Fact]] = {}
    for number, fact in facts:
        first, known = merged.setdefault((fact.subject, fact.text), (number, fact))
        values = [(name, getattr(known, name), getattr(fact, name)) for name in ("target", "previous")]
        disagree = [(name, old, new) for name, old, new in values if old != new and None not in (old, new)]
        if disagree:
            name, old, new = disagree[0]
            reason = f"{show(fact.text)} has {name} {show(new)} here and {show(old)} in record {first}; keep one"
            left_out.append((number, reason))
        elif fact != known:
            merged[fact.subject, fact.text] = first, _union(known, fact)
    return list(merged.values())


def _union(a: Fact, b: Fact) -> Fact:
    """Join two records of one fact: the fields of `a`, those of `b` where `a` has None, and the probes of both."""
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(Fact):
        old, new = getattr(a, field.name), getattr(b, field.name)
        joined[field.name] = new if old is None else tuple(dict.fromkeys(old + new)) if isinstance(old, tuple) else old
    return Fact(**joined)


def _with_own_ids(facts: Iterable[tuple[int, Fact]], left_out: list[tuple[int, str]]) -> list[tuple[int, Fact]]:
    """Leave out facts whose case id another fact has already: their results could not be told apart."""
    owners: dict[str, int] = {}
    kept = []
    for number, fact in facts:
        first = number if fact.case_id is None else owners.setdefault(fact.case_id, number)
        if first == number:
            kept.append((number, fact))
        else:
            reason = f"case_id {show(fact.case_id)} is that of record {first}, another fact; give each its own"
            left_out.append((number, reason))
    return kept


def _read_text(path: str | os.PathLike[str], stdin: IO[Any] | None, name: str) -> str:
    try:
        if os.fspath(path) == "-":
            stream = sys.stdin if stdin is None else stdin
            content = getattr(stream, "buffer", stream).read()  # bytes where the stream has a buffer: always UTF-8
        else:
            content = Path(path).read_bytes()
        return content.removeprefix("\ufeff") if isinstance(content, str) else content.decode("utf-8-sig")
    except FileNotFoundError:
        raise FactError(f"no file {name}; expected a file of facts, or - for standard input") from None
    except OSError as error:
        raise FactError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FactError(f"{name} is not UTF-8 text (byte {error.start}); expected JSON") from None


@dataclass(frozen=True)
class Table:
    """Named table, not read yet; `path` is a path or owner/name on the hub, perhaps with the path of one file in it."""

    name: str
    path: str
    configuration: str | None = None
    split: str | None = None

    def records(self) -> list[dict[str, Any]]:
        """Return all rows, without the nulls of fields that a record lacks. Raises FactError if they cannot be read."""
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
            return dict(datasets.load_dataset(SUFFIXES[path.suffix], data_files=glob.escape(self.path), streaming=True))
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(self.path)
            return saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        if path.is_dir():
            return dict(datasets.load_dataset(os.path.abspath(path), self.configuration, streaming=True))
        hub = HUB.fullmatch(self.path)
        assert hub is not None
        return dict(datasets.load_dataset(hub["set"], self.configuration, data_files=hub["file"]))


def find_table(name: str) -> Table | None:
    """Return the table that `name` names, or None; FactError for a folder that holds none."""
    match = TABLE.fullmatch(name)
    if name == "-" or match is None:
        return None
    table = Table(name, name) if os.path.exists(name) else Table(name, **match.groupdict())
    path = Path(table.path)
    if path.is_dir():
        if not any(file.suffix in SUFFIXES for file in path.rglob("*")):
            raise FactError(f"{name} is a folder; expected a file of facts, or a folder of parquet or arrow files")
        return table
    if path.exists():
        return table if path.suffix in SUFFIXES else None
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
        why = brief(error)
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
