"""Detection of facts that cannot be written together: one question about one subject, answered twice.

Two different answers contradict each other, and the same answer written twice changes the memory twice as much as it
should.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ffedit.errors import EditError
from ffedit.facts.fact import Fact


def conflicts(facts: Iterable[Fact]) -> list[tuple[Fact, Fact]]:
    """Return the pairs of facts that give one question two answers, in order; see `same_question`."""
    listed = list(facts)
    pairs = [(listed[i], listed[j]) for i, j in same_question(listed)]
    return [(first, second) for first, second in pairs if not same_target(first, second)]


def check_facts(facts: Sequence[Fact]) -> None:
    """Check that there are facts and that they do not contradict each other.

    Raises:
        EditError: no facts, or one question with two answers.
    """
    if not facts:
        raise EditError("no facts to write; give at least one")
    for first, second in conflicts(facts):
        raise EditError(
            f"{first.text!r} is to become {first.new_object!r} and {second.new_object!r}; keep one of the two facts"
        )


def same_question(facts: Iterable[Fact]) -> list[tuple[int, int]]:
    """Return positions (i, j), i < j, of facts to be written about one subject with one prompt, or of one relation.

    Upper and lower case and white space make no difference. Each fact is paired with the first that asks the same.
    """
    first: dict[tuple[str | None, ...], int] = {}
    pairs = []
    for j, fact in enumerate(facts):
        if fact.target is None:
            continue
        questions = [("prompt", _plainly(fact.text), _plainly(fact.subject))]
        if fact.relation is not None:
            questions.append(("relation", fact.relation, _plainly(fact.subject)))
        i = min(first.setdefault(question, j) for question in questions)
        if i < j:
            pairs.append((i, j))
    return pairs


def same_target(a: Fact, b: Fact) -> bool:
    """Return True if two facts write the same object, ignoring case."""
    return _plainly(a.new_object) == _plainly(b.new_object)


def _plainly(text: str) -> str:
    return " ".join(text.casefold().split())
