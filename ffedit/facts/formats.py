"""From a record of any shape to facts, by the names of its fields.

`synonyms.NAMES` says what each name stands for, wherever it is nested; a value may be text, a list, a list of lists of
aliases, {"str": text}, or prompts with their answers. Of several answers the first is the target, as in the published
code, and the others are its aliases. Shapes that say something else than their names do are first rewritten into plain
names (`REWRITES`): MQuAKE's lists of edits, conversations, records in several languages.

Nothing is lost in silence: what a record holds besides is listed in `Parsed.unread`, and what was read otherwise than
it is written is named in a note. A record that cannot be used raises FactError, one line, that names the field.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, TypeAlias

from ffedit.errors import FactError, meant
from ffedit.facts.fact import MULTI_HOP, SLOT, Fact, Probe, show
from ffedit.facts.mentions import find_mention, nearest
from ffedit.facts.synonyms import CLOSED, NAMES, RANKS, TEXT_NAMES, normal, role_of
from ffedit.facts.text import occurrences

Record: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str, ...]

# Roles with one text, and those with texts; all others are prompts with answers.
SCALARS = ("subject", "prompt", "target", "previous", "answer", "relation", "case_id", "occurrence")
TEXTS = ("target_aliases", "paraphrases", "generation", "references", "also")
PROBES = ("neighbors", "same_subject", "portability", "locality", "keep", "cross_lingual")
# Objects within objects that are looked into.
DEEPEST = 8
PROBE_FIELDS = frozenset(field.name for field in dataclasses.fields(Probe))
# Prefix of the questions of Natural Questions in MEND's data.
NATURAL_QUESTION = "nq question: "
# What other tools write for the subject, and for the object at the end of a prompt (LAMA).
SLOTS = re.compile(r"\{(?:subject|entity|0)\}|\[(?:X|subject)\]|<subject>|%s")
OBJECT_SLOT = re.compile(r"\s*\[Y\]\s*[.?!]?\s*$")
# A special token behind an object, or in its place.
SPECIAL = re.compile(r"\s*(?:<\|[^|<>]*\|>|</?s>|<(?:eos|bos|pad|unk|end_of_turn)>|\[(?:EOS|SEP|PAD|UNK)\])$", re.I)
# The last word of an object whose full stop is its own; so is the stop behind a single letter, and of a sentence.
ABBREVIATED = frozenset("inc ltd co corp jr sr st bros etc dept univ".split())
MOST_WORDS = 4
# What is read of a case of MQuAKE.
OF_CASE = ("case_id", "requested_rewrite", "questions", "new_answer", "new_answer_alias", "new_single_hops")
TURNS = ("messages", "conversations", "conversation", "dialogue", "turns")
ASKS, ANSWERS = frozenset({"user", "human", "prompter"}), frozenset({"assistant", "gpt", "model", "bot"})

NO_SUBJECT = (
    "no subject is named: the whole prompt is the subject and its last token the place, so that other wordings will "
    "seldom give the new object; --map subject=FIELD names one"
)
OTHER_FORM = "the subject is taken in the form that its prompt has"
ENDED = "the prompt ends in its object, and is asked without it"
BARE = "a full stop or special token behind an object is left out"
UNANSWERED = "portability prompts without an answer were left out"
REPLACED = "Forgetfulness prompts that ask for what the edit replaces were left out"
TOGETHER = "multi-hop questions are asked where all {} edits of their case are made together"


class Note(str):
    """A few words on what was read otherwise than it is written, with an `example`; equal to others of these words."""

    example: str

    def __new__(cls, words: str, example: str = "") -> Note:
        """Return the words."""
        note = super().__new__(cls, words)
        note.example = example
        return note


@dataclass(frozen=True)
class Parsed:
    """Facts of one record, notes on what was read otherwise than written, and the fields not read."""

    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What the user says of the records.

    - `fields`: a field of `Fact` -> the name of the records' field for it, with dots into nested records.
    - `language`: the one that is written, of records in several; the others are asked.
    - `need_targets`: whether a record without a new object is refused.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    need_targets: bool = False

    def __post_init__(self) -> None:
        known = [name for name in NAMES if name != "answer" and " " not in name]
        for name, path in self.fields.items():
            if name not in known:
                raise FactError(f"a fact has no field {name!r}{meant(name, known)}; known are {', '.join(known)}")
            if not path:
                raise FactError(f"the name of the field for {name} is empty; give {name}=FIELD")


def parse_record(record: object) -> Fact:
    """Read a record of one fact. Raises FactError as `parse` does, and for a record of several."""
    facts = parse(record).facts
    if len(facts) != 1:
        raise FactError(f"the record holds {len(facts)} facts, expected one; read the file with read_facts")
    return facts[0]


def parse(record: object, shape: Shape | None = None) -> Parsed:
    """Read one record. Raises FactError where no prompt is recognised in it, and for a bad fact."""
    shape = shape or Shape()
    if not isinstance(record, Mapping):
        raise FactError(f"expected an object, found {show(record)}", kind="no object")
    record, others = in_language(record, shape.language)
    facts, notes, unread = [], [], []
    for part in edits_of(record):
        reading = _Reading(turns(part), shape)
        facts.append(reading.fact())
        notes += reading.notes
        unread += reading.unread
    if others:
        asked = tuple(_asked_in(language, other, notes) for language, other in others.items())
        facts[-1] = dataclasses.replace(facts[-1], cross_lingual=sum(asked, facts[-1].cross_lingual))
    if len(facts) > 1 and record.get("questions"):
        notes.append(TOGETHER.format(len(facts)))
    if _is_case(record):
        unread += [name for name in record if name not in OF_CASE]
    return Parsed(tuple(facts), tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(unread)))


# Shapes that are rewritten into plain names --------------------------------------------------------


def in_language(record: Record, language: str | None) -> tuple[Record, Record]:
    """Return the part of a record in `language`, and the parts in the others by language.

    A record of one part is that part. Raises FactError for a record of several without a choice.
    """
    parts = {key: value for key, value in record.items() if isinstance(value, Mapping) and role_of((str(key),)) is None}
    whole = {str(key).casefold(): key for key, value in parts.items() if _is_fact(value) and normal(str(key)) not in CLOSED}
    if len(whole) < 2:
        return record, {}
    names = ", ".join(map(str, whole.values()))
    if language is None or language.casefold() not in whole:
        asked = "" if language is None else f", and not in {language}"
        first = next(iter(whole.values()))
        raise FactError(f"the record is in {names}{asked}; choose one: --language {first}", kind="no language chosen")
    chosen = whole.pop(language.casefold())
    rest = {key: value for key, value in record.items() if key != chosen and key not in whole.values()}
    return {**rest, **record[chosen]}, {key: record[key] for key in whole.values()}


def _is_fact(record: Record) -> bool:
    """Return whether a record has a prompt and an object."""
    roles = {ranked[0] for path, _ in _entries(record) if (ranked := role_of(path)) is not None}
    return "prompt" in roles and bool(roles & {"target", "answer"})


def edits_of(record: Record) -> Iterator[Record]:
    """Yield the edits of a record of MQuAKE (arXiv 2305.14795), each with its own question; or the record itself.

    The new answer to a case's questions follows from its edits: portability of the last one, which needs the others
    to be edited as well. The questions are three phrasings of one, and a case counts once, as answered if any phrasing
    is (section 3.3). Aliases of the new answer are `new_answer_alias`; those of an edit's object are in the single
    hop that asks for it.
    """
    if not _is_case(record):
        yield record
        return
    if not (rewrites := record["requested_rewrite"]):
        raise FactError("requested_rewrite is empty; expected at least one edit")
    case, names, questions = record.get("case_id"), texts_of(record.get("new_answer_alias")), record.get("questions")
    hops = [_object("an item of new_single_hops", hop) for hop in _items(record.get("new_single_hops"))]
    needs: list[str] = []
    for number, item in enumerate(rewrites, start=1):
        request = dict(_object("an item of requested_rewrite", item))
        question = request.pop("question", None)
        new = texts_of(request.get("target_new"))
        aliases = [hop.get("answer_alias") for hop in hops if (hop.get("question"), hop.get("answer")) == (question, *new[:1])]
        request |= {"paraphrases": question, "target_aliases": aliases}
        if case is not None:
            request["case_id"] = case if len(rewrites) == 1 else f"{case}.{number}"
        if number == len(rewrites) and questions:
            if "new_answer" not in record:
                raise FactError("new_answer is missing")
            answer = texts_of(record["new_answer"])[:1]
            request["portability"] = [
                Probe(text, *answer, kind=MULTI_HOP, aliases=names, needs=tuple(needs)) for text in texts_of(questions)
            ]
        subject = request.get("subject")
        if isinstance(subject, str) and isinstance(request.get("prompt"), str):
            needs.append(request["prompt"].replace(SLOT, subject.strip()))
        yield request


def _is_case(record: Record) -> bool:
    return isinstance(record.get("requested_rewrite"), (list, tuple))


def turns(record: Record) -> Record:
    """Rewrite what has its prompt in several fields: a conversation, an instruction with its input, a prefix and suffix."""
    name = next((key for key in record if normal(str(key)) in TURNS and isinstance(record[key], (list, tuple))), None)
    if name is not None:
        rest = {key: value for key, value in record.items() if key != name}
        return {**rest, **_conversation(name, record[name])}
    if texts_of(record.get("instruction")) and texts_of(record.get("input")):
        rest = {key: value for key, value in record.items() if key not in ("instruction", "input")}
        return {**rest, "prompt": f"{record['instruction']}\n{record['input']}"}
    if isinstance(record.get("relation_prefix"), str) and isinstance(record.get("relation_suffix"), str):
        # The hub's `counterfact-tracing`: the subject includes the space in front of it.
        space = " " if str(record.get("subject")).startswith(" ") else ""
        prompt = f"{record['relation_prefix']}{space}{SLOT}{record['relation_suffix']}"
        return {key: value for key, value in record.items() if not key.startswith("relation_") or key == "relation_id"} | {
            "prompt": prompt
        }
    return record


def _conversation(name: str, said: Sequence[Any]) -> Record:
    """Return question and answer of a conversation, as {"role", "content"} or {"from", "value"}."""
    by: dict[str, list[Any]] = {"prompt": [], "target": []}
    for turn in said:
        speaker = str(_object(f"a turn of {name}", turn).get("role", turn.get("from"))).casefold()
        text = turn.get("content", turn.get("value"))
        if speaker in ASKS | ANSWERS:
            by["prompt" if speaker in ASKS else "target"].append(text)
    if len(by["prompt"]) != 1 or len(by["target"]) != 1:
        found = f"{len(by['prompt'])} questions and {len(by['target'])} answers"
        raise FactError(f"{name} has {found}; one question with one answer was expected", kind="no single question")
    return {"prompt": by["prompt"][0], "target": by["target"][0]}


def _asked_in(language: str, record: Record, notes: list[str]) -> tuple[Probe, ...]:
    """Return the prompts of a fact in another language, with its object there; none, and a note, where it has none."""
    try:
        fact = _Reading(record, Shape()).fact()
        texts = (fact.text, *fact.paraphrase_texts)
        return tuple(Probe(text, fact.new_object, language, fact.target_aliases) for text in texts)
    except FactError as error:
        notes.append(f"what is in {language} cannot be asked: {error}")
        return ()


# A record in plain names -------------------------------------------------------------------------


class _Reading:
    """Fields of one record by their roles, and the fact that they make."""

    def __init__(self, record: Record, shape: Shape) -> None:
        self.record, self.shape = record, shape
        self.notes: list[str] = []
        self.unread: list[str] = []
        ranked: dict[str, list[tuple[int, int, str, Any]]] = {}
        mapped = set(shape.fields.values())
        for path, value in _entries(record):
            name, found = ".".join(path), role_of(path)
            if name in mapped:
                continue
            if found is None or found[0] in shape.fields:
                self.unread.append(name)
            else:
                ranked.setdefault(found[0], []).append((found[1], len(path), name, value))
        for role, path in shape.fields.items():
            ranked[role] = [(0, 0, path, _at(record, path))]
        self.fields = {
            role: [(name, value) for _, _, name, value in sorted(found, key=lambda entry: entry[:2])]
            for role, found in ranked.items()
        }

    def fact(self) -> Fact:
        """Return the fact. Raises FactError where it has no prompt, and as `Fact` does."""
        found = self._texts("prompt")
        if not found:
            raise FactError(f"unknown shape: no field is known as a prompt{self._hint()}", kind="unknown shape")
        if not all(isinstance(text, str) for text in found):
            raise FactError(f"prompt must be text, found {show(found[0])}")
        prompt, *wordings = (OBJECT_SLOT.sub("", _slot(text)) for text in found)
        target, previous, aliases = self._objects(prompt)
        if target is None and self.shape.need_targets:
            raise FactError(
                f"{show(prompt)} has no new object; give a target (without one: locate only){self._hint()}",
                kind="no new object",
            )
        prompt = self._without_object(prompt, target)
        subject, prompt = self._subject(prompt)
        occurrence = self._texts("occurrence")[:1]
        fact = Fact(
            subject,
            prompt,
            target,
            previous,
            relation=next(iter(self._texts("relation")), None),
            case_id=next(iter(self._texts("case_id")), None),
            occurrence=int(text) if occurrence and (text := str(occurrence[0])).isdecimal() else 0,
            target_aliases=(*aliases, *self._texts("target_aliases")) if target is not None else (),
            paraphrases=_unique((*wordings, *self._texts("paraphrases"))),
            **{role: _unique(self._texts(role)) for role in ("generation", "references", "also")},
            **{role: self._probes(role) for role in ("neighbors", "keep", "cross_lingual")},
        )
        return self._with_probes(fact)

    def _texts(self, role: str) -> tuple[Any, ...]:
        """Return the texts of a role: of one text, those of its first field that is not empty; else those of all."""
        filled = [(name, texts) for name, value in self.fields.get(role, ()) if (texts := texts_of(value))]
        if role in TEXTS:
            return tuple(text for _, texts in filled for text in texts)
        self.unread += [name for name, _ in filled[1:]]
        if not filled:
            self._check_blank(role)
        return filled[0][1] if filled else ()

    def _check_blank(self, role: str) -> None:
        """Refuse a role whose only fields are empty text; null and NaN are as good as no field."""
        if role in ("subject", "prompt", "target") and any(_is_blank(value) for _, value in self.fields.get(role, ())):
            raise FactError(f"{role} is empty; expected some text", kind=f"an empty {role}")

    def _objects(self, prompt: str) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the new object, the old one and other names of the new one; None for what is not named.

        The `answer` of a record is its new object where it names no other (zsRE's `alt`), and else the old one.
        """
        names = {
            role: [(name, names) for name, value in self.fields.get(role, ()) if (names := self._names(value, prompt))]
            for role in ("target", "previous", "answer")
        }
        new = names["target"] or names["answer"]
        if not new:
            self._check_blank("target")
        target, aliases = (new[0][1][0], new[0][1][1:]) if new else (None, ())
        aliases += tuple(name for _, answers in names["answer"] if answers[0] == target for name in answers)
        answers = [(n, answers) for n, answers in names["answer"] if answers[0] != target and isinstance(answers[0], str)]
        old = [*names["previous"], *answers]
        previous = old[0][1][0] if old else None
        if old and len(old[0][1]) > 1:
            self.unread.append(f"{old[0][0]}, further names")
        self.unread += [name for name, _ in (*new[1:], *old[1:]) if (name, _) not in (*new[:1], *old[:1])]
        return target, previous, aliases

    def _names(self, value: Any, prompt: str) -> tuple[Any, ...]:
        """Return names of an object without what stands behind them: special tokens, and the full stop of a sentence."""
        names = tuple(_bare(name, prompt) if isinstance(name, str) else name for name in texts_of(value))
        if any(isinstance(name, str) and name.strip() != bare for name, bare in zip(texts_of(value), names, strict=True)):
            self.notes.append(BARE)
        return tuple(name for name in names if name != "")

    def _without_object(self, prompt: str, target: Any) -> str:
        """Cut the object off a prompt that ends in it, as a statement does."""
        whole = prompt.rstrip(" .")
        if not isinstance(target, str) or not whole.endswith(f" {target}"):
            return prompt
        self.notes.append(ENDED)
        return whole.removesuffix(target).rstrip()

    def _subject(self, prompt: str) -> tuple[Any, str]:
        """Return the subject as it stands in the prompt, and the prompt, with {} where it stands in another form."""
        named = self._texts("subject")
        if not named:
            if SLOT in prompt:
                raise FactError(f"prompt {show(prompt)} has {{}}, and no subject is named{self._hint()}", kind="no subject")
            self.notes.append(NO_SUBJECT)
            return prompt.strip(), prompt
        subject = named[0].strip() if isinstance(named[0], str) else named[0]
        if not isinstance(subject, str) or SLOT in prompt or any(occurrences(prompt, subject)):
            return subject, prompt
        span = find_mention(prompt, subject)
        if span is None:
            alike = nearest(prompt, subject)
            raise FactError(
                f"prompt {show(prompt)} has neither {{}} nor the subject {show(subject)}"
                f"{'' if alike is None else f' (nearest is {show(alike)})'}; put {{}} where the subject stands",
                kind="no place for the subject",
            )
        found = prompt[slice(*span)]
        if found != subject:
            self.notes.append(Note(OTHER_FORM, f"{show(subject)} as {show(found)}"))
        return found, f"{prompt[: span[0]]}{SLOT}{prompt[span[1] :]}"

    def _probes(self, role: str, subject: str = SLOT) -> tuple[Probe, ...]:
        """Return the prompts of a role, each with its answers; those by kind with the subject in them, as published."""
        answers = self.fields.get(f"{role} answers", [])
        probes: list[Probe] = []
        for i, (name, value) in enumerate(self.fields.get(role, ())):
            grouped = isinstance(value, Mapping)
            kind = name.rpartition(".")[2] if grouped and normal(name) != role else None
            asked = probes_of(name, value, answers[i] if i < len(answers) else None, kind)
            probes += [probe.filled(subject) for probe in asked] if grouped else asked
        self.unread += [name for name, _ in answers[len(self.fields.get(role, ())) :]]
        return tuple(probes)

    def _with_probes(self, fact: Fact) -> Fact:
        """Add what follows from a fact, and sort what stays by what it is about.

        Files call "locality" what is about other relations of the subject (`same_subject`), about other subjects
        (`neighbors`), and about neither: questions of Natural Questions, known by their prefix, and prompts without an
        answer, which is the model's own then. Forgetfulness of KnowEdit supposes that an object is added to a list:
        where its answer is the very object that this edit replaces, keeping it would be failure, and it is left out.
        """
        follows = self._probes("portability", fact.subject)
        groups: dict[str, list[Probe]] = {"neighbors": [], "same_subject": [], "locality": []}
        own = any(name == "locality" and not isinstance(value, Mapping) for name, value in self.fields.get("locality", ()))
        zsre = any(normal(name) == "loc" for name, _ in self.fields.get("locality", ()))
        for probe in self._probes("locality"):
            filled = probe.filled(fact.subject)
            question = filled.prompt.startswith(NATURAL_QUESTION)
            if probe.kind == "Forgetfulness" and fact.previous in (probe.target, *probe.aliases) and probe.target:
                self.notes.append(REPLACED)
            elif own:
                groups["locality"].append(probe)
            elif question or zsre:
                groups["locality"].append(_question(probe))
            elif self._names_subject(filled.prompt, fact) and (probe.kind is not None or probe.target is None):
                groups["same_subject"].append(filled)
            else:
                groups["locality" if probe.target is None else "neighbors"].append(filled)
        if any(probe.target is None for probe in follows):
            self.notes.append(UNANSWERED)
        return dataclasses.replace(
            fact,
            neighbors=(*fact.neighbors, *groups["neighbors"]),
            same_subject=(*self._probes("same_subject"), *groups["same_subject"]),
            locality=tuple(groups["locality"]),
            portability=tuple(probe for probe in follows if probe.target is not None),
        )

    def _names_subject(self, prompt: str, fact: Fact) -> bool:
        names = (fact.subject, *self._texts("subject"))
        return any(name.casefold() in prompt.casefold() for name in names)

    def _hint(self) -> str:
        """Say which fields there are, and the `--map` that would most likely read them."""
        keys = ", ".join(".".join(path) for path, _ in _entries(self.record)) or "none"
        guessed = guess(self.record, {role: entries[0][0] for role, entries in self.fields.items() if entries})
        option = ",".join(f"{role}={name}" for role, name in guessed.items())
        return f"; found the fields {show(keys)}; try --map {shlex.quote(option)}"


