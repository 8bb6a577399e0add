"""Which prompts ask for a fact that is edited itself?

Among the neighbors of one fact, and the other facts of its subject, there may be some that the same edit changes. They
are expected to move, in whatever words they are asked for, and do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ffedit.facts.fact import Fact, Probe
from ffedit.facts.mentions import occurrences


class Edited:
    """The facts of an edit, as prompts may ask for them.

    Args:
        facts: all that are edited together.
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
        """Whether an edited fact has this prompt, or this paraphrase."""
        return prompt.strip() in self._texts

    def asks_neighbor(self, probe: Probe, relation: str | None) -> bool:
        """Whether a prompt about another subject, with its true object, asks for an edited fact of that subject.

        That is one of the same relation; where the data do not name both relations, one with the same old object.
        """
        alike = self._of_relation.get(relation, []) if relation is not None else []
        unnamed = [fact for fact in self._with_old(probe) if None in (relation, fact.relation)]
        named = (any(occurrences(probe.prompt, fact.subject)) for fact in (*alike, *unnamed))
        return self.states(probe.prompt) or any(named)

    def asks_same_subject(self, probe: Probe, fact: Fact) -> bool:
        """Whether a prompt about the subject of `fact` asks for another edited fact of it, whose old object it has."""
        others = [other for other in self._with_old(probe) if other.subject == fact.subject]
        return self.states(probe.prompt) or any(other != fact for other in others)

    def _with_old(self, probe: Probe) -> list[Fact]:
        """The facts whose old object a prompt has for its true one, under any of its names."""
        names = () if probe.target is None else (probe.target, *probe.aliases)
        return [fact for name in names for fact in self._of_object.get(name, [])]
