"""Prompts of facts: every prompt of every kind with its answers, as token ids.

The same prompts are used before and after an edit, so what depends on the unedited model is determined here: where a
fact names no old object, or a probe no answer, the model's own first word is used instead, if it generates one.

Some neighbors of a fact, and some other facts of its subject, may be changed by the same edit. Their answers are
expected to change, however the prompt is worded, so they are excluded from specificity, same_subject and locality.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ffedit.errors import FactError
from ffedit.facts.fact import Fact, Probe
from ffedit.facts.text import occurrences
from ffedit.inference import generation
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode, joined


@dataclass(frozen=True)
class Pair:
    """One prompt with each of two objects."""

    new: Encoded  # the prompt with the new object
    true: Encoded  # the prompt with the old object, or with the true object of another subject or relation
    named: bool = True  # whether the true object was given; otherwise it is the model's own answer
    kind: str | None = None  # the data set's name for what the prompt tests, or None
    new_aliases: tuple[Encoded, ...] = ()  # the prompt with each alias of the new object
    true_aliases: tuple[Encoded, ...] = ()  # the prompt with each alias of the true object


@dataclass(frozen=True)
class Prompt:
    """A prompt with one answer."""

    text: Encoded  # the prompt with its answer
    kind: str | None  # the data set's name for what the prompt tests, or None
    named: bool = True  # whether the answer was given; otherwise it is the model's own
    aliases: tuple[Encoded, ...] = ()  # the prompt with each alias of the answer
    answer: str | None = None  # the answer as text, where it was given
    needs: tuple[str, ...] = ()  # prompts of the other facts that the answer follows from


@dataclass(frozen=True)
class Probed:
    """A prompt of a fact beside its own, as text."""

    score: str  # name of the score that is measured on it
    prompt: str
    text: Encoded  # the prompt with the answer that the score favours


@dataclass(frozen=True)
class Questions:
    """One fact's prompts, by kind; those in `generation` have no answers, `left_out` counts the ones left out.

    `probed` lists the prompts of paraphrase, specificity, same_subject, portability and locality as they are worded.
    """

    fact: Fact
    own: Pair
    paraphrases: tuple[Pair, ...]
    neighbors: tuple[Pair, ...]
    same_subject: tuple[Pair, ...]
    with_edit: tuple[Pair, ...]
    portability: tuple[Prompt, ...]
    locality: tuple[Prompt, ...]
    generation: tuple[Encoded, ...]
    left_out: Mapping[str, int]
    probed: tuple[Probed, ...] = ()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All prompts with two objects."""
        return (self.own, *self.paraphrases, *self.neighbors, *self.same_subject, *self.with_edit)

    @property
    def stay(self) -> tuple[Prompt, ...]:
        """Prompts to be answered as before the edit: unrelated questions, and other facts' prompts with a kind."""
        others = [pair for pair in (*self.same_subject, *self.neighbors) if pair.kind is not None]
        return (*self.locality, *(Prompt(pair.true, pair.kind, pair.named) for pair in others))

    @property
    def texts(self) -> tuple[Encoded, ...]:
        """All prompts with answers."""
        both = [text for pair in self.pairs for text in (pair.new, pair.true)]
        return (*both, *(prompt.text for prompt in (*self.portability, *self.locality)))


def questions(editable: Editable, facts: Sequence[Fact], batch: Sequence[Fact], full: bool = False) -> list[Questions]:
    """Return the prompts of `facts`, which are edited together with all of `batch`.

    A neighbor, a same-subject prompt or an unrelated question whose own fact is edited in the batch is expected to
    change, and is left out. So is a prompt without an object to compare with the new one, where none is named and the
    model generates none, and one whose answer needs edits that are not in the batch. All are counted.

    Args:
        editable: the unedited model.
        facts: the facts whose prompts are returned.
        batch: all facts of the edit.
        full: also include neighbors behind the edit's sentence, where they fit the model's context, and prompts to
            generate from.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
    """
    edited = Edited(batch)
    own = _own_answers(editable, facts, edited)
    return [_questions(editable, fact, edited, own, full) for fact in facts]


def _own_answers(editable: Editable, facts: Sequence[Fact], edited: Edited) -> dict[str, Encoded]:
    """Return the unedited model's own answers to prompts without one, by prompt; none where it generates no word."""
    limit, prompts = editable.max_tokens, {}
    for fact in facts:
        if fact.previous is None:
            prompts[fact.text] = editable.encode(fact.text, span=fact.span, max_tokens=limit)
        for probe in (*fact.same_subject_probes, *fact.locality_probes):
            if probe.target is None and not edited.states(probe.prompt):
                prompts.setdefault(probe.prompt, editable.encode(probe.prompt, max_tokens=limit))
    said = zip(prompts, generation.own_answers(editable, list(prompts.values())), strict=True)
    return {prompt: answer for prompt, answer in said if answer is not None}


