"""The record formats of the field, recognised by their shape and read into `Fact`.

A format is one function from a record to its facts with its `@record_format` row: the name, and the shape that tells
it from the others. Formats are tried in the order in which they stand here, the special before the general. A field
may be text in some files, and a list or a list of lists of aliases in others; all are read alike. Of several answers
the first is the target, as in the published code, and the others are its aliases.

Content of a record that no fact can hold is named in a note. A record that cannot be used raises FactError, one line,
that names the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ffedit.errors import FactError
from ffedit.facts.fact import MULTI_HOP, SLOT, Fact, Probe, show

Record: TypeAlias = Mapping[str, Any]

OWN_FIELDS = frozenset(field.name for field in dataclasses.fields(Fact))
# What the value of a field is, by the mark behind its name in a shape.
MARKS: Mapping[str, tuple[type, ...]] = {"": (object,), "[...]": (list, tuple), "{str}": (Mapping,)}
# Prefix of the questions of Natural Questions in MEND's data.
NATURAL_QUESTION = "nq question: "


@dataclass(frozen=True)
class Parsed:
    """Facts of one record, and notes in words on what was left out of them."""

    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()


Reader: TypeAlias = Callable[[Record], Fact | Parsed]
R = TypeVar("R", bound=Reader)


@dataclass(frozen=True)
class Format:
    """Record format: its name, the fields that it is recognised by, and its reader.

    `shape` names fields with commas between, | between alternatives; [...] marks a list, {str} an object.
    """

    name: str
    shape: str
    read: Reader

    def fits(self, record: Record) -> bool:
        """Return whether a record has this shape; ffedit's own form may also leave out the target."""

        def has(field: str) -> bool:
            name, _, mark = field.partition(" ")
            return name in record and isinstance(record[name], MARKS[mark])

        fields = self.shape.split(", ")
        if self.read == Fact.from_dict and record.keys() <= OWN_FIELDS:
            fields.remove("target")
        return all(any(map(has, field.split(" | "))) for field in fields)


FORMATS: list[Format] = []


def record_format(name: str, shape: str) -> Callable[[R], R]:
    """Add a format with the reader that follows."""

    def add(read: R) -> R:
        FORMATS.append(Format(name, shape, read))
        return read

    return add


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
            read = row.read(record)
            return read if isinstance(read, Parsed) else Parsed((read,))
    keys = ", ".join(map(str, record)) or "none"
    known = "; ".join(f"{row.name} ({row.shape})" for row in FORMATS)
    raise FactError(f"unknown shape, found the keys {show(keys)}; known are: {known}")


# The formats -------------------------------------------------------------------------------


@record_format("MQuAKE", "requested_rewrite [...]")
def mquake(record: Record) -> Parsed:
    """Read a record of MQuAKE (arXiv 2305.14795): the single edits of a multi-hop question, each with its own question.

    The new answer to a case's questions follows from its edits: portability of the last one, which needs the others
    to be edited as well. The questions are three phrasings of one, and a case counts once, as answered if any phrasing
    is (section 3.3). Aliases of the new answer are `new_answer_alias`; those of an edit's object are in the single
    hop that asks for it.
    """
    questions, rewrites = _listed(record.get("questions")), _listed(record["requested_rewrite"])
    if not rewrites:
        raise FactError("requested_rewrite is empty; expected at least one edit")
    case, alone = record.get("case_id"), len(rewrites) == 1
    names = _listed(record.get("new_answer_alias"))
    hops = [_object("an item of new_single_hops", hop) for hop in _listed(record.get("new_single_hops"))]
    facts = []
    for number, item in enumerate(rewrites, start=1):
        request = _object("an item of requested_rewrite", item)
        asked = request.get("question"), _need(request, "target_new", "str")
        aliases = [hop.get("answer_alias") for hop in hops if (hop.get("question"), hop.get("answer")) == asked]
        case_id = case if alone or case is None else f"{case}.{number}"
        probes = {"paraphrases": _listed(asked[0]), "target_aliases": _listed(aliases)}
        facts.append(_request(request, **probes, case_id=case_id))
    needs = tuple(fact.text for fact in facts[:-1])
    follows = (Probe(question, _need(record, "new_answer"), MULTI_HOP, names, needs) for question in questions)
    facts[-1] = dataclasses.replace(facts[-1], portability=tuple(follows))
    note = f"multi-hop questions are asked where all {len(facts)} edits of their case are made together"
    return Parsed(tuple(facts), () if alone or not questions else (note,))


