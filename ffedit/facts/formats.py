"""Read facts from a record of any shape, by the names of its fields.

`synonyms.NAMES` gives the role of each name, at any depth, and `values.py` reads its value. If there are several
answers, the first is the target, as in the published code, and the others are its aliases.

Nothing is dropped silently: `Parsed.unread` lists the fields that were not read, and a note names each value that was
read differently from how it is written. A record that cannot be used raises a FactError of one line, with the field.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from ffedit.errors import FactError, meant
from ffedit.facts.fact import SLOT, Fact, Probe, show
from ffedit.facts.languages import in_language
from ffedit.facts.mentions import find_mention, nearest
from ffedit.facts.shapes import OF_CASE, edits_of, in_one_prompt, is_case
from ffedit.facts.synonyms import FIELDS, NAMES, TEXTS, normal, role_of
from ffedit.facts.text import occurrences
from ffedit.facts.values import STOPS, Record, at, bare, entries, is_blank, key_of, texts_of, with_slot

NATURAL_QUESTION = "nq question: "  # in front of the questions of Natural Questions in MEND's data
QUESTION_MARKS = ("?", "？", "؟")
SHORTEST_PREFIX = 3  # fewest letters with which both a field of prompts and the field of their answers begin
MOST_DIGITS = 10  # of an occurrence that is written as text
PROBE_FIELDS = frozenset(field.name for field in dataclasses.fields(Probe))
# Roles of a prompt and of its answer in an object that holds both.
ASKING = ("paraphrases", "neighbors", "portability", "locality")
ANSWERING = ("target", "previous", "answer", *(f"{role} answers" for role in ASKING))

UNNAMED = "FIELD"  # placeholder in a suggested `--map`, where no field fits the role
NO_SUBJECT = (
    "no subject is named, so the whole prompt is the subject and is edited at its last token; other wordings will "
    "seldom give the new object (--map subject=FIELD names a subject)"
)
OTHER_FORM = "the subject is taken in the form that its prompt has"
ENDED = "the prompt ends in its object, and is asked without it"
BARE = "a full stop or special token after an object is left out"
UNANSWERED = "portability prompts without an answer were left out"
REPLACED = "Forgetfulness prompts that ask for the replaced object were left out"
TOGETHER = "multi-hop questions are asked only if all {} edits of their case are made together"


class Note(str):
    """Note on a value read differently from how it is written, with an `example`; notes are compared by words."""

    example: str

    def __new__(cls, words: str, example: str) -> Note:
        """Return a note of these words."""
        note = super().__new__(cls, words)
        note.example = example
        return note


@dataclass(frozen=True)
class Parsed:
    """Facts of one record, notes on values read differently from how they are written, and unread fields."""

    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """Description of the records by the user. Raises FactError for a field that a fact does not have.

    - `fields`: for a field of `Fact`, the name of the records' field for it, with dots into nested records.
    - `language`: the language to write, if records have several; the others become `cross_lingual`.
    - `need_targets`: whether a record without a new object is refused.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    need_targets: bool = False

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in FIELDS:
                raise FactError(f"a fact has no field {name!r}{meant(name, FIELDS)}; known are {', '.join(FIELDS)}")


ANY = Shape()


def parse_record(record: object) -> Fact:
    """Read a record of one fact. Raises FactError as `parse` does, and for a record of several facts."""
    facts = parse(record).facts
    if len(facts) != 1:
        raise FactError(f"the record holds {len(facts)} facts, expected one; read the file with read_facts")
    return facts[0]


def parse(record: object, shape: Shape = ANY) -> Parsed:
    """Read one record. Raises FactError where no prompt is recognised in it, and for a bad fact."""
    if not isinstance(record, Mapping):
        raise FactError(f"expected an object, found {show(record)}", kind="no object")
    record, translations = in_language(record, shape.language)
    try:
        readings = [_Reading(in_one_prompt(edit), shape) for edit in edits_of(record)]
        facts = [reading.fact() for reading in readings]
    except RecursionError:
        raise FactError("the record is nested too deeply; expected texts, or lists of texts") from None
    notes = [note for reading in readings for note in reading.notes]
    unread = [name for reading in readings for name in reading.unread]
    if is_case(record):
        unread += [name for name in record if name not in OF_CASE]
        if len(facts) > 1 and facts[-1].portability:
            notes.append(TOGETHER.format(len(facts)))
    for language, translation in translations.items():
        try:
            fact = _Reading(translation, ANY).fact()
            texts = (fact.text, *fact.texts("paraphrases"))
            probes = tuple(Probe(text, fact.new_object, language, fact.target_aliases) for text in texts)
            facts[0] = dataclasses.replace(facts[0], cross_lingual=facts[0].cross_lingual + probes)
        except (FactError, RecursionError) as error:
            notes.append(Note(f"the texts in {language} cannot be asked", str(error)))
    return Parsed(tuple(facts), tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(unread)))


