"""Read checked facts from files or data sets of any shape.

`sources.py` yields the records of a source one by one, `formats.py` reads each by its own shape. This module combines
them: records that say the same become one fact, and those that contradict each other are left out. None is skipped
silently: `sift_facts` lists each record that cannot be used with its reason, and `read_facts` refuses its source.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from ffedit.errors import FactError, brief
from ffedit.facts.fact import Fact, as_protected, normalised, same_question, show
from ffedit.facts.formats import Shape, parse
from ffedit.facts.sources import Source, name_of, stream_records
from ffedit.facts.text import counted

MOST_NAMES = 20  # of unread fields in one line
CLASH = "a clash with a record of the same fact"
REPEATED = "repeats an earlier record: both are one fact"
OVERWRITTEN = "a later record gives another object, which counts"
# Number of a record, from 1; if there are several sources, with its source in front: "b.json, record 3".
Number: TypeAlias = "int | str"


@dataclass(frozen=True)
class LeftOutRecords:
    """Records that cannot be used for one `kind` of reason, in a few words: each with its number and its reason."""

    kind: str
    records: tuple[tuple[Number, str], ...]

    def __str__(self) -> str:
        first, reason = self.records[0]
        return f"{counted(len(self.records), 'record')} left out, {self.kind}; the first is {_where(first)}: {reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return the kind, the count, and the first record with its reason, ready for JSON."""
        first, reason = self.records[0]
        return {"kind": self.kind, "count": len(self.records), "first": first, "reason": reason}


@dataclass(frozen=True)
class Sifted:
    """Content of one source of facts, or of several. Records are numbered from 1.

    - `source`: its name, for messages; `records`: the number of its records.
    - `facts`: the facts that can be used, in order.
    - `left_out`: (record, reason) for each record that cannot be used; `kinds`: the kind of reason, by record.
    - `notes`: (record, note) for each value of a used record that was left out, or not read as it is written.
    - `unread`: the fields that were not read, each with the number of records that have it.
    """

    source: str
    records: int
    facts: tuple[Fact, ...]
    left_out: tuple[tuple[Number, str], ...]
    notes: tuple[tuple[Number, str], ...]
    kinds: Mapping[Number, str] = dataclasses.field(default_factory=dict)
    unread: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def whole(self) -> list[Fact]:
        """Return all facts. Raises FactError, one line, where a record was left out."""
        if self.left_out:
            number, reason = self.left_out[0]
            record = number if isinstance(number, str) else f"{self.source}, record {number}"
            good = self.records - len(self.left_out)
            all_bad = f" (none of {self.records} can be used)" if self.records > 1 else ""
            some_bad = f" ({counted(len(self.left_out), 'record')} of {self.records} cannot be used)"
            advice = f"; --skip-bad uses the {counted(good, 'good record')}"
            raise FactError(f"{record}: {reason}{some_bad}{advice}" if good else f"{record}{all_bad}: {reason}")
        return list(self.facts)

    @property
    def by_kind(self) -> list[LeftOutRecords]:
        """Return the records that were left out, by kind."""
        kinds: dict[str, list[tuple[Number, str]]] = {}
        for number, reason in self.left_out:
            kinds.setdefault(self.kinds[number], []).append((number, reason))
        return [LeftOutRecords(kind, tuple(records)) for kind, records in kinds.items()]

    def refused(self) -> list[str]:
        """Return one line for each kind of record left out, with its count and its first record."""
        return [f"{self.source}: {kind}" for kind in self.by_kind]

    def noted(self) -> list[str]:
        """Return the notes, equal ones in one line with the number of their records, and a line on unread fields."""
        counts = Counter(note for _, note in self.notes)
        examples: dict[str, str] = {}
        for number, note in self.notes:
            example = getattr(note, "example", "")
            examples.setdefault(note, f"; the first is {_where(number)}: {example}" if example else "")
        notes = [f"{self.source}: {note} ({counted(n, 'record')}{examples[note]})" for note, n in counts.items()]
        unread = ", ".join(f"{name or '(no name)'} ({n})" for name, n in [*self.unread.items()][:MOST_NAMES])
        unread += f", and {len(self.unread) - MOST_NAMES} more" if len(self.unread) > MOST_NAMES else ""
        return [*notes, f"{self.source}: not read, with the number of records: {unread}"] if unread else notes