@record_format("Reveal_Attention_Drift", "requested_rewrite {str}, rewrite {str}")
def attention_drift(record: Record) -> Fact:
    """Read a record of "Revealing and Mitigating Over-Attention in Knowledge Editing" (arXiv 2502.14838).

    The request is plain text, and each group of probes {"prompts": [..], "targets": [..]}. What follows from the edit
    (`p-reasoning`, and `p-subject_alias`, the fact by another name of the subject) is portability; other facts of the
    subject (`l-relation`) should stay. A prompt that occurs with several targets accepts any of them.
    """
    return _fact(
        record["requested_rewrite"],
        target=_need(record, "requested_rewrite", "target_new"),
        previous=record["requested_rewrite"].get("target_true"),
        paraphrases=[probe.prompt for probe in _group(record, "p-paraphrase")],
        neighbors=_group(record, "l-neighbor"),
        same_subject=_group(record, "l-relation"),
        portability=_group(record, "p-subject_alias") + _group(record, "p-reasoning"),
        generation=tuple(dict.fromkeys(_listed(_object("generation", record.get("generation") or {}).get("prompts")))),
        case_id=record.get("case_id"),
    )


def _group(record: Record, name: str) -> tuple[Probe, ...]:
    """Return the probes of a group, each prompt once; their kind is the group's name."""
    group = _object(name, record.get(name) or {})
    prompts, targets = _listed(group.get("prompts")), _listed(group.get("targets"))
    if len(prompts) != len(targets):
        raise FactError(f"{name} has {len(prompts)} prompts and {len(targets)} answers to them")
    answers: dict[Any, list[Any]] = {}
    for prompt, target in zip(prompts, targets, strict=True):
        answers.setdefault(prompt, []).append(target)
    return tuple(_probe(prompt, names, name) for prompt, names in answers.items())


@record_format("CounterFact", "requested_rewrite")
def counterfact(record: Record) -> Fact:
    """Read a record of CounterFact: a request with its probes. The answer to a neighborhood prompt is `target_true`.

    `attribute_prompts` are left out: they are about other subjects that have the *new* object already, so
    their answer neither changes with the edit nor is `previous`. `same_subject` and `portability`, prompts with their
    answers, are ffedit's own extensions.
    """
    return _request(
        _object("requested_rewrite", record["requested_rewrite"]),
        paraphrases=_listed(record.get("paraphrase_prompts")),
        neighbors=_listed(record.get("neighborhood_prompts")),
        generation=_listed(record.get("generation_prompts")),
        same_subject=_listed(record.get("same_subject")),
        portability=_listed(record.get("portability")),
        references=_listed(record.get("references")),
        case_id=record.get("case_id"),
    )


@record_format("counterfact-tracing", "subject, relation_prefix, relation_suffix, target_true, target_false")
def tracing(record: Record) -> Fact:
    """Read a record of CounterFact in the form of the hub's `counterfact-tracing`: one flat request.

    The subject stands between `relation_prefix` and `relation_suffix`, and includes the space in front of it.
    """
    space = " " if str(_need(record, "subject")).startswith(" ") else ""
    return Fact(
        subject=record["subject"],
        prompt=f"{record['relation_prefix']}{space}{SLOT}{record['relation_suffix']}",
        target=_need(record, "target_false"),
        previous=_need(record, "target_true"),
        relation=_first(record.get("relation_id")),
        case_id=record.get("case_id"),
    )


