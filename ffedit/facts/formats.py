"""The record formats of the field, recognised by their shape and read into `Fact`.

A format is one row of `FORMATS`: its name, the shape that tells it from the others, and one function from a
record to its facts. The rows are tried in order, the special before the general. Content of a record that no
fact can hold is named in a note, so that nothing is dropped silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ffedit.errors import FactError
from ffedit.facts import readers
from ffedit.facts.fact import Fact, show
from ffedit.facts.readers import Parsed, Record

OWN_FIELDS = frozenset(field.name for field in dataclasses.fields(Fact))


@dataclass(frozen=True)
class Format:
    """Record format: `shape` names the fields it is recognised by, `fits` tests them, `read` reads it."""

    name: str
    shape: str
    fits: Callable[[Record], bool]
    read: Callable[[Record], Parsed]


def parse_record(record: object) -> Fact:
    """Read a record of one fact. Raises FactError as `parse` does, and for a record of several."""
    facts = parse(record).facts
    if len(facts) != 1:
        raise FactError(f"the record holds {len(facts)} facts, expected one; read the file with read_facts")
    return facts[0]


def parse(record: object) -> Parsed:
    """Read one record. Raises FactError for a shape that no row of `FORMATS` fits, and for a bad fact."""
    if not isinstance(record, Mapping):
        raise FactError(f"expected an object, found {show(record)}")
    for row in FORMATS:
        if row.fits(record):
            return row.read(record)
    keys = ", ".join(map(str, record)) or "none"
    known = "; ".join(f"{row.name} ({row.shape})" for row in FORMATS)
    raise FactError(f"unknown shape, found the keys {show(keys)}; known are: {known}")


def _has(*keys: str, any_of: tuple[str, ...] = ()) -> Callable[[Record], bool]:
    """Recognise a record that has all of `keys` and, where given, one of `any_of`."""
    needed, one_of = frozenset(keys), frozenset(any_of)
    return lambda record: needed <= record.keys() and (not one_of or not one_of.isdisjoint(record))


def _is_request(record: Record) -> bool:
    return isinstance(record.get("target_new"), Mapping) and "subject" in record and "prompt" in record


def _is_mquake(record: Record) -> bool:
    return isinstance(record.get("requested_rewrite"), (list, tuple))


def _is_own(record: Record) -> bool:
    return "subject" in record and "prompt" in record and ("target" in record or record.keys() <= OWN_FIELDS)


def _one(read: Callable[[Record], Fact]) -> Callable[[Record], Parsed]:
    """Turn a reader of one fact into a reader that returns `Parsed`."""
    return lambda record: Parsed((read(record),))


FLAT = ("subject", "prompt", "target_new")
TRACING = ("subject", "relation_prefix", "relation_suffix", "target_true", "target_false")

FORMATS = (
    Format("MQuAKE", "requested_rewrite [...]", _is_mquake, readers.mquake),
    Format("CounterFact", "requested_rewrite", _has("requested_rewrite"), _one(readers.counterfact)),
    Format("counterfact-tracing", ", ".join(TRACING), _has(*TRACING), _one(readers.tracing)),
    Format(
        "zsRE", "subject, src, alt | answers", _has("subject", "src", any_of=("alt", "answers")), _one(readers.zsre)
    ),
    Format("ROME/MEMIT request", "subject, prompt, target_new {str}", _is_request, _one(readers.rome)),
    Format(
        "KnowEdit",
        "subject, prompt, target_new, locality | portability",
        _has(*FLAT, any_of=("locality", "portability")),
        readers.knowedit,
    ),
    Format("KnowEdit WikiBio", "concept, text, labels", _has("concept", "text", "labels"), readers.wikibio),
    Format("EasyEdit", "subject, prompt, target_new", _has(*FLAT), _one(readers.easyedit)),
    Format(
        "FastEdit", "subject, prompt, target, queries", _has("subject", "prompt", "queries"), _one(readers.fastedit)
    ),
    Format("known_1000", "subject, prompt, attribute", _has("subject", "prompt", "attribute"), _one(readers.known)),
    Format("ffedit", "subject, prompt, target", _is_own, _one(Fact.from_dict)),
)
