"""Which facts follow from an edited one, and what they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from atlas.table import load
from follows import ASKS, FOLLOWS, PARAREL, Consequences, chains, related

ROOT = Path(__file__).parents[2]

MORE = json.loads((ROOT / "evaluations" / "data" / "more_facts.json").read_text(encoding="utf-8"))
FACTS = {
    "city_country": {"Rome": "Italy", "Paris": "France"},
    "landmark_country": {"Colosseum": "Italy", "Louvre": "France", "Prado": "Spain", "Sol": "Spain"},
    "landmark_city": {"Colosseum": "Rome", "Prado": "Madrid", "Sol": "Madrid"},
    "place_continent": {"Etna": "Europe", "Fuji": "Asia"},
    "country_continent": {"Italy": "Europe", "France": "Europe", "Japan": "Asia"},
}


@pytest.mark.parametrize(
    ("edited", "other", "expected"),
    [
        ("landmark_city", "landmark_country", True),
        ("landmark_country", "landmark_city", True),  # either way round
        ("landmark_city", "place_continent", True),  # city, country, continent
        ("person_birth_city", "person_language", True),
        ("company_city", "company_country", True),
        ("person_field", "person_profession", True),
        ("book_author", "book_language", True),
        ("place_country", "landmark_country", True),  # the same in other words
        ("landmark_city", "landmark_kind", False),
        ("country_capital", "country_continent", False),
        ("country_language", "country_currency", False),
        ("person_birth_city", "person_profession", False),
        ("person_country", "person_sport", False),
        ("team_sport", "team_city", False),
        ("book_author", "work_kind", False),
    ],
)
def test_relations_that_follow_are_told_from_those_that_stay(edited: str, other: str, expected: bool) -> None:
    assert related(edited, other) is related(other, edited) is expected


def test_a_new_answer_is_given_where_the_facts_agree_on_it() -> None:
    answer = Consequences(FACTS).answer
    assert answer("landmark_city", "Rome", "landmark_country") == "Italy"
    assert answer("landmark_city", "Madrid", "landmark_country") == "Spain"  # all that is in Madrid is in Spain
    assert answer("landmark_city", "Rome", "place_continent") == "Europe"
    assert answer("landmark_country", "Japan", "place_continent") == "Asia"
    assert answer("landmark_city", "Bern", "landmark_country") is None  # unknown
    assert answer("landmark_country", "Italy", "landmark_city") is None  # Italy has more cities than one
    assert answer("landmark_city", "Paris", "city_river") is None
    two = {**FACTS, "landmark_country": {**FACTS["landmark_country"], "Sol": "Castile"}}
    assert Consequences(two).answer("landmark_city", "Madrid", "landmark_country") is None  # they do not agree
    assert (
        Consequences(FACTS | {"landmark_country": {"Louvre": "France"}}).answer(
            "landmark_city", "Rome", "landmark_country"
        )
        is None
    ), "no landmark is said to be in Italy"


def test_relations_and_things_have_one_vocabulary() -> None:
    asked = {*load().relations, *PARAREL.values(), *MORE}
    assert set(ASKS) <= asked, "a relation that nothing asks"
    things = {ASKS.get(name, name) for name in asked}
    assert {thing for pair in FOLLOWS for thing in pair} <= things, "a thing that no relation asks for"
    assert all(reason and a != b for (a, b), reason in FOLLOWS.items())
    assert next(chains("city", "continent")) == ("city", "country", "continent")
    assert not set(MORE) & set(PARAREL)


def test_no_relation_has_one_answer_for_all_its_subjects() -> None:
    """Such a fact ("Lyon is a beautiful city") is kept by any edit, and would only raise same_subject."""
    assert not [name for name, own in MORE.items() if len(own.get("facts", ())) == 1]
