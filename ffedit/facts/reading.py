"""From a file or data set of facts, in any known format, to checked facts.

A source is a file of JSON, standard input, or a table (`tables.py`). A file is any number of JSON values, one
after the other: one object, one list, or JSON lines. Each record is read by its own shape (`formats.py`).

No record is skipped silently: `sift_facts` lists each record that cannot be used with its reason, and
`read_facts` refuses a source with such a record.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ffedit.errors import FactError
from ffedit.facts import tables
from ffedit.facts.fact import Fact, show
from ffedit.facts.formats import parse

# Number of unusable records that are listed one by one.
SHOWN = 5


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
    records = [(number, record) for number, record in enumerate(load_records(path, stdin), 1) if _has(record, where)]
    if where is not None and not records:
        raise FactError(f"{name}: no record has {where[0]!r} of {where[1]!r}; name a field of the data and its value")
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


def _has(record: Any, where: tuple[str, str] | None) -> bool:
    """Return True if a record has the value of `where` in its field; always True where `where` is None."""
    return where is None or (isinstance(record, Mapping) and where[0] in record and str(record[where[0]]) == where[1])


def load_records(path: str | os.PathLike[str], stdin: IO[Any] | None = None) -> list[Any]:
    """Read the records of a table, or the JSON values of a file or standard input ("-"); a list gives its items."""
    name = "standard input" if os.fspath(path) == "-" else os.fspath(path)
    if (table := tables.find(os.fspath(path))) is not None:
        return table.records()
    text = _read_text(path, stdin, name)
    values, decoder, end = [], json.JSONDecoder(), _skip_space(text, 0)
    try:
        while end < len(text):
            value, end = decoder.raw_decode(text, end)
            values.append(value)
            end = _skip_space(text, end)
    except json.JSONDecodeError as error:
        why = f"(line {error.lineno}, column {error.colno}): {error.msg.removesuffix(' starting at')}"
        raise FactError(f"{name} is not JSON {why}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        raise FactError(f"{name} is not JSON that can be read: {error}") from None
    records = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not records:
        raise FactError(f"{name} holds no facts; expected a JSON object, a list, or JSON lines")
    return records


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


def _skip_space(text: str, start: int) -> int:
    space = re.compile(r"[ \t\r\n]*").match(text, start)
    return space.end() if space else start


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
