"""Decide which facts of a subject follow from an edited one: a vocabulary of relations, and pairs that follow.

A relation asks for one kind of answer: `person_country` and `dish_country` both ask for a country (`ASKS`). `FOLLOWS`
has pairs of kinds of which the second follows from the first, with the reason: if the Eiffel Tower moves to Rome, it
moves to Italy. Chains follow, too: city, country, continent. So does the same kind in another relation.

In both directions, a change of such a fact is no damage: after "the Eiffel Tower is in Italy", Paris is wrong. Doubtful
pairs are included, so that none of the remaining facts, which should stay, may change. A new answer is known only from
the first kind to the second, and only if the facts themselves give it (`Consequences.answer`): Rome is a city in Italy,
and everything that the table places in Rome lies in Italy.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, cached_property

PARAREL = {
    "P17": "place_country",
    "P19": "person_birth_city",
    "P20": "person_death_city",
    "P27": "person_country",
    "P30": "place_continent",
    "P36": "country_capital",
    "P37": "country_language",
    "P39": "person_office",
    "P101": "person_field",
    "P103": "person_language",
    "P106": "person_profession",
    "P108": "person_employer",
    "P127": "product_owner",
    "P131": "place_location",
    "P136": "artist_genre",
    "P138": "thing_namesake",
    "P140": "follower_religion",
    "P159": "company_city",
    "P176": "product_company",
    "P178": "product_company",
    "P190": "city_twin",
    "P276": "place_location",
    "P364": "work_language",
    "P407": "work_language",
    "P413": "player_position",
    "P449": "show_network",
    "P463": "member_organization",
    "P495": "work_country",
    "P641": "person_sport",
    "P740": "company_founding_city",
    "P937": "person_work_city",
    "P1303": "person_instrument",
    "P1412": "person_language",
}
"""The relations of CounterFact and known_1000 (Wikidata's, as ParaRel words them) by the names used here."""

ASKS = {
    "artist_genre": "genre",
    "book_author": "author",
    "book_language": "language",
    "city_country": "country",
    "city_river": "river",
    "city_state": "state",
    "company_city": "seat",
    "company_country": "country",
    "company_founder": "founder",
    "company_founding_city": "founding city",
    "company_industry": "industry",
    "country_capital": "capital",
    "country_continent": "continent",
    "country_language": "language",
    "country_religion": "religion",
    "dish_country": "country",
    "film_director": "director",
    "film_star": "star",
    "follower_religion": "religion",
    "landmark_city": "city",
    "landmark_country": "country",
    "member_organization": "organization",
    "mountain_range": "range",
    "painting_museum_city": "city",
    "painting_painter": "painter",
    "person_birth_city": "birthplace",
    "person_country": "country",
    "person_employer": "employer",
    "person_field": "field",
    "person_instrument": "instrument",
    "person_language": "language",
    "person_office": "office",
    "person_profession": "profession",
    "person_sport": "sport",
    "person_work_city": "work city",
    "place_continent": "continent",
    "place_country": "country",
    "place_location": "location",
    "player_position": "position",
    "product_company": "maker",
    "product_owner": "owner",
    "show_network": "network",
    "team_city": "city",
    "team_country": "country",
    "team_sport": "sport",
    "thing_namesake": "namesake",
    "work_country": "country",
    "work_language": "language",
}
"""The kind of answer that a relation asks for; a relation that is not listed has a kind of its own."""

FOLLOWS = {
    ("city", "country"): "a city lies in one country",
    ("city", "location"): "a city lies in one region",
    ("location", "country"): "a region lies in one country",
    ("state", "country"): "a state belongs to one country",
    ("river", "country"): "a river flows through few countries",
    ("river", "state"): "a river flows through few states",
    ("range", "country"): "a mountain range lies in few countries",
    ("range", "continent"): "a mountain range lies on one continent",
    ("country", "continent"): "a country lies on one continent",
    ("country", "language"): "people and works of a country use its language",
    ("birthplace", "country"): "most people are citizens of the country that they were born in",
    ("work city", "country"): "most people are citizens of the country that they work in",
    ("employer", "work city"): "people work where their employer is",
    ("employer", "profession"): "an employer has work for some professions",
    ("seat", "country"): "a company comes from the country of its head office",
    ("founding city", "country"): "a company comes from the country that it was founded in",
    ("founding city", "seat"): "many companies stay where they were founded",
    ("field", "profession"): "a profession is named after the field of work",
    ("profession", "field"): "a profession is work in one field",
    ("sport", "profession"): "a player's profession is the sport",
    ("profession", "sport"): "a player's profession is the sport",
    ("position", "sport"): "a position belongs to one sport",
    ("position", "profession"): "a position belongs to one sport, which is the profession",
    ("office", "profession"): "an office is a profession",
    ("office", "religion"): "a pope, a bishop and a rabbi have their religion",
    ("profession", "instrument"): "players of an instrument are musicians",
    ("field", "instrument"): "players of an instrument work in music",
    ("genre", "profession"): "a genre is one art's, and artists of that art have one profession",
    ("genre", "field"): "a genre is one art's",
    ("genre", "instrument"): "a genre has its instruments",
    ("organization", "sport"): "a sport's association has players of that sport",
    ("organization", "profession"): "members of an organization are of few professions",
    ("sport", "field"): "a player's field is the sport",
    ("author", "language"): "an author writes in one language",
    ("author", "country"): "a work comes from its author's country",
    ("director", "country"): "a film comes from its director's country",
    ("director", "language"): "a film is in the language of its director's country",
    ("painter", "country"): "a painting comes from its painter's country",
    ("network", "country"): "a network broadcasts in one country",
    ("maker", "country"): "a product comes from its maker's country",
    ("maker", "owner"): "a product's brand belongs to its maker",
    ("owner", "country"): "a product comes from its owner's country",
    ("namesake", "city"): "what is named after a city lies in it",
    ("namesake", "country"): "what is named after a place lies in its country",
    ("namesake", "capital"): "what is named after a city has it for its capital",
    ("namesake", "location"): "what is named after a place lies in it",
}
"""(edited, other): the other follows from the edited, for the reason given; chains of pairs follow as well."""

AGREEING = 2
"""If an object is no subject itself, this many subjects that have it must agree on what follows from it."""


def asks(relation: str) -> str:
    """Return the kind of answer that a relation asks for."""
    return ASKS.get(relation, relation)


def chains(edited: str, other: str) -> Iterator[tuple[str, ...]]:
    """Yield the chains of pairs of `FOLLOWS` that lead from one kind to another, the shortest first."""
    paths: list[tuple[str, ...]] = [(edited,)]
    while paths:
        yield from (path for path in paths if path[-1] == other)
        paths = [(*path, b) for path in paths for a, b in FOLLOWS if a == path[-1] and b not in path]


@cache
def related(edited: str, other: str) -> bool:
    """Return whether one of two relations follows from the other, or both ask for the same kind of answer."""
    a, b = asks(edited), asks(other)
    return any(True for _ in itertools.chain(chains(a, b), chains(b, a)))


class Consequences:
    """Finds the new answers that follow from edits, as far as facts {relation: {subject: object}} give them."""

    def __init__(self, facts: Mapping[str, Mapping[str, str]]) -> None:
        self.facts = facts

    @cached_property
    def _asked(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """Return the objects in the facts, by kind of answer and subject."""
        answers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for relation, objects in self.facts.items():
            for subject, object in objects.items():
                answers[asks(relation)][subject].add(object)
        return {kind: {s: frozenset(o) for s, o in by_subject.items()} for kind, by_subject in answers.items()}

    def probe(self, edited: str, old: str, new: str, other: str, object: str) -> tuple[str, str] | None:
        """Return the field of a record that another fact of the subject belongs to, and its answer; None for neither.

        "same_subject" with its object if the fact should stay. "portability" with the new answer if the fact follows
        from the edit of `edited` from `old` to `new`, and the facts give an answer that differs from its object.
        """
        if related(edited, other):
            same = asks(edited) == asks(other) and object != old  # another name for the same, or another sense
            answer = None if same else self.answer(edited, new, other)
            return None if answer in (None, object) else ("portability", answer)
        return None if object in (old, new) else ("same_subject", object)

    def answer(self, edited: str, new: str, other: str) -> str | None:
        """Return the object of the relation `other` that follows from the new object of `edited`; None if unknown.

        Only an object that `other` has for some subject counts, so that it is worded as in that relation.
        """
        worded = {*self.facts.get(other, {}).values()}
        for chain in chains(asks(edited), asks(other)):
            objects = {new}
            for a, b in itertools.pairwise(chain):
                objects = {following for object in objects for following in self._step(a, object, b)}
            if len(objects & worded) == 1:
                return next(iter(objects & worded))
        return None

    def _step(self, a: str, object: str, b: str) -> frozenset[str]:
        """Return the answers of kind b to an object of kind a: its own, or else those on which its holders agree."""
        holders, answers = self._asked.get(a, {}), self._asked.get(b, {})
        if direct := answers.get(object):
            return direct
        shared = [answers[s] for s, objects in holders.items() if object in objects and s in answers]
        return shared[0] if len(shared) >= AGREEING and len({*shared}) == 1 else frozenset()