@record_format("zsRE", "subject, src, alt | answers")
def zsre(record: Record) -> Fact:
    """Read zsRE as MEND and EasyEdit use it: write `alt`, or the true answer where there is no `alt`.

    ROME and MEMIT write the true answer, `answers[0]`, in every record: so does a record without its `alt`. `previous`
    is the true answer, or the record's `pred` where the true answer is written. The locality prompt is that
    of ROME and MEMIT, its prefix "nq question: " included. EasyEdit's copy may have one question of portability.
    """
    hop = _object("portability", record.get("portability") or {})
    answers = _listed(record.get("answers"))
    true = _first(answers)
    target = record.get("alt") or true
    previous = next((old for old in (true, record.get("pred")) if old and old != target), None)
    return Fact(
        subject=_need(record, "subject"),
        prompt=_need(record, "src"),
        target=target,
        previous=previous,
        paraphrases=_listed(record.get("rephrase")),
        locality=[_question("loc", record["loc"], record.get("loc_ans"))] if record.get("loc") else [],
        portability=[_probe(hop["New Question"], _need(hop, "New Answer"))] if "New Question" in hop else [],
        case_id=record.get("case_id"),
        target_aliases=answers if target == true else (),
    )


@record_format("ROME/MEMIT request", "subject, prompt, target_new {str}")
def rome(record: Record) -> Fact:
    """Read a record of ROME and MEMIT: a request, `target_new` and an optional `target_true` as {"str": ...}."""
    return _request(record, case_id=record.get("case_id"))


@record_format("KnowEdit", "subject, prompt, target_new, locality | portability")
def knowedit(record: Record) -> Parsed:
    """Read KnowEdit (arXiv 2401.01286): EasyEdit's form with probes by kind, of what follows and of what should stay.

    Relation_Specificity asks for the subject's other relations, Forgetfulness for other objects of the
    edited one ("..., which is not Rome, is"). Both are about the subject, so both are `same_subject`; a probe
    that does not name it is a neighbor, or if it has no answer `locality`: the model's answer before the edit.
    Forgetfulness supposes that an object is added to a list. Where its answer is the very object that this
    edit replaces, keeping it would be failure, and it is left out. A `ground_truth` is a list of answers, each a
    list of its names: a model that continues with any one of them has answered.
    """
    notes: list[str] = []
    fact = easyedit(record)
    stays = list(_by_kind(record, "locality", fact.subject))
    replaced = [p for p in stays if p.kind == "Forgetfulness" and p.target and fact.previous in (p.target, *p.aliases)]
    kept = [p for p in stays if p not in replaced]
    follows = list(_by_kind(record, "portability", fact.subject))
    if replaced:
        notes.append("Forgetfulness prompts that ask for what the edit replaces were left out")
    if any(p.target is None for p in follows):
        notes.append("portability prompts without an answer were left out")
    others = [p for p in kept if fact.subject not in p.prompt]
    fact = dataclasses.replace(
        fact,
        neighbors=fact.neighbors + tuple(p for p in others if p.target is not None),
        locality=fact.locality + tuple(p for p in others if p.target is None),
        same_subject=tuple(p for p in kept if fact.subject in p.prompt),
        portability=tuple(p for p in follows if p.target is not None),
    )
    return Parsed((fact,), tuple(notes))


def _by_kind(record: Record, field: str, subject: str) -> Iterator[Probe]:
    """Yield each probe of `field` {kind: [{prompt, ground_truth}]}."""
    for kind, items in _object(field, record.get(field) or {}).items():
        for item in _listed(items):
            prompts = _listed(_need(_object(f"{field}.{kind}", item), "prompt"))
            answers = [item.get("ground_truth")]
            if len(prompts) != 1:  # EasyEdit's requests: lists of prompts and of their answers
                answers = list(answers[0]) if isinstance(answers[0], (list, tuple)) else []
                if not prompts or len(prompts) != len(answers):
                    raise FactError(f"{field}.{kind} has {len(prompts)} prompts and {len(answers)} answers to them")
            for prompt, answer in zip(prompts, answers, strict=True):
                yield _probe(prompt, answer, kind).filled(subject)


