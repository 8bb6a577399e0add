"""Prompts of facts: every prompt of every kind with its answers, as token ids.

The same prompts are used before and after an edit, so what depends on the unedited model is determined here: where a
fact names no old object, or a probe no answer, the model's own first word is used instead, if it generates one.

Some neighbors of a fact, and some other facts of its subject, may be changed by the same edit. Their answers are
expected to change, however the prompt is worded, so they are excluded from specificity, same_subject and locality.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ffedit.editor.edit import Edit
from ffedit.errors import FactError
from ffedit.facts.fact import Fact, Probe
from ffedit.facts.text import occurrences
from ffedit.inference import generation
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode, joined


@dataclass(frozen=True)
class Pair:
    """One prompt with each of two objects."""

    prompt: str  # the wording
    new: Encoded  # the prompt with the new object
    true: Encoded  # the prompt with the old object, or with the true object of another subject or relation
    named: bool = True  # whether the data name the true object; otherwise it is the model's own answer
    kind: str | None = None  # the data set's name for what the prompt tests, or None
    new_aliases: tuple[Encoded, ...] = ()  # the prompt with each alias of the new object
    true_aliases: tuple[Encoded, ...] = ()  # the prompt with each alias of the true object


@dataclass(frozen=True)
class Prompt:
    """A prompt with one answer."""

    prompt: str  # the wording
    text: Encoded  # the prompt with its answer
    kind: str | None  # the data set's name for what the prompt tests, or None
    named: bool = True  # whether the data name the answer; otherwise it is the model's own
    aliases: tuple[Encoded, ...] = ()  # the prompt with each alias of the answer
    answer: str | None = None  # the answer as text, if the data name it
    needs: tuple[str, ...] = ()  # prompts of the other facts that the answer follows from


# By score, the field of `Questions` with the prompts that it is measured on.
KINDS = {
    "paraphrase": "paraphrases",
    "specificity": "neighbors",
    "same_subject": "same_subject",
    "portability": "portability",
    "locality": "locality",
    "keep": "keep",
    "also": "also",
    "cross_lingual": "cross_lingual",
}


@dataclass(frozen=True)
class Questions:
    """One fact's prompts, tokenised with their objects, by kind.

    Attributes:
        fact: the fact.
        own: the edited prompt, with the new and with the old object.
        paraphrases: other wordings.
        neighbors: prompts about other subjects, whose answers should stay.
        same_subject: prompts about other facts of the subject.
        with_edit: neighbors after the edit's sentence.
        portability: prompts whose answer follows from the edit.
        locality: unrelated questions.
        keep: prompts whose answers the edit should preserve.
        also: further wordings that the edit was optimised on.
        cross_lingual: the fact asked in other languages.
        generation: prompts for free text about the subject, without answers.
        left_out: how many prompts were left out, by score and reason.
    """

    fact: Fact
    own: Pair
    paraphrases: tuple[Pair, ...]
    neighbors: tuple[Pair, ...]
    same_subject: tuple[Pair, ...]
    with_edit: tuple[Pair, ...]
    portability: tuple[Prompt, ...]
    locality: tuple[Prompt, ...]
    keep: tuple[Prompt, ...]
    also: tuple[Pair, ...]
    cross_lingual: tuple[Prompt, ...]
    generation: tuple[Encoded, ...]
    left_out: Mapping[str, int]

    @property
    def stay(self) -> tuple[Prompt, ...]:
        """Prompts to answer as before the edit: unrelated questions, and other facts' prompts with a kind."""
        others = [pair for pair in (*self.same_subject, *self.neighbors) if pair.kind is not None]
        return (*self.locality, *(Prompt(pair.prompt, pair.true, pair.kind, pair.named) for pair in others))

    @property
    def by_score(self) -> Iterator[tuple[str, Pair | Prompt]]:
        """All prompts beside the fact's own, each after the name of the score that is measured on it."""
        for score, kind in KINDS.items():
            yield from ((score, asked) for asked in getattr(self, kind))

    @property
    def texts(self) -> tuple[Encoded, ...]:
        """All prompts with answers."""
        pairs = (self.own, *self.paraphrases, *self.also, *self.neighbors, *self.same_subject, *self.with_edit)
        prompts = (*self.portability, *self.locality, *self.keep, *self.cross_lingual)
        return (*(text for pair in pairs for text in (pair.new, pair.true)), *(prompt.text for prompt in prompts))


