"""Detection of prompts that ask for a fact of the same edit.

Some neighbors of a fact, and some other facts of its subject, may be changed by the same edit. Their answers are
expected to change, however the prompt is worded, so they are excluded from specificity, same_subject and locality.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ffedit.facts.fact import Fact, Probe
from ffedit.facts.mentions import occurrences


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