class _Reading:
    """Fields of one record by their roles, and the fact that they make."""

    def __init__(self, record: Record, shape: Shape) -> None:
        self.record, self.shape = record, shape
        self.notes: list[str] = []
        self.unread: list[str] = []
        self.forms: list[str] = []  # of the subject: as named, and as it stands in the prompt
        ranked: dict[str, list[tuple[tuple[int, int], str, Any]]] = {}
        mapped = tuple(f"{path}." for path in shape.fields.values())
        for path, value in entries(record):
            name, role = ".".join(path), role_of(path)
            if f"{name}.".startswith(mapped):  # the field itself, or a part of it
                continue
            if role is not None and role[0] not in shape.fields:
                ranked.setdefault(role[0], []).append(((role[1], len(path)), name, value))
            else:
                self.unread.append(name)
        # For each role its fields, as (name, value), the preferred one first.
        self.fields: dict[str, list[tuple[str, Any]]] = {
            role: [(name, value) for _, name, value in sorted(candidates, key=lambda entry: entry[0])]
            for role, candidates in ranked.items()
        }
        self.fields |= {role: [(path, at(record, path))] for role, path in shape.fields.items()}
        self._take_object_from_statement()

    def fact(self) -> Fact:
        prompts = self._texts("prompt")
        if not prompts:
            raise FactError(f"unknown format: no field is recognised as a prompt{self._hint()}", kind="unknown format")
        if not isinstance(prompts[0], str):
            raise FactError(f"prompt must be text, found {show(prompts[0])}")
        target, previous, aliases = self._objects(prompts[0])
        if target is None and self.shape.need_targets:
            raise FactError(
                f"{show(prompts[0])} has no new object; give a target (only locate works without one){self._hint()}",
                kind="no new object",
            )
        subject, prompt = self._subject(self._without_object(with_slot(prompts[0]), target))
        occurrence = self._first("occurrence", 0)
        if isinstance(occurrence, str) and occurrence.isdecimal() and len(occurrence) <= MOST_DIGITS:
            occurrence = int(occurrence)
        fact = Fact(
            subject,
            prompt,
            target,
            previous,
            relation=self._first("relation"),
            case_id=self._first("case_id"),
            occurrence=occurrence,
            target_aliases=(*aliases, *self._texts("target_aliases")) if target is not None else (),
            paraphrases=_prompts(*prompts[1:], *self._texts("paraphrases")),
            generation=_prompts(*self._texts("generation")),
            references=self._texts("references"),
            also=_prompts(*self._texts("also")),
            neighbors=self._probes("neighbors"),
            keep=self._probes("keep"),
            cross_lingual=self._probes("cross_lingual"),
        )
        return self._with_probes(fact)

    def _texts(self, role: str) -> tuple[Any, ...]:
        """Return the texts of a role: of all its fields if it is one of `TEXTS`, else of its first filled field."""
        fields = self.fields.get(role, ())
        if role in TEXTS:
            return tuple(text for _, value in fields for text in _texts_by_kind(value))
        filled = [(name, texts) for name, value in fields if (texts := texts_of(value))]
        self.unread += [name for name, _ in filled[1:]]
        return filled[0][1] if filled else ()

    def _first(self, role: str, default: Any = None) -> Any:
        return next(iter(self._texts(role)), default)

    def _refuse_blank(self, role: str) -> None:
        """Refuse a role that has a field of empty text; null and NaN count as no field."""
        if any(is_blank(value) for _, value in self.fields.get(role, ())):
            raise FactError(f"{role} is empty; expected some text", kind=f"an empty {role}")

    def _take_object_from_statement(self) -> None:
        """Take new and old object from whole statements beside the prompt (RippleEdits), unless a field has them."""
        prompts = [(name, value) for name, value in self.fields.get("prompt", ()) if isinstance(value, str)]
        if len(prompts) < 2 or "target" in self.fields or "answer" in self.fields:
            return
        statements = sorted(prompts, key=lambda entry: entry[0].count("."))  # the old fact is nested in the new one
        name, prompt = _asked_by_both(statements) or min(prompts, key=lambda entry: len(entry[1]))
        objects = [(path, text.removeprefix(prompt)) for path, text in statements if text.startswith(f"{prompt} ")]
        if objects:
            self.fields |= {"prompt": [(name, prompt)], "target": objects[:1], "previous": objects[1:]}

    def _objects(self, prompt: str) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the new object, the old one and other names of the new one; None for an object that is not named.

        The `answer` of a record is its new object if it names no other (ROME's zsRE), and else the old one, if it
        differs (MEND's zsRE, whose new object is `alt`).
        """
        new, old, answers = (self._names(role, prompt) for role in ("target", "previous", "answer"))
        if not new and not answers:
            self._refuse_blank("target")
        (new_field, names), *others = new or answers or [("", (None,))]
        target, same = names[0], [(name, texts) for name, texts in answers if texts[0] == names[0]]
        old += [(name, texts) for name, texts in answers if texts[0] != target and isinstance(texts[0], str)]
        (old_field, previous), *_ = old or [("", (None,))]
        read = {new_field, old_field, *(name for name, _ in same)}
        self.unread += [name for name, _ in (*others, *answers, *old) if name not in read]
        self.unread += [f"{old_field}, further names"] if len(previous) > 1 else []
        return target, previous[0], (*names[1:], *(text for _, texts in same for text in texts))

    def _names(self, role: str, prompt: str) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the fields of a role that name an object, without special tokens and full stops behind the names."""
        named = []
        for field_name, value in self.fields.get(role, ()):
            written = texts_of(value)
            names = tuple(bare(name, prompt) if isinstance(name, str) else name for name in written)
            if any(isinstance(name, str) and name.strip() != short for name, short in zip(written, names, strict=True)):
                self.notes.append(BARE)
            if names := tuple(name for name in names if name != ""):
                named.append((field_name, names))
        return named

    def _without_object(self, prompt: str, target: Any) -> str:
        """Cut the object off a prompt that ends in it, as a statement does."""
        whole = prompt.rstrip(" .")
        if not isinstance(target, str) or not whole.endswith(f" {target}"):
            return prompt
        self.notes.append(ENDED)
        return whole.removesuffix(target).rstrip()

    def _subject(self, prompt: str) -> tuple[Any, str]:
        """Return the subject as it stands in the prompt, and the prompt, with {} for a subject in another form."""
        subject = self._first("subject")
        if subject is None:
            self._refuse_blank("subject")
            if SLOT in prompt:
                why = f"prompt {show(prompt)} has {{}}, and no subject is named{self._hint()}"
                raise FactError(why, kind="no subject")
            self.notes.append(NO_SUBJECT)
            self.forms = [prompt.strip()]
            return prompt.strip(), prompt
        if not isinstance(subject, str):
            return subject, prompt
        subject = subject.strip()
        self.forms = [subject]
        if SLOT in prompt or any(occurrences(prompt, subject)):
            return subject, prompt
        span = find_mention(prompt, subject)
        if span is None:
            alike = nearest(prompt, subject)
            raise FactError(
                f"prompt {show(prompt)} has neither {{}} nor the subject {show(subject)}"
                f"{'' if alike is None else f' (nearest is {show(alike)})'}; put {{}} where the subject stands",
                kind="no place for the subject",
            )
        mention = prompt[slice(*span)]
        self.forms.append(mention)
        self.notes += [Note(OTHER_FORM, f"{show(subject)} as {show(mention)}")] if mention != subject else []
        return mention, f"{prompt[: span[0]]}{SLOT}{prompt[span[1] :]}"

    def _probes(self, role: str, subject: str = SLOT) -> tuple[Probe, ...]:
        """Return the probes of a role; those grouped by kind have `subject` in their slots, as data sets have it."""
        fields, answers = self.fields.get(role, []), list(self.fields.get(f"{role} answers", []))
        probes: list[Probe] = []
        for name, value in fields:
            grouped = isinstance(value, Mapping)
            kind = name.rpartition(".")[2] if grouped and normal(name) != role else None
            field_probes = self._probes_of(name, value, _answers_to(name, answers, len(fields) == 1), kind)
            probes += [probe.filled(subject) for probe in field_probes] if grouped else field_probes
        self.unread += [name for name, _ in answers]
        return tuple(probes)

    def _probes_of(self, name: str, value: Any, answers: Any = None, kind: str | None = None) -> list[Probe]:
        """Return the probes of a field of prompts with `answers`, of objects with both, or of either by kind."""
        if isinstance(value, Probe):
            return [value]
        if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping | Probe) for item in value):
            return [probe for item in value for probe in self._probes_of(name, item, None, kind)]
        if not isinstance(value, Mapping):
            return _paired(name, value, answers, kind)
        if isinstance(value.get("prompt"), str) and set(value) <= PROBE_FIELDS:
            aliases = texts_of(value.get("aliases"))
            if isinstance(answers := value.get("target"), list | tuple):
                value, aliases = {**value, "target": next(iter(answers), None)}, (*answers[1:], *aliases)
            return [Probe.of({"kind": kind, **value, "aliases": aliases})]
        answer_key = key_of(value, ANSWERING)
        prompt_key = key_of(value, ("prompt",)) or (answer_key and key_of(value, ASKING))
        if prompt_key is not None or answer_key is not None:
            prompts = texts_of(value.get(prompt_key))
            read = (prompt_key, answer_key) if prompts else (prompt_key,)
            self.unread += [f"{name}.{key}" for key in value if key not in read]
            return _paired(name, prompts, value.get(answer_key), kind)
        if "test_queries" in value:  # RippleEdits: queries with the condition under which they count
            return self._probes_of(name, value["test_queries"], None, kind)
        return [p for key, group in value.items() for p in self._probes_of(f"{name}.{key}", group, None, str(key))]

    def _with_probes(self, fact: Fact) -> Fact:
        """Add the probes of what follows from a fact, and sort those of what must stay by their subjects.

        Files use "locality" for other relations of the subject (`same_subject`), for other subjects (`neighbors`) and
        for unrelated questions: Natural Questions, recognised by their prefix, and prompts without an answer.
        KnowEdit's Forgetfulness supposes that an edit adds an object to a list. A probe of it whose answer is the
        object that this edit replaces is left out, because keeping that object would be a failure.
        """
        groups: dict[str, list[Probe]] = {"neighbors": [], "same_subject": [], "locality": []}
        by_kind = {normal(name): isinstance(value, Mapping) for name, value in self.fields.get("locality", ())}
        for probe in self._probes("locality"):
            filled = probe.filled(fact.subject)
            about_subject = any(form.casefold() in filled.prompt.casefold() for form in self.forms)
            if probe.kind == "Forgetfulness" and probe.target and fact.previous in (probe.target, *probe.aliases):
                self.notes.append(REPLACED)
            elif filled.prompt.startswith(NATURAL_QUESTION) or "loc" in by_kind:
                asked = probe.prompt.rstrip()  # as ROME and MEMIT ask: "nq question: who sang it?"
                asked += "" if asked.endswith(QUESTION_MARKS) else "?"
                groups["locality"].append(dataclasses.replace(probe, prompt=asked))
            elif by_kind.get("locality") is False:  # ffedit's own form
                groups["locality"].append(probe)
            elif about_subject and (probe.kind is not None or probe.target is None):
                groups["same_subject"].append(filled)
            else:
                groups["locality" if probe.target is None else "neighbors"].append(filled)
        portability = self._probes("portability", fact.subject)
        if any(probe.target is None for probe in portability):
            self.notes.append(UNANSWERED)
        return dataclasses.replace(
            fact,
            neighbors=(*fact.neighbors, *groups["neighbors"]),
            same_subject=(*self._probes("same_subject"), *groups["same_subject"]),
            locality=tuple(groups["locality"]),
            portability=tuple(probe for probe in portability if probe.target is not None),
        )

    def _hint(self) -> str:
        """Return the end of a refusal: the fields of the record, and the `--map` that would most likely read them."""
        names = ", ".join(".".join(path) for path, _ in entries(self.record)) or "none"
        listed, guessed = f"; found the fields {show(names)}", self._guess()
        if guessed.get("prompt") == UNNAMED and "subject" in self.fields:
            return f"{listed}; add a field prompt that the object completes, with {{}} for the subject"
        if all(name == UNNAMED for name in guessed.values()):
            return listed
        option = ",".join(f"{role}={name}" for role, name in guessed.items())
        return f"{listed}; try --map {shlex.quote(option)}"

    def _guess(self) -> dict[str, str]:
        """Guess the fields of missing roles: the longest text, the longest in it, and a name like a target's."""
        texts = {".".join(path): str(items[0]) for path, value in entries(self.record) if (items := texts_of(value))}
        recognised = {role: fields[0][0] for role, fields in self.fields.items() if fields}
        guessed: dict[str, str] = {}

        def free() -> list[str]:
            return [name for name in texts if name not in (*recognised.values(), *guessed.values())]

        if "prompt" not in recognised:
            guessed["prompt"] = max(free(), key=lambda name: len(texts[name]), default=UNNAMED)
        prompt = texts.get((recognised | guessed)["prompt"], "")
        inside = [name for name in free() if texts[name].strip() in prompt]
        if "subject" not in recognised and inside:
            guessed["subject"] = max(inside, key=lambda name: len(texts[name]))
        if "target" not in recognised and "answer" not in recognised:
            names = f"{NAMES['target']} {NAMES['answer']}".split()
            alike = {name: max(SequenceMatcher(None, normal(name), n).ratio() for n in names) for name in free()}
            guessed["target"] = max(alike, key=alike.__getitem__, default=UNNAMED)
        return {role: UNNAMED if normal(name).endswith(("_id", "_ids")) else name for role, name in guessed.items()}


