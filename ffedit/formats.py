"""The record formats of the field, recognised by their shape and read into `Fact`.

A format is one row of `FORMATS`: its name, the shape that tells it from the others, and one function from a
record to a Fact. The rows are tried in order, the special before the general.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import FactError
from .facts import Fact, Probe, fill, show

Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A record format: `shape` names the fields it is recognised by, `fits` tests them, `read` reads it."""

    name: str
    shape: str
    fits: Callable[[Record], bool]
    read: Callable[[Record], Fact]


def parse_record(record: object) -> Fact:
    """Read one record. Raises FactError for a shape that no row of `FORMATS` fits, and for a bad fact."""
    if not isinstance(record, Mapping):
        raise FactError(f"expected an object, found {show(record)}")
    for row in FORMATS:
        if row.fits(record):
            return row.read(record)
    keys = ", ".join(map(str, record)) or "none"
    known = "; ".join(f"{row.name} ({row.shape})" for row in FORMATS)
    raise FactError(f"unknown shape, found the keys {show(keys)}; known are: {known}")


def _rome(record: Record) -> Fact:
    """ROME and MEMIT: a request, `target_new` and an optional `target_true` as {"str": ...}."""
    return Fact(
        subject=_need(record, "subject"),
        prompt=_need(record, "prompt"),
        target=_need(record, "target_new", "str"),
        previous=_need(record, "target_true", "str") if record.get("target_true") else None,
        relation=_first(record.get("relation_id")),
        case_id=record.get("case_id"),
    )


def _counterfact(record: Record) -> Fact:
    """CounterFact: a request with its probes. The answer to a neighborhood prompt is `target_true`.

    `attribute_prompts` are left out: they are about other subjects that have the *new* object already, so
    their answer neither moves with the edit nor is `previous`. `same_subject` is ffedit's own extension.
    """
    rewrite = _object("requested_rewrite", record["requested_rewrite"])
    return dataclasses.replace(
        _rome(rewrite),
        paraphrases=_listed(record.get("paraphrase_prompts")),
        neighbors=_listed(record.get("neighborhood_prompts")),
        generation=_listed(record.get("generation_prompts")),
        same_subject=_listed(record.get("same_subject")),
        case_id=record.get("case_id"),
    )


def _zsre(record: Record) -> Fact:
    """zsRE as MEND and EasyEdit use it: write `alt`, or the true answer where there is no other `alt`.

    `previous` is then the true answer, or for those that write the true answer the `pred` of the record.
    """
    true = _first(record.get("answers"))
    target = record.get("alt") or true
    previous = next((old for old in (true, record.get("pred")) if old and old != target), None)
    return Fact(
        subject=_need(record, "subject"),
        prompt=_need(record, "src"),
        target=target,
        previous=previous,
        paraphrases=_listed(record.get("rephrase")),
        neighbors=[_question(record["loc"], record.get("loc_ans"))] if record.get("loc") else [],
        case_id=record.get("case_id"),
    )


def _question(loc: Any, answer: Any) -> Probe:
    """A question of Natural Questions, which MEND writes without its mark: "nq question: who sang ..."."""
    if not isinstance(loc, str):
        raise FactError(f"loc must be text, found {show(loc)}")
    question = loc.removeprefix("nq question: ").rstrip()
    return Probe(question if question.endswith("?") else question + "?", _first(answer))


def _easyedit(record: Record) -> Fact:
    """EasyEdit's flat form: `target_new` is text, and there is one locality prompt with its answer."""
    answer = _first(record.get("locality_ground_truth"))
    return Fact(
        subject=_need(record, "subject"),
        prompt=_need(record, "prompt"),
        target=_need(record, "target_new"),
        previous=_first(record.get("ground_truth")),
        paraphrases=_listed(record.get("rephrase_prompt")),
        neighbors=[Probe(prompt, answer) for prompt in _listed(record.get("locality_prompt"))],
        relation=_first(record.get("relation_id")),
        case_id=record.get("case_id"),
    )