@record_format("KnowEdit WikiBio", "concept, text, labels")
def wikibio(record: Record) -> Parsed:
    """Read KnowEdit's WikiBio: the next sentence (`labels`) of a passage (`text`) about `concept`."""
    names = {"subject": record["concept"], "prompt": record["text"], "target_new": _first(record["labels"])}
    return knowedit({**record, **names})


@record_format("EasyEdit", "subject, prompt, target_new")
def easyedit(record: Record) -> Fact:
    """Read EasyEdit's flat form: `target_new` is text; locality prompts have one answer in common, or one for each.

    Those of CounterFact are its neighbors; those of zsRE, known by their prefix, are unrelated to the fact.
    """
    asked = [(prompt, answer, str(prompt).startswith(NATURAL_QUESTION)) for prompt, answer in _locality(record)]
    return _fact(
        record,
        target=record["target_new"],
        previous=_first(record.get("ground_truth")),
        paraphrases=_listed(record.get("rephrase_prompt") or record.get("rephrase")),
        neighbors=[_probe(prompt, answer) for prompt, answer, question in asked if not question],
        locality=[_question("locality_prompt", prompt, answer) for prompt, answer, question in asked if question],
        case_id=record.get("case_id"),
    )


def _locality(record: Record) -> list[tuple[Any, Any]]:
    """Return EasyEdit's locality prompts, each with the answers that it accepts."""
    prompts = _listed(record.get("locality_prompt"))
    count, answers = len(prompts), record.get("locality_ground_truth")
    if not isinstance(answers, (list, tuple)) or count < 2 or len(answers) < 2:  # a list for one prompt holds aliases
        return [(prompt, answers) for prompt in prompts]
    if len(answers) != count:
        raise FactError(f"locality_ground_truth has {len(answers)} answers; expected 1, or {count} as locality_prompt")
    return list(zip(prompts, answers, strict=True))


@record_format("FastEdit", "subject, prompt, queries")
def fastedit(record: Record) -> Fact:
    """Read a record of FastEdit: `queries` are paraphrases of the fact."""
    return Fact(record["subject"], record["prompt"], _need(record, "target"), paraphrases=_listed(record["queries"]))


@record_format("known_1000", "subject, prompt, attribute")
def known(record: Record) -> Fact:
    """Read ROME's causal-tracing set: true facts without a new object; tracing follows `previous`.

    Its `template` often ends before `prompt` does, and the answer follows `prompt`: `prompt` is read.
    """
    return _fact(record, previous=record["attribute"], case_id=record.get("known_id"))


record_format("ffedit", "subject, prompt, target")(Fact.from_dict)


# Access to the fields of records -----------------------------------------------------------


def _fact(record: Record, **more: Any) -> Fact:
    """Return a fact with the fields that most formats have in common, and `more`."""
    subject, prompt = _need(record, "subject"), _need(record, "prompt")
    return Fact(subject, prompt, relation=_first(record.get("relation_id")), **more)


def _request(record: Record, **more: Any) -> Fact:
    """Return the fact of a request, with additional fields `more`."""
    previous = _need(record, "target_true", "str") if record.get("target_true") else None
    return _fact(record, target=_need(record, "target_new", "str"), previous=previous, **more)


def _question(field: str, asked: Any, answer: Any) -> Probe:
    """Build a question of Natural Questions as ROME and MEMIT ask it: with its prefix, "nq question: who sang it?"."""
    if not isinstance(asked, str):
        raise FactError(f"{field} must be text, found {show(asked)}")
    question = asked.rstrip()
    return _probe(question if question.endswith("?") else question + "?", answer)


def _need(record: Record, *path: str) -> Any:
    """Return the value at `path`. Raises FactError that names the missing field."""
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
    """Flatten a value that may be text, a list, or a list of lists of aliases."""
    if value is None or value == "":
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(item for inner in value for item in _listed(inner))
    return (value,)


def _first(value: Any) -> Any:
    """Return the first item of `_listed`; None where there is none."""
    return next(iter(_listed(value)), None)


def _probe(prompt: Any, answers: Any, kind: str | None = None) -> Probe:
    """Return a prompt with its answers: the first is the target, the others its aliases."""
    return Probe(prompt, _first(answers), kind, _listed(answers)[1:])