def edited_together(facts: Sequence[Fact], edit: Edit | None) -> list[Fact]:
    """Return `facts`, then the other facts of `edit`: what these change on purpose is no damage."""
    measured = {fact.statements for fact in facts}
    return [*facts, *(fact for fact in (edit.facts if edit else ()) if fact.statements not in measured)]


def questions(editable: Editable, facts: Sequence[Fact], batch: Sequence[Fact], full: bool = False) -> list[Questions]:
    """Return the prompts of `facts`, which are edited together with all of `batch`.

    A neighbor, a same-subject prompt or an unrelated question whose own fact is edited in the batch is expected to
    change, and is left out. So is a prompt without an object to compare with the new one, where none is named and the
    unedited model generates none, and a prompt whose answer needs edits outside the batch. All are counted.

    With `full`, prompts to generate from are included, and the neighbors after the edit's sentence where they fit the
    model's context.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
    """
    edited = Edited(batch)
    answers = _own_answers(editable, facts, edited)
    return [_questions(editable, fact, edited, answers, full) for fact in facts]


def _own_answers(editable: Editable, facts: Sequence[Fact], edited: Edited) -> dict[str, Encoded]:
    """Return the unedited model's answers to prompts without one, by prompt; none where it generates no word."""
    limit, prompts = editable.max_tokens, {}
    for fact in facts:
        if fact.previous is None:
            prompts[fact.text] = editable.encode(fact.text, span=fact.span, max_tokens=limit)
        for probe in (*fact.probes("same_subject"), *fact.probes("locality"), *fact.probes("keep")):
            if probe.target is None and not edited.states(probe.prompt):
                prompts.setdefault(probe.prompt, editable.encode(probe.prompt, max_tokens=limit))
    answers = zip(prompts, generation.own_answers(editable, list(prompts.values())), strict=True)
    return {prompt: answer for prompt, answer in answers if answer is not None}


def _questions(editable: Editable, fact: Fact, edited: Edited, answers: dict[str, Encoded], full: bool) -> Questions:
    limit, new = editable.max_tokens, fact.new_object
    left_out: Counter[str] = Counter()

    def text(prompt: str, answer: str) -> Encoded:
        return editable.encode(prompt, answer, max_tokens=limit)

    def answered(probe: Probe) -> Encoded:
        return answers[probe.prompt] if probe.target is None else text(probe.prompt, probe.target)

    def aliases(prompt: str, names: Sequence[str]) -> tuple[Encoded, ...]:
        """Encode aliases after `prompt`; one that the tokenizer cannot encode is skipped: the model cannot say it."""
        encoded = []
        for name in names:
            try:
                encoded.append(text(prompt, name))
            except FactError:
                continue
        return tuple(encoded)

    def stated(prompt: str, named: bool = True) -> Pair:
        names = aliases(prompt, fact.target_aliases)
        return Pair(prompt, text(prompt, new), text(prompt, old), named, new_aliases=names)

    def pair(probe: Probe, named: bool) -> Pair:
        names = aliases(probe.prompt, probe.aliases)
        return Pair(probe.prompt, text(probe.prompt, new), answered(probe), named, probe.kind, true_aliases=names)

    def question(probe: Probe) -> Prompt:
        names = aliases(probe.prompt, probe.aliases)
        named = probe.target is not None
        return Prompt(probe.prompt, answered(probe), probe.kind, named, names, probe.target, probe.needs)

    def in_other_languages() -> Iterator[Prompt]:
        """Yield the fact's prompts in other languages; count those that the tokenizer does not know."""
        for probe in fact.probes("cross_lingual"):
            try:
                yield question(probe)
            except FactError:
                left_out["cross_lingual"] += 1

    def unchanged(score: str, probes: Sequence[Probe], moves: Callable[[Probe], bool]) -> list[Probe]:
        """Return the probes that the edit should not change and that have an answer; count the others in `left_out`."""
        staying = [probe for probe in probes if not moves(probe)]
        own = () if score == "specificity" else answers  # a neighbor's object is the fact's old one where it names none
        answerable = [probe for probe in staying if probe.target is not None or probe.prompt in own]
        left_out[f"{score}/edited"] = len(probes) - len(staying)
        left_out[f"{score}/unsaid"] = len(staying) - len(answerable)
        return answerable

    previous = fact.previous
    if previous is None and fact.text in answers:
        previous = decode(editable.tokenizer, answers[fact.text].target_ids).strip()
    old = previous or new  # equal objects are not compared
    others = [replace(probe, target=probe.target or previous) for probe in fact.probes("neighbors")]
    others = unchanged("specificity", others, lambda probe: edited.asks_neighbor(probe, fact.relation))
    same_subject = unchanged("same_subject", fact.probes("same_subject"), lambda p: edited.asks_same_subject(p, fact))
    locality = unchanged("locality", fact.probes("locality"), lambda probe: edited.asks_neighbor(probe, None))
    keep = unchanged("keep", fact.probes("keep"), lambda probe: edited.states(probe.prompt))
    follows = [probe for probe in fact.probes("portability") if all(map(edited.states, probe.needs))]
    prompt = stated(fact.text, fact.previous is not None)
    paraphrases = tuple(stated(wording) for wording in fact.texts("paraphrases"))
    neighbors = tuple(pair(p, True) for p in others)
    with_edit = _behind(editable, fact, others) if full else ()
    reason = "one" if previous else "unsaid"
    compared = {f"efficacy/{reason}": (prompt,), f"paraphrase/{reason}": paraphrases, "specificity/one": neighbors}
    for score, pairs in compared.items():
        left_out[score] = sum(pair.new.ids == pair.true.ids for pair in pairs)  # there is nothing to compare
    left_out["portability/alone"] = len(fact.probes("portability")) - len(follows)
    left_out["neighbor_with_edit"] = len(neighbors) - len(with_edit) if full else 0
    return Questions(
        fact=fact,
        own=prompt,
        paraphrases=paraphrases,
        neighbors=neighbors,
        same_subject=tuple(pair(p, p.target is not None) for p in same_subject),
        with_edit=with_edit,
        portability=tuple(map(question, follows)),
        locality=tuple(map(question, locality)),
        keep=tuple(map(question, keep)),
        cross_lingual=tuple(in_other_languages()),
        also=tuple(stated(wording) for wording, _ in fact.statements[1:]),
        generation=tuple(text(opening, "") for opening in fact.texts("generation")) if full else (),
        left_out=+left_out,
    )


