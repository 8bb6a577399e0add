"""One question with two answers is found, and nothing else is."""

from __future__ import annotations

import dataclasses

import pytest

from ffedit import EditError, Fact
from ffedit.facts.fact import check_facts, conflicts, same_question, same_target

FACT = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris", relation="place")


def changed(**fields: str | None) -> Fact:
    return dataclasses.replace(FACT, **fields)


CONTRADICTING = [
    changed(target="Berlin"),
    changed(target="Berlin", prompt="THE  {} is located in "),
    changed(target="Berlin", prompt="the Eiffel tower is located in"),
    changed(target="Berlin", prompt="where is {}?"),  # of one relation
    changed(target="Berlin", prompt="where is {}?", subject="eiffel  Tower"),
    changed(target="Berlin", relation=None),
]
AGREEING = [
    changed(target="rome"),
    changed(target=" Rome", prompt="where is {}?"),
    changed(target="Berlin", subject="old tower"),
    changed(target="Berlin", prompt="who built {}?", relation="builder"),
    changed(target="Berlin", prompt="who built {}?", relation=None),
    changed(target=None),
]


@pytest.mark.parametrize("other", CONTRADICTING, ids=range(len(CONTRADICTING)))
def test_two_answers_to_one_question_contradict_each_other(other: Fact) -> None:
    away = changed(subject="old tower", target="Madrid")
    assert conflicts([FACT, away, other]) == [(FACT, other)]
    with pytest.raises(EditError, match="'Rome' and 'Berlin'; keep one") as caught:
        check_facts([away, FACT, other])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", AGREEING, ids=range(len(AGREEING)))
def test_facts_that_do_not_contradict_are_written_together(other: Fact) -> None:
    assert conflicts([FACT, other]) == conflicts([other, FACT]) == []
    check_facts([FACT, other])


def test_the_same_answer_twice_is_one_question_and_no_contradiction() -> None:
    assert same_question([FACT, changed(target="ROME")]) == [(0, 1)] and same_target(FACT, changed(target="ROME"))
    assert not same_target(FACT, changed(target="Berlin"))


def test_a_repeated_question_is_paired_with_the_first_fact_that_asks_it() -> None:
    by_prompt, by_relation = changed(relation=None), changed(prompt="where is {}?")
    assert same_question([by_prompt, by_relation, FACT]) == [(0, 2), (1, 2)]
    assert same_question([FACT, by_relation, by_prompt, FACT]) == [(0, 1), (0, 2), (0, 3)]
    paris = changed(relation=None, target="Berlin")
    assert conflicts([by_relation, paris, FACT]) == [(paris, FACT)]
    assert same_question([]) == []
