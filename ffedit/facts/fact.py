"""A fact: what a model should come to say about a subject, and what must not change with it.

An edit is specified in the field's usual terms (Meng et al. 2022, ROME, arXiv 2202.05262): a *prompt* about a *subject*
is to be continued by a new object (`target`) in place of the old one (`previous`). It is measured on paraphrases, on
what follows from it (`portability`), on other subjects of the relation (`neighbors`: specificity), on other facts of
the subject (`same_subject`: retention) and on unrelated questions (`locality`). Two kinds of prompts take part in the
edit instead, and are scored apart: `also` and `keep`.

The subject is located by characters, not by tokens, so that a tokenizer encodes the prompt once and as a whole.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ffedit.errors import EditError, FactError, choices
from ffedit.facts.text import occurrences
from ffedit.notebook import Displayed

SLOT = "{}"
# Kind of MQuAKE's questions: each has several phrasings, and counts as answered if any of them is.
MULTI_HOP = "multi-hop"

_SURROGATE = re.compile("[\ud800-\udfff]")
# Control characters that no text may contain: terminals act on them, and C strings end at NUL. Tabs and line ends are
# allowed, and so are marks of the direction of writing, which some scripts need; every output shows their code points.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def fill(template: str, subject: str) -> str:
    """Put `subject` in the slot `{}` of `template`; return a template without a slot unchanged."""
    return template.replace(SLOT, subject)


@dataclass(frozen=True)
class Probe:
    """Prompt and the answer expected after the edit: a new one in `portability` and `cross_lingual`, else the old one.

    `target` is that answer. None stands for the fact's `previous` object in `neighbors` (as CounterFact publishes
    them), and for whatever the model said before the edit in `same_subject`, `locality` and `keep`.
    `kind` is the data set's name for what the probe tests ("Reasoning", "Relation_Specificity").
    `aliases` are other names of the target, or other answers that the data set accepts as well: a metric that reads
    the model's free answer accepts any of them. `needs` are prompts of other facts that must be edited together with
    this one for the answer to follow (MQuAKE). Probes of the kind "multi-hop" that share target and `needs` ask one
    question, and one that is answered counts for all. Raises FactError for an empty prompt, target, kind or alias.
    """

    prompt: str
    target: str | None = None
    kind: str | None = None
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _text("a probe's prompt", self.prompt, strip=False))
        object.__setattr__(self, "target", _optional_text("a probe's target", self.target))
        object.__setattr__(self, "kind", _optional_text("a probe's kind", self.kind))
        object.__setattr__(self, "aliases", _aliases("a probe's aliases", self.aliases, self.target))
        object.__setattr__(self, "needs", _texts("a prompt", "a probe's needs", self.needs))

    @classmethod
    def of(cls, value: ProbeLike) -> Probe:
        """Read a probe given as a Probe, as its prompt, or as a mapping of its fields."""
        if isinstance(value, Probe):
            return value
        if isinstance(value, str):
            return cls(value)
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(value, Mapping) and "prompt" in value and set(value) <= set(names):
            return cls(**value)
        raise FactError(f"a probe must be a prompt or {{{', '.join(names)}}}, found {show(value)}")

    def filled(self, subject: str, target: str | None = None) -> Probe:
        """Return the probe with `subject` in its slot, if it has one, and `target` if it has none of its own."""
        answer = target if self.target is None else self.target
        return dataclasses.replace(self, prompt=fill(self.prompt, subject), target=answer)


ProbeLike: TypeAlias = "Probe | str | Mapping[str, Any]"


@dataclass(frozen=True, init=False)
class Fact(Displayed):
    """One fact to write into a model, with the prompts that measure the edit.

    - `subject`, `prompt`: the prompt carries one `{}` or the subject itself. In the second case `occurrence`
      (from 0) picks among the positions where the subject stands as a whole word; the first one by default.
    - `target`: the new object; None only where nothing is to be written (tracing sets; see `new_object`).
    - `target_aliases`: other names of the target. The edit writes `target`; as an answer, each of them is right.
    - `previous`: the object that the model is expected to know now.
    - `paraphrases`, `generation`: other prompts of the same fact, and prompts for free text about the
      subject; `{}` stands for the subject.
    - `neighbors`: probes about other subjects; `same_subject`: probes about other facts of this subject;
      `locality`: questions about anything else (of zsRE); all three should stay as they were.
    - `portability`: probes of what follows from the edit, each with its new answer (KnowEdit, MQuAKE).
    - `references`: texts about subjects that have the new object, to compare free text with (CounterFact).
    - `relation`, `case_id`: names from the data set, for reports only.
    - `keep`: probes whose answers the edit must not change; `also`: further wordings, each with `{}` or the subject in
      it, that must have the new object. The edit is optimised on both, so none of their prompts may measure it.
    - `cross_lingual`: the fact asked in other languages; each probe has the answer in the language that is its `kind`.

    White space around subject, target and previous is dropped; prompts stay as they are. The tokenizer decides how
    a prompt and its target are joined. Raises FactError, one line, for values that cannot be used.
    """

    subject: str
    prompt: str
    target: str | None = None
    previous: str | None = None
    paraphrases: tuple[str, ...] = ()
    neighbors: tuple[Probe, ...] = ()
    same_subject: tuple[Probe, ...] = ()
    generation: tuple[str, ...] = ()
    relation: str | None = None
    occurrence: int = 0
    case_id: str | None = None
    portability: tuple[Probe, ...] = ()
    references: tuple[str, ...] = ()
    locality: tuple[Probe, ...] = ()
    target_aliases: tuple[str, ...] = ()
    keep: tuple[Probe, ...] = ()
    also: tuple[str, ...] = ()
    cross_lingual: tuple[Probe, ...] = ()

    def __init__(
        self,
        subject: str,
        prompt: str,
        target: str | None = None,
        previous: str | None = None,
        paraphrases: Iterable[str] = (),
        neighbors: Iterable[ProbeLike] = (),
        same_subject: Iterable[ProbeLike] = (),
        generation: Iterable[str] = (),
        relation: str | int | None = None,
        occurrence: int = 0,
        case_id: str | int | None = None,
        portability: Iterable[ProbeLike] = (),
        references: Iterable[str] = (),
        locality: Iterable[ProbeLike] = (),
        target_aliases: Iterable[str] = (),
        keep: Iterable[ProbeLike] = (),
        also: Iterable[str] = (),
        cross_lingual: Iterable[ProbeLike] = (),
    ) -> None:
        target = _optional_text("target", target)
        vars(self).update(
            subject=_text("subject", subject),
            prompt=_text("prompt", prompt, strip=False),
            target=target,
            previous=_optional_text("previous", previous),
            paraphrases=_texts("a prompt", "paraphrases", paraphrases),
            neighbors=_probes("neighbors", neighbors),
            same_subject=_probes("same_subject", same_subject),
            generation=_texts("a prompt", "generation", generation),
            relation=_optional_text("relation", str(relation) if type(relation) is int else relation),
            occurrence=occurrence,
            case_id=_optional_text("case_id", str(case_id) if type(case_id) is int else case_id),
            portability=_probes("portability", portability),
            references=_texts("a text", "references", references),
            locality=_probes("locality", locality),
            target_aliases=_aliases("target_aliases", target_aliases, target),
            keep=_probes("keep", keep),
            also=_texts("a prompt", "also", also),
            cross_lingual=_probes("cross_lingual", cross_lingual),
        )
        if type(self.occurrence) is not int:
            raise FactError(f"occurrence must be a whole number, found {show(self.occurrence)}")
        if SLOT in self.subject:
            raise FactError(f"subject {show(self.subject)} contains {{}}; only the prompt may contain it")
        if self.target is not None and self.target == self.previous:
            raise FactError(
                f"target and previous are both {show(self.target)}; expected a new object", kind="nothing to change"
            )
        if unanswered := [probe.prompt for probe in self.portability if probe.target is None]:
            raise FactError(f"portability {show(unanswered[0])} has no target; give the answer that follows")
        if unanswered := [probe.prompt for probe in self.cross_lingual if probe.target is None]:
            raise FactError(f"cross_lingual {show(unanswered[0])} has no target; give the answer in its language")
        _ = self.statements
        self._check_apart()

    def _check_apart(self) -> None:
        """Raise FactError for a prompt of `keep` or `also` that the fact uses elsewhere, to change or to measure it."""
        if not (self.keep or self.also):
            return
        also = dict.fromkeys((text for text, _ in self.statements[1:]), "also")
        changing = {self.text: "prompt"} | dict.fromkeys(self.texts("paraphrases"), "paraphrases")
        fields = ("portability", "cross_lingual"), ("neighbors", "same_subject", "locality")
        follows, staying = ({probe.prompt: name for name in names for probe in self.probes(name)} for names in fields)
        changing |= follows
        kept = [probe.prompt for probe in self.probes("keep")]
        measured, change = "so the edit would optimise what it is measured by", "whose answer should change"
        for field, texts, field_of, why in (
            ("also", also, changing | staying, measured),
            ("keep", kept, changing | also, change),
            ("keep", kept, staying, measured),
        ):
            owners = {normalised(text): name for text, name in field_of.items()}
            for text in texts:
                if (owner := owners.get(normalised(text))) is not None:
                    raise FactError(f"{field} {show(text)} is also in {owner}, {why}; leave one of them out")

    def __repr__(self) -> str:
        shown = [f"Fact({self.subject!r}, {self.prompt!r}"]
        shown += [f"{name}={value!r}" for name in ("target", "previous") if (value := getattr(self, name)) is not None]
        shown += [f"{len(value)} {name}" for name, value in vars(self).items() if value and isinstance(value, tuple)]
        return ", ".join(shown) + ")"

    @property
    def text(self) -> str:
        """Prompt with the subject in it."""
        return fill(self.prompt, self.subject)

    @property
    def span(self) -> tuple[int, int]:
        """Character offsets (start, end) of the subject in `text`."""
        return _span("prompt", self.prompt, self.subject, self.occurrence)

    @property
    def statements(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Texts that the target must follow, prompt and `also`, each with the character offsets of its subject."""
        also = ((fill(text, self.subject), _span("also", text, self.subject)) for text in self.also)
        return (self.text, self.span), *also

    @property
    def new_object(self) -> str:
        """Target of a fact that is to be written; raises FactError where there is none."""
        if self.target is None:
            raise FactError(f"{show(self.text)} has no new object; give a target (only locate works without one)")
        return self.target

    def texts(self, field: str) -> tuple[str, ...]:
        """Return the prompts of a field (`paraphrases`, `generation`, `also`) with the subject in them."""
        return tuple(fill(text, self.subject) for text in getattr(self, field))

    def probes(self, field: str) -> tuple[Probe, ...]:
        """Return the probes of a field with the subject in their slot, if they have one.

        A probe of `neighbors` without a target has `previous` as its target.
        """
        target = self.previous if field == "neighbors" else None
        return tuple(probe.filled(self.subject, target) for probe in getattr(self, field))

    def to_dict(self) -> dict[str, Any]:
        """Return the fact in ffedit's own form, ready for JSON, without its empty fields."""
        return {name: _plain(value) for name, value in vars(self).items() if value not in (None, (), 0)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fact:
        """Read ffedit's own form. Raises FactError for an unknown field, so that a typo is not ignored."""
        names = [f.name for f in dataclasses.fields(cls)]
        if unknown := [str(name) for name in record if name not in names]:
            raise FactError(f"unknown field {', '.join(unknown)}; a fact's fields are {choices(unknown[0], names)}")
        if missing := [name for name in ("subject", "prompt") if name not in record]:
            raise FactError(f"{' and '.join(missing)} missing; a fact needs subject, prompt and target")
        return cls(**record)


def _span(field: str, prompt: str, subject: str, occurrence: int = 0) -> tuple[int, int]:
    """Return the character offsets (start, end) of `subject` in the filled `prompt`; FactError where it has none."""
    if prompt.count(SLOT) == 1 and not occurrence:
        start = prompt.index(SLOT)
        return start, start + len(subject)
    shown, name, slots = show(prompt), show(subject), prompt.count(SLOT)
    if slots > 1:
        raise FactError(f"{field} {shown} has {slots} slots {{}}; expected one: write the subject in the others")
    if slots == 1:
        raise FactError(f"{field} {shown} marks the subject with {{}}; leave occurrence out")
    spans = list(occurrences(prompt, subject))
    if not spans:
        inside = subject in prompt
        why = "contains the subject {} only inside another word" if inside else "has neither {{}} nor the subject {}"
        raise FactError(f"{field} {shown} {why.format(name)}; put {{}} where the subject stands")
    if not 0 <= occurrence < len(spans):
        raise FactError(
            f"occurrence {occurrence} of {name} asked for, but {field} {shown} has {len(spans)}; "
            f"expected 0 to {len(spans) - 1}"
        )
    return spans[occurrence]


FactLike: TypeAlias = "Fact | Mapping[str, Any]"


def as_facts(facts: FactLike | Iterable[FactLike]) -> list[Fact]:
    """Read one fact or several, each a Fact or a mapping of its fields; FactError for anything else."""
    listed = [facts] if isinstance(facts, (Fact, Mapping, str)) or not isinstance(facts, Iterable) else list(facts)
    expected = "a Fact or a dict of its fields was expected (ffedit.read_facts reads a file)"
    for fact in listed:
        FactError.require(fact, (Fact, Mapping), expected)
    return [fact if isinstance(fact, Fact) else Fact.from_dict(fact) for fact in listed]


def as_protected(field: str, entries: Iterable[str]) -> tuple[str, ...]:
    """Read names and texts that edits must not touch, each once; FactError for anything else."""
    return tuple(dict.fromkeys(text.strip() for text in _texts("a name or text", field, entries)))


def show(value: object) -> str:
    """Format a value for an error message: quoted, on one line, and shortened if long."""
    shown = repr(value) if isinstance(value, str) else f"{value!r} ({type(value).__name__})"
    return shown if len(shown) <= 100 else f"{shown[:60]}…{shown[-30:]}"


def check_facts(facts: Sequence[Fact]) -> None:
    """Raise an EditError where there are no facts to write, or two that give one question different answers."""
    if not facts:
        raise EditError("no facts to write; give at least one")
    for first, second in conflicts(facts):
        raise EditError(
            f"two facts give {first.text!r} the objects {first.new_object!r} and {second.new_object!r}; keep one"
        )
    fact_of = {normalised(text): fact for fact in facts for text, _ in fact.statements}
    for probe in (probe for fact in facts for probe in fact.probes("keep")):
        if (fact := fact_of.get(normalised(probe.prompt))) is not None:
            raise EditError(
                f"{probe.prompt!r} is a prompt to keep and a fact with target {fact.new_object!r}; leave one out"
            )


def conflicts(facts: Iterable[Fact]) -> list[tuple[Fact, Fact]]:
    """Return the pairs of facts that give one question two answers, in order; see `same_question`."""
    listed = list(facts)
    return [(listed[i], listed[j]) for i, j in same_question(listed) if not same_target(listed[i], listed[j])]


def same_question(facts: Iterable[Fact]) -> list[tuple[int, int]]:
    """Return positions (i, j), i < j, of facts about one subject with one statement, ignoring case, or one relation.

    Each fact is paired with the first that has its statement, and with the first that has its relation.
    """
    first: dict[tuple[str | None, ...], int] = {}
    pairs = []
    for j, fact in enumerate(facts):
        if fact.target is None:
            continue
        subject = normalised(fact.subject)
        questions = [("prompt", normalised(text), subject) for text, _ in fact.statements]
        if fact.relation is not None:
            questions.append(("relation", fact.relation, subject))
        earlier = {first.setdefault(question, j) for question in questions} - {j}
        pairs += [(i, j) for i in sorted(earlier)]
    return pairs


def same_target(a: Fact, b: Fact) -> bool:
    """Return True if two facts write the same object, ignoring case."""
    return normalised(a.new_object) == normalised(b.new_object)


def normalised(text: str) -> str:
    """Return a text without differences of case and white space."""
    return " ".join(text.casefold().split())


def by_subject(facts: Sequence[Fact]) -> list[list[Fact]]:
    """Group the facts that share a subject, in order of first appearance."""
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(fact.subject, []).append(fact)
    return list(groups.values())


def _text(field: str, value: object, strip: bool = True) -> str:
    if not isinstance(value, str):
        raise FactError(f"{field} must be text, found {show(value)}")
    if not value.strip():
        raise FactError(f"{field} is empty; expected some text")
    if not value.isascii() and _SURROGATE.search(value):
        raise FactError(f"{field} {show(value)} is not valid Unicode text (a lone surrogate)")
    if control := _CONTROL.search(value):
        raise FactError(f"{field} {show(value)} holds the control character U+{ord(control[0]):04X}; expected text")
    if not value.isascii() and not any(c.isprintable() and not c.isspace() for c in value):
        raise FactError(f"{field} {show(value)} has no visible character; expected some text")
    return value.strip() if strip else value


def _optional_text(field: str, value: object) -> str | None:
    return None if value is None else _text(field, value)


def _texts(what: str, field: str, value: object) -> tuple[str, ...]:
    return tuple(_text(f"{what} in {field}", text, strip=False) for text in _items(field, value))


def _aliases(field: str, value: object, target: str | None) -> tuple[str, ...]:
    names = dict.fromkeys(_text(f"a name in {field}", text) for text in _items(field, value))
    if names and target is None:
        raise FactError(f"{field} are other names of a target, and there is none; give the target")
    return tuple(name for name in names if name != target)


def _probes(field: str, value: object) -> tuple[Probe, ...]:
    return tuple(Probe.of(probe) for probe in _items(field, value))


def _items(field: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise FactError(f"{field} must be a list, found {show(value)}")
    return tuple(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Probe):
        fields = {name: _plain(item) for name, item in vars(value).items() if item not in (None, ())}
        return fields if len(fields) > 1 else value.prompt
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