def read_facts(
    path: Source | Sequence[Source],
    *,
    need_targets: bool = True,
    fields: Mapping[str, str] | None = None,
    language: str | None = None,
) -> list[Fact]:
    """Read all facts of a file, of several, of a data set, or of standard input where `path` is "-".

    Args:
        path: a file of JSON, JSON lines, CSV, TSV or YAML; a .parquet or .arrow file; a folder that `datasets` wrote; a
            data set of the hub as owner/name[/file][#configuration][:split]; or a list of these. A path that exists
            always wins.
        need_targets: False also takes records without a new object (tracing sets).
        fields: for a field of `Fact`, the name of the records' field for it, with dots into nested objects, if it is
            not recognised by its own name: {"target": "object.new"}.
        language: the language to write, if records have several; the others become `cross_lingual`.

    Records that ask the same of the same subject with the same target become one fact with the probes of all; with
    different targets they contradict each other.

    Raises:
        FactError: one line, with the source and the first record that cannot be used.
    """
    return sift_facts(path, need_targets=need_targets, fields=fields, language=language).whole()


def sift_facts(
    path: Source | Sequence[Source],
    *,
    need_targets: bool = True,
    together: bool = True,
    where: tuple[str, str] | None = None,
    fields: Mapping[str, str] | None = None,
    language: str | None = None,
    in_sequence: bool = False,
    limit: int | None = None,
) -> Sifted:
    """Read as `read_facts` does, but list the records that cannot be used instead of refusing the source.

    If `together`, all facts are for one model. Else each is edited alone: records that ask the same stay separate facts
    and may disagree, as some of CounterFact do. If `in_sequence`, the later of two facts that disagree counts. `where`
    is a field and its value, as text: only records that have it are read. They keep their numbers. `limit` is the
    number of facts to use, from the first on: records behind the last of them are not listed.

    Raises:
        FactError: there is no such source, it holds no records, or none that matches `where` and can be used.
    """
    named = [path] if isinstance(path, (str, os.PathLike)) else path
    sources = list(dict.fromkeys(os.fspath(source) for source in named))  # each is read once
    if not sources:
        raise FactError("no file of facts was given; expected at least one")
    shape = Shape(fields or {}, language, need_targets)
    sifting = _Sifting()
    for source in sources:
        name, before = name_of(source), len(sifting.numbers)
        prefix = name if len(sources) > 1 else None
        for number, record in enumerate(stream_records(source), 1):
            if where is None or _has(record, *where):
                sifting.add(number if prefix is None else f"{name}, record {number}", record, shape, prefix)
        if where is not None and len(sifting.numbers) == before:
            raise FactError(
                f"{name}: no record has {where[1]!r} in the field {where[0]!r}; name a field of the data and its value"
            )
    return sifting.sifted(", ".join(map(name_of, sources)), together, in_sequence, limit)


def _where(number: Number) -> str:
    return number if isinstance(number, str) else f"record {number}"


def _has(record: Any, field: str, value: str) -> bool:
    return isinstance(record, Mapping) and field in record and str(record[field]) == value