def _questions(editable: Editable, fact: Fact, edited: Edited, own: dict[str, Encoded], full: bool) -> Questions:
    limit, new = editable.max_tokens, fact.new_object
    left_out: Counter[str] = Counter()

    def text(prompt: str, answer: str) -> Encoded:
        return editable.encode(prompt, answer, max_tokens=limit)

    def answered(probe: Probe) -> Encoded:
        return own[probe.prompt] if probe.target is None else text(probe.prompt, probe.target)

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
        return Pair(text(prompt, new), text(prompt, old), named, new_aliases=aliases(prompt, fact.target_aliases))

    def asked(probe: Probe) -> Pair:
        names = aliases(probe.prompt, probe.aliases)
        return Pair(text(probe.prompt, new), answered(probe), probe.target is not None, probe.kind, true_aliases=names)

    def question(probe: Probe) -> Prompt:
        names = aliases(probe.prompt, probe.aliases)
        return Prompt(answered(probe), probe.kind, probe.target is not None, names, probe.target, probe.needs)

    def unchanged(score: str, probes: Sequence[Probe], moves: Callable[[Probe], bool]) -> list[Probe]:
        """Return the probes that the edit should not change and that have an answer; count the others in `left_out`."""
        still = [probe for probe in probes if not moves(probe)]
        answerable = [probe for probe in still if probe.target is not None or probe.prompt in own]
        left_out[f"{score}/edited"] = len(probes) - len(still)
        left_out[f"{score}/unsaid"] = len(still) - len(answerable)
        return answerable

    previous = fact.previous
    if previous is None and fact.text in own:
        previous = decode(editable.tokenizer, own[fact.text].target_ids).strip()
    old = previous or new  # equal objects are not compared
    others = [replace(probe, target=probe.target or previous) for probe in fact.neighbor_probes]
    others = unchanged("specificity", others, lambda probe: edited.asks_neighbor(probe, fact.relation))
    same_subject = unchanged("same_subject", fact.same_subject_probes, lambda p: edited.asks_same_subject(p, fact))
    locality = unchanged("locality", fact.locality_probes, lambda probe: edited.asks_neighbor(probe, None))
    follows = [probe for probe in fact.portability_probes if all(map(edited.states, probe.needs))]
    prompt = stated(fact.text, fact.previous is not None)
    paraphrases = tuple(stated(wording) for wording in fact.paraphrase_texts)
    neighbors = tuple(Pair(text(probe.prompt, new), answered(probe), kind=probe.kind) for probe in others)
    pairs = tuple(map(asked, same_subject))
    portability, unrelated = tuple(map(question, follows)), tuple(map(question, locality))
    probed = [
        *(Probed("paraphrase", *one) for one in zip(fact.paraphrase_texts, (p.new for p in paraphrases), strict=True)),
        *(Probed("specificity", of.prompt, pair.true) for of, pair in zip(others, neighbors, strict=True)),
        *(Probed("same_subject", of.prompt, pair.true) for of, pair in zip(same_subject, pairs, strict=True)),
        *(Probed("portability", of.prompt, one.text) for of, one in zip(follows, portability, strict=True)),
        *(Probed("locality", of.prompt, one.text) for of, one in zip(locality, unrelated, strict=True)),
    ]
    with_edit = _behind(editable, fact, others) if full else ()
    reason = "one" if previous else "unsaid"
    left_out[f"efficacy/{reason}"] = _of_one_object([prompt])
    left_out[f"paraphrase/{reason}"] = _of_one_object(paraphrases)
    left_out["specificity/one"] = _of_one_object(neighbors)
    left_out["portability/alone"] = len(fact.portability_probes) - len(follows)
    left_out["neighbor_with_edit"] = len(neighbors) - len(with_edit) if full else 0
    return Questions(
        fact=fact,
        own=prompt,
        paraphrases=paraphrases,
        neighbors=neighbors,
        same_subject=pairs,
        with_edit=with_edit,
        portability=portability,
        locality=unrelated,
        generation=tuple(text(begun, "") for begun in fact.generation_texts) if full else (),
        left_out=+left_out,
        probed=tuple(probed),
    )


def _of_one_object(pairs: Sequence[Pair]) -> int:
    """Count the `pairs` whose two objects are equal, so that there is nothing to compare."""
    return sum(pair.new.ids == pair.true.ids for pair in pairs)


def _behind(editable: Editable, fact: Fact, neighbors: Sequence[Probe]) -> tuple[Pair, ...]:
    """Prepend the edit's sentence to the neighbors (CounterFact+); those that become too long are left out."""
    sentence = joined(fact.text, fact.new_object) + ". "
    pairs = []
    for probe in neighbors:
        prompt = sentence + probe.prompt
        pair = Pair(editable.encode(prompt, fact.new_object), editable.encode(prompt, probe.target or ""))
        if max(len(pair.new.ids), len(pair.true.ids)) <= editable.max_tokens:
            pairs.append(pair)
    return tuple(pairs)


class Edited:
    """Index of the facts of an edit, by prompt, relation and old object.

    Args:
        facts: all facts that are edited together.
    """

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._texts: set[str] = set()
        self._of_relation: defaultdict[str | None, list[Fact]] = defaultdict(list)
        self._of_object: defaultdict[str | None, list[Fact]] = defaultdict(list)
        for fact in facts:
            self._texts |= {text.strip() for text in (fact.text, *fact.paraphrase_texts)}
            self._of_relation[fact.relation].append(fact)
            self._of_object[fact.previous].append(fact)

    def states(self, prompt: str) -> bool:
        """Return whether an edited fact has `prompt` as its prompt or as a paraphrase."""
        return prompt.strip() in self._texts

    def asks_neighbor(self, probe: Probe, relation: str | None) -> bool:
        """Return whether a prompt about another subject, with its true object, asks for an edited fact of that subject.

        Such a fact has the same relation or, where the data do not name both relations, the same old object.
        """
        alike = self._of_relation.get(relation, []) if relation is not None else []
        unnamed = [fact for fact in self._with_old(probe) if None in (relation, fact.relation)]
        named = (any(occurrences(probe.prompt, fact.subject)) for fact in (*alike, *unnamed))
        return self.states(probe.prompt) or any(named)

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