def guess(record: Record, known: Mapping[str, str]) -> dict[str, str]:
    """Guess which fields are prompt, subject and target, for those that are not `known`; FIELD where none is like it.

    A prompt is the longest text, a subject a text that stands in the prompt, a target one whose name is most like a
    target's.
    """
    texts = {".".join(path): found[0] for path, value in _entries(record) if (found := texts_of(value))}
    texts = {name: text for name, text in texts.items() if isinstance(text, str)}
    free = [name for name in texts if name not in known.values()]
    guessed: dict[str, str] = {}
    if "prompt" not in known:
        guessed["prompt"] = max(free, key=lambda name: len(texts[name]), default="FIELD")
    prompt = texts.get(known.get("prompt", guessed.get("prompt", "")), "")
    free = [name for name in free if name not in guessed.values()]
    if "subject" not in known:
        inside = [name for name in free if texts[name].strip() and texts[name].strip() in prompt]
        if inside:
            guessed["subject"] = max(inside, key=lambda name: len(texts[name]))
            free.remove(guessed["subject"])
    if "target" not in known and "answer" not in known:
        guessed["target"] = max(free, key=_like_target, default="FIELD")
    return guessed


def _like_target(name: str) -> float:
    names = f"{NAMES['target']} {NAMES['answer']}".split()
    return max(SequenceMatcher(None, normal(name), known).ratio() for known in names)