class _Sifting:
    """Facts read so far, with the numbers of their records, and the records left out."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []  # of all records
        self.facts: list[tuple[Number, Fact]] = []
        self.left_out: dict[Number, FactError] = {}
        self.notes: list[tuple[Number, str]] = []
        self.unread: Counter[str] = Counter()

    def add(self, number: Number, record: Any, shape: Shape, source: str | None) -> None:
        """Read a record; the `source`, if there are several, is put in front of its case id."""
        self.numbers.append(number)
        try:
            if isinstance(record, FactError):
                raise record
            parsed = parse(record, shape)
        except FactError as error:
            self.left_out[number] = error
            return
        for fact in parsed.facts:
            if source is not None and fact.case_id is not None:
                fact = dataclasses.replace(fact, case_id=f"{source}:{fact.case_id}")
            self.facts.append((number, fact))
        self.notes += [(number, note) for note in parsed.notes]
        self.unread.update(parsed.unread)

    def sifted(self, source: str, together: bool, in_sequence: bool, limit: int | None) -> Sifted:
        """Return the result: repeats merged, contradictions and facts with a case id of another fact left out."""
        if together:
            self._set_apart(in_sequence)
            self._keep_whole_records()
            self._merge_repeats()
        self._check_ids()
        self._keep_whole_records()
        if limit is not None and len(self.facts) >= limit:
            del self.facts[limit:], self.numbers[self.numbers.index(self.facts[-1][0]) + 1 :]
        left_out = [(number, self.left_out[number]) for number in self.numbers if number in self.left_out]
        sifted = Sifted(
            source,
            len(self.numbers),
            tuple(fact for _, fact in self.facts),
            tuple((number, str(error)) for number, error in left_out),
            tuple(self.notes),
            {number: error.kind for number, error in left_out},
            dict(self.unread),
        )
        if not self.facts:
            sifted.whole()  # raises the first reason
        return sifted

    def _set_apart(self, in_sequence: bool) -> None:
        """Leave out all facts that disagree about one question; in a sequence, those that a later one overwrites."""
        dropped: set[int] = set()
        for positions, name in _disagreements([fact for _, fact in self.facts]):
            values = [normalised(getattr(self.facts[p][1], name)) for p in positions]
            kept = values[-1] if in_sequence else object()
            for position, value in zip(positions, values, strict=True):
                if value == kept or position in dropped:
                    continue
                dropped.add(position)
                number, fact = self.facts[position]
                if in_sequence:
                    self.notes.append((number, OVERWRITTEN))
                else:
                    other, second = self.facts[next(p for p, v in zip(positions, values, strict=True) if v != value)]
                    asks = "" if second.text == fact.text else f", which asks {show(second.text)}"
                    self.left_out[number] = FactError(
                        f"{show(fact.text)} has {name} {show(getattr(fact, name))} here and "
                        f"{show(getattr(second, name))} in {_where(other)}{asks}; keep one",
                        kind="a contradiction",
                    )
        self.facts = [entry for position, entry in enumerate(self.facts) if position not in dropped]

    def _keep_whole_records(self) -> None:
        """Drop all facts of records that were left out for one of them."""
        self.facts = [(number, fact) for number, fact in self.facts if number not in self.left_out]

    def _merge_repeats(self) -> None:
        """Join the facts that ask the same; leave out a record that has one which cannot be joined."""
        merged: dict[tuple[str, str], tuple[Number, Fact]] = {}
        for number, record in groupby(self.facts, key=itemgetter(0)):
            joined: dict[tuple[str, str], tuple[Number, Fact]] = {}
            try:
                for _, fact in record:
                    key = fact.subject, fact.text
                    first, earlier = joined.get(key) or merged.get(key) or (number, fact)
                    joined[key] = first, _union(earlier, fact) if fact != earlier else earlier
            except FactError as error:
                self.left_out[number] = FactError(f"joined with {_where(first)}, the same fact: {error}", kind=CLASH)
                continue
            self.notes += [(number, REPEATED) for first, _ in joined.values() if first != number]
            merged |= joined
        self.facts = list(merged.values())

    def _check_ids(self) -> None:
        """Leave out facts whose case id an earlier fact has: their results could not be distinguished."""
        owners: dict[str, Number] = {}
        kept = []
        for number, fact in self.facts:
            first = number if fact.case_id is None else owners.setdefault(fact.case_id, number)
            if first == number:
                kept.append((number, fact))
            else:
                self.left_out[number] = FactError(
                    f"case_id {show(fact.case_id)} is also that of {_where(first)}, another fact; give each its own",
                    kind="a case_id that another fact has",
                )
        self.facts = kept


def _disagreements(facts: Sequence[Fact]) -> Iterator[tuple[list[int], str]]:
    """Yield the positions of facts that ask one question and disagree, and the field in which they do."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for position, fact in enumerate(facts):
        by_text.setdefault((fact.subject, fact.text), []).append(position)
    asking = [[position] for position in range(len(facts))]  # by position: facts that ask the same share one list
    for pair in same_question(facts):
        fewer, more = sorted((asking[position] for position in pair), key=len)
        if fewer is not more:
            more += fewer
            for position in fewer:
                asking[position] = more
    by_question = {id(positions): positions for positions in asking}
    for name, groups in (("target", by_question), ("target", by_text), ("previous", by_text)):
        for positions in groups.values():
            named = [p for p in sorted(positions) if getattr(facts[p], name) is not None]
            if len({normalised(getattr(facts[p], name)) for p in named}) > 1:
                yield named, name


def _union(a: Fact, b: Fact) -> Fact:
    """Join two records of one fact: the fields of `a`, those of `b` where `a` has None, and the probes of both."""
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(Fact):
        old, new = getattr(a, field.name), getattr(b, field.name)
        joined[field.name] = new if old is None else tuple(dict.fromkeys(old + new)) if isinstance(old, tuple) else old
    return Fact(**joined)


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