def _asked_by_both(statements: list[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the prompt of two statements, a new one and an old one inside it, that differ in their objects only.

    It ends before the capitals in which both objects may begin: "… is United Kingdom." and "… is United States."
    """
    (name, new), (old_name, old), *others = statements
    *above, last = name.split(".")
    *old_above, old_last = old_name.split(".")
    if others or last != old_last or len(above) == len(old_above) or not (new.endswith(STOPS) and old.endswith(STOPS)):
        return None
    pairs = zip(new.split(" "), old.split(" "), strict=False)
    words = [word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    while words and words[-1][:1].isupper():
        words.pop()
    return (name, " ".join(words)) if words else None


def _prompts(*texts: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(map(with_slot, texts)))


def _texts_by_kind(value: Any) -> tuple[Any, ...]:
    texts = texts_of(value)
    if isinstance(value, Mapping) and not texts:
        return tuple(text for group in value.values() for text in _texts_by_kind(group))
    return texts


def _answers_to(name: str, answers: list[tuple[str, Any]], only: bool) -> Any:
    """Remove from `answers` those of a field, by its name ("2hop_answer" to "2hop_question"); return them, or None."""
    pairs = [zip(normal(name), normal(other), strict=False) for other, _ in answers]
    common = [len([*takewhile(lambda pair: pair[0] == pair[1], pair)]) for pair in pairs]
    if not common or (max(common) < SHORTEST_PREFIX and not only):
        return None
    return answers.pop(common.index(max(common)))[1]


def _paired(name: str, value: Any, answers: Any, kind: str | None) -> list[Probe]:
    """Join prompts with their answers, one to one or all to each; a prompt with several answers accepts any."""
    prompts = texts_of(value)
    if unfit := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise FactError(f"{name} must be text, found {show(unfit[0])}")
    rows = list(answers) if isinstance(answers, (list, tuple)) and min(len(answers), len(prompts)) > 1 else None
    if rows is not None and len(rows) != len(prompts):
        raise FactError(f"{name} has {len(prompts)} prompts and {len(rows)} answers to them; one for each was expected")
    by_prompt: dict[str, list[Any]] = {}
    for prompt, answer in zip(prompts, rows or [answers] * len(prompts), strict=True):
        by_prompt.setdefault(prompt, []).extend(texts_of(answer))
    return [
        Probe(with_slot(prompt), next(iter(names), None), kind, tuple(names[1:])) for prompt, names in by_prompt.items()
    ]