# Values ------------------------------------------------------------------------------------------


def _entries(record: Record, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the fields of a record with their paths; objects are looked into, except those that are a value."""
    for key, value in record.items():
        path = (*above, *filter(None, str(key).split(".")))
        ranked = role_of(path) if path else None
        opens = isinstance(value, Mapping) and normal(str(key)) not in CLOSED and len(path) < DEEPEST
        if ranked is not None and not (opens and ranked[0] in SCALARS and not _has_text(value)):
            yield path, value
        elif opens and value:
            yield from _entries(value, path)
        else:
            yield path, value


def _has_text(value: Record) -> bool:
    return any(name in value for name in TEXT_NAMES)


def _at(record: Record, path: str) -> Any:
    """Return the value at a dotted path. Raises FactError where it is missing."""
    if path in record:
        return record[path]
    value: Any = record
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, (list, tuple)) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            names = [".".join(known) for known, _ in _entries(record)]
            raise FactError(f"there is no field {path!r}{meant(path, names)}", kind="a missing field")
    return value


def texts_of(value: Any) -> tuple[Any, ...]:
    """Flatten a value that may be text, a list, a list of lists of aliases, or objects that hold a text or a prompt."""
    if _is_missing(value) or (isinstance(value, str) and not value.strip()):
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(text for item in value for text in texts_of(item))
    if isinstance(value, Mapping):
        name = next((name for name in TEXT_NAMES if name in value), None) or _key(value, PROMPTING)
        held = () if name is None else texts_of(value[name])
        return (*held, *texts_of(value.get("aliases")))
    return (value,)


# What names a prompt, and an answer, where both stand in an object of their own.
PROMPTING = frozenset({"prompt", "paraphrases", "neighbors", "portability", "locality"})
ANSWERING = frozenset({"target", "previous", "answer", "portability answers", "locality answers", "neighbors answers"})


def probes_of(name: str, value: Any, answers: tuple[str, Any] | None = None, kind: str | None = None) -> list[Probe]:
    """Return the probes of a field: prompts, objects of a prompt and its answers, or either by kind.

    `answers` is the field that holds the answers to plain prompts: one for each, or one for all.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("prompt"), str) and set(value) <= PROBE_FIELDS:
            return [Probe.of({"kind": kind, **value} if kind else value)]
        says = _key(value, ANSWERING)
        asks = _key(value, frozenset({"prompt"})) or (says and _key(value, PROMPTING))
        if asks is not None:
            return _paired(name, value[asks], None if says is None else (says, value[says]), kind)
        return [probe for key, inner in value.items() for probe in probes_of(f"{name}.{key}", inner, None, str(key))]
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping | Probe) for item in value):
        items = [item if isinstance(item, Mapping | Probe) else {"prompt": item} for item in value]
        return [p for i in items for p in ([i] if isinstance(i, Probe) else probes_of(name, i, None, kind))]
    return _paired(name, value, answers, kind)


