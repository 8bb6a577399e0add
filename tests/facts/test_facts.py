"""A fact: its text, its span, its probes, every way to get one wrong, and two that contradict each other."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from records import EIFFEL, message

from ffedit import EditError
from ffedit.facts.fact import Fact, Probe, check_facts, conflicts, fill, same_question, same_target
from ffedit.facts.text import occurrences


def test_the_slot_is_the_subject_even_where_the_subject_also_stands_elsewhere() -> None:
    fact = Fact(subject="Rome", prompt="Rome is not {} but", target="Paris")
    assert fact.text == "Rome is not Rome but" and fact.span == (12, 16)


@pytest.mark.parametrize(
    ("subject", "prompt", "occurrence", "start"),
    [
        ("Rome", "Romeo left Rome for", 0, 11),  # not inside another word
        ("Rome", "Jerome saw Rome_1 and Rome's", 0, 22),
        ("Rome", "Rome, old Rome, is", 0, 0),  # the first by default
        ("Rome", "Rome, old Rome, is", 1, 10),
        ("Cafe", "Cafe\u0301 or Cafe is", 0, 9),  # an accent written apart continues the word
        ("C++", "C++ was made by", 0, 0),
        ("iPhone", "苹果的iPhone手机由", 0, 3),  # beside Chinese characters a word may end anywhere
        ("東京", "首都は東京です", 0, 3),
        ("東京", "東京都の東京は", 1, 4),
        ("파리", "수도는 파리이다", 0, 4),  # Korean particles are attached
        ("กรุงเทพ", "เมืองกรุงเทพคือ", 0, 5),
        ("🗼", "tower🗼is in", 0, 5),  # an emoji is no letter
        ("Saint-Denis", "in Saint-Denis-sur-Mer and", 0, 3),
        ("aa", "aaa aa", 0, 4),
    ],
)
def test_span_of_a_subject_in_the_prompt(subject: str, prompt: str, occurrence: int, start: int) -> None:
    fact = Fact(subject, prompt, "x", occurrence=occurrence)
    assert fact.span == (start, start + len(subject))
    assert fact.text == prompt


def test_occurrences_do_not_overlap() -> None:
    assert list(occurrences("哈哈哈哈", "哈哈")) == [(0, 2), (2, 4)]


def test_lists_and_plain_strings_become_tuples_and_probes() -> None:
    fact = Fact(
        **EIFFEL,
        paraphrases=["See {} in"],
        neighbors=["Big Ben is in", {"prompt": "Colosseum is in", "target": " Rome "}],
        same_subject=["{} was built by"],
        generation=iter(["{} is"]),
        case_id=0,
    )
    assert fact.texts("paraphrases") == ("See Eiffel Tower in",)
    assert fact.texts("generation") == ("Eiffel Tower is",)
    assert fact.neighbors == (Probe("Big Ben is in"), Probe("Colosseum is in", "Rome"))
    assert fact.probes("neighbors") == (Probe("Big Ben is in", "Paris"), Probe("Colosseum is in", "Rome"))
    assert fact.probes("same_subject") == (Probe("Eiffel Tower was built by"),)
    assert fact.case_id == "0" and Fact(**EIFFEL, relation=17).relation == "17"
    assert hash(fact) == hash(dataclasses.replace(fact)) and pickle.loads(pickle.dumps(fact)) == fact


def test_only_the_names_lose_white_space() -> None:
    fact = Fact(subject=" Rome ", prompt=" {} is in ", target=" Italy\n", previous=" France ")
    assert (fact.subject, fact.prompt, fact.target, fact.previous) == (
        "Rome",
        " {} is in ",
        "Italy",
        "France",
    )


def test_each_alias_is_kept_once_and_none_is_the_target() -> None:
    fact = Fact(**EIFFEL, target_aliases=["Roma", " Rome ", "Roma", "Urbs"])
    assert fact.target_aliases == ("Roma", "Urbs")
    probe = Probe("{} is in", "Italy", aliases=["Italia", "Italy"]).filled("Rome", "Spain")
    assert probe == Probe("Rome is in", "Italy", aliases=("Italia",))


def test_fill_puts_the_subject_into_the_slot() -> None:
    assert fill("{} or {}, {x}", "A") == "A or A, {x}" and fill("plain", "A") == "plain"


def test_round_trip_in_the_own_form_without_empty_fields() -> None:
    assert Fact(**EIFFEL).to_dict() == EIFFEL
    full = Fact(
        "Rome",
        "Rome, old Rome, is in",
        "Spain",
        "Italy",
        paraphrases=["{} is in"],
        neighbors=["Oslo is in", Probe("Bern is in", "Switzerland")],
        same_subject=[{"prompt": "{} lies on the", "target": "Tiber"}],
        generation=["{} is"],
        relation="P17",
        occurrence=1,
        case_id="7",
        portability=[
            Probe("The river of {} is the", "Tiber", "Reasoning", ("Tevere",)),
            Probe("{} is", "x", aliases=["y"]),
        ],
        references=["Madrid is a city in Spain."],
        locality=["Who sang it?", Probe("Who wrote it?", kind="Other")],
        target_aliases=["España", "Kingdom of Spain"],
    )
    assert Fact.from_dict(json.loads(json.dumps(full.to_dict()))) == full


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"subject": "  "}, "subject is empty"),
        ({"subject": None}, "subject must be text, found None"),
        ({"subject": "{}"}, "contains {}"),
        ({"prompt": ""}, "prompt is empty"),
        (
            {"prompt": "It is in"},
            "prompt 'It is in' has neither {} nor the subject 'Eiffel Tower'; put {} where",
        ),
        ({"prompt": "Eiffel Towers are in"}, "only inside another word; put {} where"),
        ({"prompt": "{} and {} are in"}, "has 2 slots {}; expected one"),
        ({"prompt": "Eiffel Tower", "occurrence": 1}, "occurrence 1 of 'Eiffel Tower' asked for, but"),
        ({"prompt": "Eiffel Tower", "occurrence": -1}, "expected 0 to 0"),
        ({"occurrence": 1}, "leave occurrence out"),
        ({"occurrence": "1"}, "occurrence must be a whole number, found '1'"),
        ({"occurrence": True}, "occurrence must be a whole number, found True"),
        ({"target": "\t"}, "target is empty"),
        ({"target": 5}, "target must be text, found 5 (int)"),
        ({"target": " Paris "}, "target and previous are both 'Paris'"),
        ({"target": "\ud800"}, "not valid Unicode text"),
        ({"previous": ""}, "previous is empty"),
        ({"paraphrases": "one"}, "paraphrases must be a list, found 'one'"),
        ({"paraphrases": [""]}, "a prompt in paraphrases is empty"),
        ({"neighbors": [3]}, "a probe must be a prompt or {prompt, target, kind, aliases, needs}, found 3 (int)"),
        ({"neighbors": [{"prompt": "x", "answer": "y"}]}, "a probe must be a prompt or {prompt, target, kind, "),
        ({"neighbors": [{"prompt": " "}]}, "a probe's prompt is empty"),
        ({"same_subject": {"prompt": "x"}}, "same_subject must be a list"),
        ({"generation": None}, "generation must be a list"),
        ({"portability": ["The river of {} is"]}, "'The river of {} is' has no target; give the answer that follows"),
        ({"references": "one"}, "references must be a list, found 'one'"),
        ({"references": [" "]}, "a text in references is empty"),
        ({"locality": [{"prompt": "x", "kind": 3}]}, "a probe's kind must be text, found 3 (int)"),
        ({"target_aliases": "Roma"}, "target_aliases must be a list, found 'Roma'"),
        ({"target_aliases": [" "]}, "a name in target_aliases is empty"),
        ({"target": None, "target_aliases": ["Roma"]}, "target_aliases are other names of a target, and there is none"),
        ({"locality": [{"prompt": "x", "aliases": ["y"]}]}, "a probe's aliases are other names of a target"),
        ({"locality": [{"prompt": "x", "target": "y", "aliases": [3]}]}, "a name in a probe's aliases must be text"),
        ({"prompt": "x" * 9999}, "…"),
    ],
)
def test_a_bad_fact_is_one_clear_line(changes: dict[str, Any], expected: str) -> None:
    text = message(Fact, **{**EIFFEL, **changes})
    assert expected in text and len(text) < 300


def test_an_unknown_field_does_not_pass_silently() -> None:
    assert "unknown field paraphrase; a fact's fields are subject, prompt" in message(
        Fact.from_dict, {**EIFFEL, "paraphrase": ["x {}"]}
    )
    assert "subject missing" in message(Fact.from_dict, {"prompt": "{} is"})


# One question with two answers --------------------------------------------------------------------------

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
