"""A fact: what a model should come to say about a subject, and what must not move meanwhile.

An edit is asked for in the field's usual terms (Meng et al. 2022, ROME, arXiv 2202.05262): a *prompt* about
a *subject* is to be continued by a new object (`target`) in place of the old one (`previous`). Whether it
worked is measured on other wordings of the same fact (`paraphrases`), on other subjects of the same relation
(`neighbors`: specificity) and on the other facts of the same subject (`same_subject`: retention).

Where the subject stands is a matter of characters, not of tokens: `Fact.text` is the whole prompt and
`Fact.span` the subject's place in it, so a tokenizer sees the prompt once and as a whole.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import FactError

SLOT = "{}"

# Scripts that write words without spaces (Thai, Lao, Tibetan, Burmese, Khmer, Chinese, Japanese) or attach
# particles to names (Korean): there, a neighbouring character says nothing about where a word ends.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff"
    "\uf900-\ufaff\uff66-\uffdc\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


def fill(template: str, subject: str) -> str:
    """Put `subject` where `template` has `{}`; a template without a slot stays as it is."""
    return template.replace(SLOT, subject)


def occurrences(text: str, subject: str) -> Iterator[tuple[int, int]]:
    """Spans (start, end) of `subject` in `text` as a whole word: "Rome" is not in "Romeo"."""
    start = text.find(subject)
    while start >= 0:
        end = start + len(subject)
        before, after = text[start - 1 : start], text[end : end + 1]
        whole = not _one_word(before, subject[0]) and not _one_word(after, subject[-1])
        if whole:
            yield start, end
        start = text.find(subject, end if whole else start + 1)


def _one_word(neighbour: str, edge: str) -> bool:
    """Whether a character beside the subject continues the word that the subject's edge belongs to."""
    return all(
        c != "" and not _UNSPACED.match(c) and (c.isalnum() or c == "_" or unicodedata.category(c)[0] == "M")
        for c in (neighbour, edge)
    )


@dataclass(frozen=True)
class Probe:
    """A prompt whose answer should not move.

    `target` is its true object. None means, among `neighbors`, the fact's `previous` object (as CounterFact
    publishes them) and, among `same_subject`, whatever the model said before the edit.
    Raises FactError for an empty prompt or target.
    """

    prompt: str
    target: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _text("a probe's prompt", self.prompt, strip=False))
        object.__setattr__(self, "target", _optional_text("a probe's target", self.target))

    @classmethod
    def of(cls, value: ProbeLike) -> Probe:
        """Read a probe written as itself, as its prompt, or as an object with `prompt` and `target`."""
        if isinstance(value, Probe):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping) and "prompt" in value and set(value) <= {"prompt", "target"}:
            return cls(**value)
        raise FactError(f"a probe must be a prompt or {{prompt, target}}, found {show(value)}")

    def filled(self, subject: str, target: str | None = None) -> Probe:
        """Return the probe with `subject` in its slot, if it has one, and `target` if it has no own."""
        return Probe(fill(self.prompt, subject), target if self.target is None else self.target)


ProbeLike: TypeAlias = "Probe | str | Mapping[str, Any]"