def _knowedit(record: Record) -> Fact:
    """KnowEdit (arXiv 2401.01286): EasyEdit's form with probes by kind.

    Relation_Specificity asks for the subject's other relations, Forgetfulness for other objects of the
    edited one ("..., which is not Rome, is"). Both are about the subject, so both are `same_subject`; one
    that does not name it is a neighbor. Forgetfulness supposes that an object is added to a list. Where its
    answer is the very object that this edit replaces, keeping it would be failure, and it is left out.
    Portability asks what should follow from an edit, not what should stay: it is no part of a Fact.
    """
    fact = _easyedit(record)
    probes = []
    for kind, items in _object("locality", record.get("locality") or {}).items():
        for item in _listed(items):
            prompt = fill(_first(_need(_object(f"locality.{kind}", item), "prompt")) or "", fact.subject)
            answers = _listed(item.get("ground_truth"))
            if kind != "Forgetfulness" or fact.previous not in answers:
                probes.append(Probe(prompt, _first(answers)))
    return dataclasses.replace(
        fact,
        neighbors=fact.neighbors + tuple(p for p in probes if fact.subject not in p.prompt),
        same_subject=tuple(p for p in probes if fact.subject in p.prompt),
    )


def _fastedit(record: Record) -> Fact:
    """FastEdit: `queries` are other wordings of the fact."""
    return Fact(
        subject=_need(record, "subject"),
        prompt=_need(record, "prompt"),
        target=_need(record, "target"),
        paraphrases=_listed(record.get("queries")),
    )


def _known(record: Record) -> Fact:
    """ROME's causal-tracing set: true facts without a new object; tracing follows `previous`.

    Its `template` often ends before `prompt` does, and the answer follows `prompt`: that one is read.
    """
    return Fact(
        subject=_need(record, "subject"),
        prompt=_need(record, "prompt"),
        previous=_need(record, "attribute"),
        relation=_first(record.get("relation_id")),
        case_id=record.get("known_id"),
    )


# How records are looked into ------------------------------------------------------------


def _need(record: Record, *path: str) -> Any:
    """Return the value at `path`, or say which field is missing."""
    value: Any = record
    for depth, key in enumerate(path, start=1):
        if not isinstance(value, Mapping) or key not in value:
            raise FactError(f"{'.'.join(path[:depth])} is missing")
        value = value[key]
    return value


def _object(field: str, value: object) -> Record:
    if not isinstance(value, Mapping):
        raise FactError(f"{field} must be an object, found {show(value)}")
    return value


def _listed(value: Any) -> tuple[Any, ...]:
    """Flatten what some files write as text, some as a list and some as a list of lists of aliases."""
    if value is None or value == "":
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(item for part in value for item in _listed(part))
    return (value,)


def _first(value: Any) -> Any:
    """Return the first of what is listed; None where nothing is."""
    return next(iter(_listed(value)), None)


def _has(*keys: str, any_of: tuple[str, ...] = ()) -> Callable[[Record], bool]:
    """Recognise a record that has all of `keys` and, where given, one of `any_of`."""
    return lambda record: all(k in record for k in keys) and (not any_of or any(k in record for k in any_of))


def _is_request(record: Record) -> bool:
    return _has("subject", "prompt", "target_new")(record) and isinstance(record["target_new"], Mapping)


def _is_own(record: Record) -> bool:
    fields = {field.name for field in dataclasses.fields(Fact)}
    return _has("subject", "prompt")(record) and ("target" in record or set(record) <= fields)


FORMATS = (
    Format("CounterFact", "requested_rewrite", _has("requested_rewrite"), _counterfact),
    Format("zsRE", "subject, src, alt | answers", _has("subject", "src", any_of=("alt", "answers")), _zsre),
    Format("ROME/MEMIT request", "subject, prompt, target_new {str}", _is_request, _rome),
    Format(
        "KnowEdit",
        "subject, prompt, target_new, locality | portability",
        _has("subject", "prompt", "target_new", any_of=("locality", "portability")),
        _knowedit,
    ),
    Format("EasyEdit", "subject, prompt, target_new", _has("subject", "prompt", "target_new"), _easyedit),
    Format("FastEdit", "subject, prompt, target, queries", _has("subject", "prompt", "queries"), _fastedit),
    Format("known_1000", "subject, prompt, attribute", _has("subject", "prompt", "attribute"), _known),
    Format("ffedit", "subject, prompt, target", _is_own, Fact.from_dict),
)