def _paired(name: str, asked: Any, answers: tuple[str, Any] | None, kind: str | None) -> list[Probe]:
    """Join prompts with their answers: lists of equal length one to one, else all answers to each prompt.

    A prompt that stands there with several answers accepts any of them.
    """
    prompts = texts_of(asked)
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise FactError(f"{name} must be text, found {show(prompt)}")
    said = None if answers is None else answers[1]
    if isinstance(said, (list, tuple)) and len(prompts) > 1 and len(said) > 1:
        if len(said) != len(prompts):
            raise FactError(f"{name} has {len(prompts)} prompts and {len(said)} answers to them; one for each was expected")
    else:
        said = [said] * len(prompts)
    by_prompt: dict[Any, list[Any]] = {}
    for prompt, answer in zip(prompts, said, strict=True):
        by_prompt.setdefault(prompt, []).extend(texts_of(answer))
    return [Probe(_slot(prompt), next(iter(names), None), kind, names[1:]) for prompt, names in by_prompt.items()]


def _key(value: Record, roles: frozenset[str]) -> str | None:
    """Return the first name of an object that has one of `roles` and holds texts."""
    ranked = [(key, RANKS.get(normal(str(key)).removeprefix("new_")) or RANKS.get(normal(str(key)))) for key in value]
    return next((key for key, found in ranked if found and found[0] in roles and _is_plain(value[key])), None)