@dataclass(frozen=True, init=False)
class Fact:
    """One fact to write into a model, with the prompts that measure the edit.

    - `subject`, `prompt`: the prompt carries one `{}` or the subject itself. In the second case `occurrence`
      (from 0) picks among the places where the subject stands as a whole word; the first one by default.
    - `target`: the new object; None only where nothing is to be written (tracing sets; see `new_object`).
    - `previous`: the object that the model is expected to know now.
    - `paraphrases`, `generation`: other prompts of the same fact, and prompts for free text about the
      subject; `{}` stands for the subject.
    - `neighbors`: probes about other subjects; `same_subject`: probes about other facts of this subject.
    - `relation`, `case_id`: names from the data set, for reports only.

    White space around subject, target and previous is dropped; prompts stay as they are. How a prompt and
    its target are joined is decided by the tokenizer. Raises FactError, one line, for what cannot be used.
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
        relation: str | None = None,
        occurrence: int = 0,
        case_id: str | int | None = None,
    ) -> None:
        values = {
            "subject": _text("subject", subject),
            "prompt": _text("prompt", prompt, strip=False),
            "target": _optional_text("target", target),
            "previous": _optional_text("previous", previous),
            "paraphrases": _prompts("paraphrases", paraphrases),
            "neighbors": tuple(Probe.of(p) for p in _items("neighbors", neighbors)),
            "same_subject": tuple(Probe.of(p) for p in _items("same_subject", same_subject)),
            "generation": _prompts("generation", generation),
            "relation": _optional_text("relation", relation),
            "occurrence": occurrence,
            "case_id": _optional_text("case_id", str(case_id) if type(case_id) is int else case_id),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        if type(self.occurrence) is not int:
            raise FactError(f"occurrence must be a whole number, found {show(self.occurrence)}")
        if SLOT in self.subject:
            raise FactError(f"subject {show(self.subject)} holds {{}}; the slot belongs into the prompt")
        if self.target is not None and self.target == self.previous:
            raise FactError(f"target and previous are both {show(self.target)}; expected a new object")
        _ = self.span

    @property
    def text(self) -> str:
        """The prompt with the subject in it."""
        return fill(self.prompt, self.subject)

    @property
    def span(self) -> tuple[int, int]:
        """Character offsets (start, end) of the subject in `text`."""
        prompt, subject, slots = show(self.prompt), show(self.subject), self.prompt.count(SLOT)
        if slots > 1:
            raise FactError(f"prompt {prompt} has {slots} slots {{}}; expected one: write the others out")
        if slots == 1:
            if self.occurrence:
                raise FactError(f"prompt {prompt} marks the subject with {{}}; leave occurrence out")
            start = self.prompt.index(SLOT)
            return start, start + len(self.subject)
        spans = list(occurrences(self.prompt, self.subject))
        if not spans:
            found = f"holds the subject {subject} only inside another word"
            if self.subject not in self.prompt:
                found = f"has neither {{}} nor the subject {subject}"
            raise FactError(f"prompt {prompt} {found}; put {{}} where the subject stands")
        if not 0 <= self.occurrence < len(spans):
            raise FactError(
                f"occurrence {self.occurrence} of {subject} asked for, but prompt {prompt} has {len(spans)}; "
                f"expected 0 to {len(spans) - 1}"
            )
        return spans[self.occurrence]

    @property
    def new_object(self) -> str:
        """The target of a fact that is to be written; FactError where there is none."""
        if self.target is None:
            raise FactError(f"{show(self.text)} has no new object; give a target (without one: locate only)")
        return self.target

    @property
    def paraphrase_texts(self) -> tuple[str, ...]:
        """The paraphrases with the subject in them."""
        return tuple(fill(p, self.subject) for p in self.paraphrases)

    @property
    def generation_texts(self) -> tuple[str, ...]:
        """The generation prompts with the subject in them."""
        return tuple(fill(p, self.subject) for p in self.generation)

    @property
    def neighbor_probes(self) -> tuple[Probe, ...]:
        """The neighbors, ready to use: an object left out is `previous`."""
        return tuple(p.filled(self.subject, self.previous) for p in self.neighbors)

    @property
    def same_subject_probes(self) -> tuple[Probe, ...]:
        """The probes about this subject's other facts, with the subject in them."""
        return tuple(p.filled(self.subject) for p in self.same_subject)

    def to_dict(self) -> dict[str, Any]:
        """Return the fact in ffedit's own form, ready for JSON, without its empty fields."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items() if value not in (None, (), 0)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fact:
        """Read ffedit's own form. Raises FactError for a field it does not know: a typo must not pass."""
        names = [f.name for f in dataclasses.fields(cls)]
        if unknown := [str(name) for name in record if name not in names]:
            raise FactError(f"unknown field {', '.join(unknown)}; a fact's fields are {', '.join(names)}")
        if missing := [name for name in ("subject", "prompt") if name not in record]:
            raise FactError(f"{' and '.join(missing)} missing; a fact needs subject, prompt and target")
        return cls(**record)


def same_fact(a: Fact, b: Fact) -> bool:
    """Whether two facts ask the same thing of the same subject, whatever the answer."""
    return (a.subject, a.text) == (b.subject, b.text)


def show(value: object) -> str:
    """A value as it stands in an error: quoted, on one line, and not too long."""
    shown = repr(value) if isinstance(value, str) else f"{value!r} ({type(value).__name__})"
    return shown if len(shown) <= 100 else f"{shown[:60]}…{shown[-30:]}"


def by_subject(facts: Sequence[Fact]) -> list[list[Fact]]:
    """Facts that share a subject together, in order of first appearance."""
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(fact.subject, []).append(fact)
    return list(groups.values())


def _text(field: str, value: object, strip: bool = True) -> str:
    if not isinstance(value, str):
        raise FactError(f"{field} must be text, found {show(value)}")
    if not value.strip():
        raise FactError(f"{field} is empty; expected some text")
    if re.search("[\ud800-\udfff]", value):
        raise FactError(f"{field} {show(value)} is not valid Unicode text (a lone surrogate)")
    return value.strip() if strip else value


def _optional_text(field: str, value: object) -> str | None:
    return None if value is None else _text(field, value)


def _prompts(field: str, value: object) -> tuple[str, ...]:
    return tuple(_text(f"a prompt in {field}", prompt, strip=False) for prompt in _items(field, value))


def _items(field: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise FactError(f"{field} must be a list, found {show(value)}")
    return tuple(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Probe):
        return value.prompt if value.target is None else {"prompt": value.prompt, "target": value.target}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
