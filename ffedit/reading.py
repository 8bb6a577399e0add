"""Files of facts: JSON, JSON lines or standard input, in any known format, into checked facts.

A file is any number of JSON values, one after the other: one object, one list, or JSON lines. Each record is
read by its own shape (`formats.py`). Nothing is skipped: a record that cannot be used is an error that names
the file and the record.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import FactError
from .facts import Fact, show
from .formats import parse_record


def read_facts(path: str | os.PathLike[str], stdin: IO[Any] | None = None, need_targets: bool = True) -> list[Fact]:
    """Read all facts of a file, or of standard input where `path` is "-".

    Records that ask the same (`same_fact`) with the same target become one fact with the probes of all;
    with different targets they contradict each other and are refused. `need_targets=False` also takes
    records without a new object (tracing sets). Raises FactError, one line, with the file and the record.
    """
    name = "standard input" if os.fspath(path) == "-" else os.fspath(path)
    facts, problems = parse_records(load_records(path, stdin), need_targets)
    if problems:
        number, problem = next(iter(problems.items()))
        more = f" ({len(problems)} records of {len(facts) + len(problems)} cannot be used)"
        raise FactError(f"{name}, record {number}: {problem}{more if len(problems) > 1 else ''}")
    try:
        return merge_repeats(facts)
    except FactError as error:
        raise FactError(f"{name}, {error}") from None


def load_records(path: str | os.PathLike[str], stdin: IO[Any] | None = None) -> list[Any]:
    """Read the JSON values of a file, or of standard input where `path` is "-"; a list is its items."""
    name = "standard input" if os.fspath(path) == "-" else os.fspath(path)
    text = _read_text(path, stdin, name)
    values, decoder, end = [], json.JSONDecoder(), _skip_space(text, 0)
    try:
        while end < len(text):
            value, end = decoder.raw_decode(text, end)
            values.append(value)
            end = _skip_space(text, end)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise FactError(f"{name} is not JSON ({place}): {error.msg.removesuffix(' starting at')}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        raise FactError(f"{name} is not JSON that can be read: {error}") from None
    records = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not records:
        raise FactError(f"{name} holds no facts; expected a JSON object, a list, or JSON lines")
    return records


def parse_records(records: Iterable[Any], need_targets: bool = True) -> tuple[dict[int, Fact], dict[int, FactError]]:
    """Read each record by its own shape: the facts, and what is wrong with the others, by number from 1."""
    facts: dict[int, Fact] = {}
    problems: dict[int, FactError] = {}
    for number, record in enumerate(records, start=1):
        try:
            fact = parse_record(record)
            if need_targets:
                _ = fact.new_object
            facts[number] = fact
        except FactError as error:
            problems[number] = error
    return facts, problems


def merge_repeats(facts: Mapping[int, Fact]) -> list[Fact]:
    """Make one fact of the records that ask the same. Raises FactError where their objects differ."""
    merged: dict[tuple[str, str], tuple[int, Fact]] = {}
    for number, fact in facts.items():
        first, known = merged.setdefault((fact.subject, fact.text), (number, fact))
        for field in ("target", "previous"):
            old, new = getattr(known, field), getattr(fact, field)
            if old != new and None not in (old, new):
                raise FactError(
                    f"records {first} and {number}: {show(fact.text)} has two values of {field}, "
                    f"{show(old)} and {show(new)}; keep one"
                )
        if fact != known:
            merged[fact.subject, fact.text] = first, _union(known, fact)
    return [fact for _, fact in merged.values()]


def _union(a: Fact, b: Fact) -> Fact:
    """Join two records of one fact: what `a` says, `b` where `a` says nothing, and the probes of both."""
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(Fact):
        old, new = getattr(a, field.name), getattr(b, field.name)
        joined[field.name] = new if old is None else old
        if isinstance(old, tuple):
            joined[field.name] = tuple(dict.fromkeys(old + new))
    return Fact(**joined)


def _skip_space(text: str, start: int) -> int:
    space = re.compile(r"[ \t\r\n]*").match(text, start)
    return space.end() if space else start


def _read_text(path: str | os.PathLike[str], stdin: IO[Any] | None, name: str) -> str:
    try:
        if os.fspath(path) == "-":
            stream = sys.stdin if stdin is None else stdin
            content = getattr(stream, "buffer", stream).read()  # bytes where there are some: always UTF-8
        elif Path(path).is_dir():
            raise FactError(f"{name} is a folder; expected a file of facts")
        else:
            content = Path(path).read_bytes()
        return content.removeprefix("\ufeff") if isinstance(content, str) else content.decode("utf-8-sig")
    except FileNotFoundError:
        raise FactError(f"no file {name}; expected a file of facts, or - for standard input") from None
    except OSError as error:
        raise FactError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FactError(f"{name} is not UTF-8 text (byte {error.start}); expected JSON") from None