def _is_plain(value: Any) -> bool:
    """Return whether a value is text, or a list without objects."""
    return not isinstance(value, Mapping) and not (
        isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value)
    )


def _question(probe: Probe) -> Probe:
    """Ask a question of Natural Questions as ROME and MEMIT do: with its prefix, "nq question: who sang it?"."""
    asked = probe.prompt.rstrip()
    return dataclasses.replace(probe, prompt=asked if asked.endswith(("?", "？", "؟")) else asked + "?")


def _unique(prompts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(map(_slot, prompts)))


def _slot(prompt: Any) -> Any:
    """Write {} for the subject where a file has another sign for it."""
    return SLOTS.sub(SLOT, prompt) if isinstance(prompt, str) else prompt


def _bare(name: str, prompt: str) -> str:
    """Return the name of an object without special tokens and the full stop behind it, unless that is its own."""
    text = name.strip()
    while found := SPECIAL.search(text):
        text = text[: found.start()].rstrip()
    words = text.removesuffix(".").removesuffix("。").split()
    if words == text.split() or not words or len(words) > MOST_WORDS or prompt.rstrip().endswith((".", "。")):
        return text
    own = words[-1].casefold() in ABBREVIATED or len(words[-1]) == 1 or any("." in word for word in words)
    return text if own else text[:-1].rstrip()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _object(name: str, value: object) -> Record:
    if not isinstance(value, Mapping):
        raise FactError(f"{name} must be an object, found {show(value)}")
    return value