def _behind(editable: Editable, fact: Fact, neighbors: Sequence[Probe]) -> tuple[Pair, ...]:
    """Prepend the edit's sentence to the neighbors (CounterFact+); those that become too long are left out."""
    sentence = joined(fact.text, fact.new_object) + ". "
    pairs = []
    for probe in neighbors:
        prompt = sentence + probe.prompt
        pair = Pair(prompt, editable.encode(prompt, fact.new_object), editable.encode(prompt, probe.target or ""))
        if max(len(pair.new.ids), len(pair.true.ids)) <= editable.max_tokens:
            pairs.append(pair)
    return tuple(pairs)


class Edited:
    """Index of the facts that are edited together, by prompt, relation and old object."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._texts: set[str] = set()
        self._of_relation: defaultdict[str | None, list[Fact]] = defaultdict(list)
        self._of_object: defaultdict[str | None, list[Fact]] = defaultdict(list)
        for fact in facts:
            self._texts |= {
                text.strip() for text in (*(prompt for prompt, _ in fact.statements), *fact.texts("paraphrases"))
            }
            self._of_relation[fact.relation].append(fact)
            self._of_object[fact.previous].append(fact)

    def states(self, prompt: str) -> bool:
        """Return whether an edited fact has `prompt` as its prompt, as a paraphrase or in `also`."""
        return prompt.strip() in self._texts

    def asks_neighbor(self, probe: Probe, relation: str | None) -> bool:
        """Return whether a prompt about another subject, with its true object, asks for an edited fact of that subject.

        Such a fact has the same relation or, where the data do not name both relations, the same old object.
        """
        alike = self._of_relation.get(relation, []) if relation is not None else []
        unnamed = [fact for fact in self._with_old(probe) if None in (relation, fact.relation)]
        mentioned = (any(occurrences(probe.prompt, fact.subject)) for fact in (*alike, *unnamed))
        return self.states(probe.prompt) or any(mentioned)

    def asks_same_subject(self, probe: Probe, fact: Fact) -> bool:
        """Return whether a prompt about the subject of `fact` asks for another edited fact of that subject.

        The other fact is recognised by its old object, which is the prompt's true object.
        """
        others = [other for other in self._with_old(probe) if other.subject == fact.subject]
        return self.states(probe.prompt) or any(other != fact for other in others)

    def _with_old(self, probe: Probe) -> list[Fact]:
        """Return the facts whose old object is the true object of `probe`, or one of its aliases."""
        names = () if probe.target is None else (probe.target, *probe.aliases)
        return [fact for name in names for fact in self._of_object.get(name, [])]
