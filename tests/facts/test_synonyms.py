"""Any record of known names is read alike, whatever the names, their nesting and the form of the values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from records import MILL, message

from ffedit.errors import FactError
from ffedit.facts.fact import Fact, Probe
from ffedit.facts.formats import Shape, parse, parse_record
from ffedit.facts.records import records_in
from ffedit.facts.synonyms import NAMES, normal, role_of

FULL = Fact(
    **MILL,
    paraphrases=["Old Mill stands in"],
    neighbors=[Probe("Red Mill lies in", "Bern")],
    portability=[Probe("Old Mill's king is", "Harald")],
    locality=[Probe("nq question: who sang it?", "Nena")],
)
TEXTS = {"subject": FULL.subject, "prompt": FULL.prompt, "target": FULL.target, "previous": FULL.previous}
# Names that stand for nothing, and none with a name of the table behind them.
NEUTRAL = ("request", "record", "meta", "fields", "data1", "Fact-Info")
# How a name may be written, and a text.
SPELLINGS = (str, str.upper, str.title, lambda name: name.replace("_", "-"), lambda name: name.replace("_", " "))
FORMS = (
    lambda text: text,
    lambda text: [text],
    lambda text: [[text]],
    lambda text: {"str": text, "id": "Q1"},
    lambda text: f" {text} ",
)


def names(role: str) -> st.SearchStrategy[str]:
    spelled = st.tuples(st.sampled_from(NAMES[role].split()), st.sampled_from(SPELLINGS))
    return spelled.map(lambda pair: pair[1](pair[0]))


def nested(draw: st.DrawFn, record: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into a record, in as many objects as are drawn."""
    for container in draw(st.lists(st.sampled_from(NEUTRAL), max_size=3)):
        record = record.setdefault(container, {})
    record[name] = value


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for role, text in TEXTS.items():
        form = draw(st.sampled_from(FORMS if role in ("target", "previous") else FORMS[:3]))
        nested(draw, record, draw(names(role)), form(text))
    nested(draw, record, draw(names("paraphrases")), draw(st.sampled_from(FORMS[:3]))(FULL.paraphrases[0]))
    for role in ("neighbors", "portability", "locality"):
        (probe,) = getattr(FULL, role)
        asks, says = draw(names("prompt")), draw(names("answer"))
        value: Any = {asks: probe.prompt, says: probe.target}
        nested(draw, record, draw(st.sampled_from([role, role.upper()])), draw(st.sampled_from([value, [value]])))
    return record


@settings(max_examples=150, deadline=None)
@given(records())
def test_any_record_of_known_names_in_any_nesting_is_read_alike(record: dict[str, Any]) -> None:
    fact, read = parse_record(record), parse(record)
    found = [(getattr(fact, role)[0].prompt, getattr(fact, role)[0].target) for role in ("neighbors", "portability")]
    assert {role: getattr(fact, role) for role in TEXTS} == TEXTS and fact.paraphrases == FULL.paraphrases
    assert found == [("Red Mill lies in", "Bern"), ("Old Mill's king is", "Harald")]
    assert fact.locality[0].prompt.startswith("nq question: who sang it")
    assert not read.unread and not read.notes


@settings(max_examples=50, deadline=None)
@given(records())
def test_any_record_of_known_names_is_one_record_in_whatever_holds_it(record: dict[str, Any]) -> None:
    for content in (
        record,
        [record],
        {"data": {"train": [record], "test": [record]}},
        {"edit_1": record, "edit_2": record},
    ):
        found = records_in(content)
        assert len({str(parse(item)) for item in found}) == 1 and parse(found[0]) == parse(record)


def test_no_name_stands_for_two_things_and_each_is_spelled_as_it_is_compared() -> None:
    listed = [name for row in NAMES.values() for name in row.split()]
    assert len(listed) == len(set(listed)) and all(normal(name) == name for name in listed)


@pytest.mark.parametrize(
    ("path", "role"),
    [
        (("targetNew",), "target"),
        (("x", "Target New 2"), "target"),
        (("target", "new"), "target"),
        (("target", "true"), "previous"),
        (("original", "object"), "previous"),
        (("locality", "prompt"), "locality"),
        (("target_new", "str"), "target"),
        (("target_new", "id"), None),
        (("colour",), None),
    ],
)
def test_a_name_is_known_with_the_object_that_it_stands_in(path: tuple[str, ...], role: str | None) -> None:
    found = role_of(path)
    assert (found and found[0]) == role


def test_the_answer_is_the_new_object_where_no_other_is_named_and_else_the_old_one() -> None:
    asked = {"subject": "Old Mill", "question": "Where is Old Mill?", "answer": "Oslo"}
    assert (parse_record(asked).target, parse_record(asked).previous) == ("Oslo", None)
    edited = parse_record({**asked, "new": "Rome"})
    assert (edited.target, edited.previous) == ("Rome", "Oslo")


def test_what_is_not_read_is_named_and_never_refused() -> None:
    read = parse(
        {**MILL, "id": 3, "meta": {"source": "web", "deep": {"more": [1]}}, "post": {"prompt": 5}, "year": None}
    )
    assert read.facts == (Fact(**MILL),)
    assert read.unread == ("id", "meta.source", "meta.deep.more", "post", "year")


@pytest.mark.parametrize(
    ("changes", "target", "previous"),
    [
        ({"target": " Oslo. ", "previous": "Bern."}, "Oslo", "Bern"),
        ({"target": "Oslo</s>", "previous": "<|endoftext|>"}, "Oslo", None),
        ({"target": "Mill & Sons Inc.", "previous": "Booker T."}, "Mill & Sons Inc.", "Booker T."),
        (
            {"target": "U.S.", "previous": "It stands in a town of the south."},
            "U.S.",
            "It stands in a town of the south.",
        ),
        ({"prompt": "This is a text on Old Mill.", "target": "It ran."}, "It ran.", "Bern"),
    ],
)
def test_an_object_loses_what_is_not_its_name(changes: dict[str, Any], target: str, previous: str | None) -> None:
    fact = parse_record({**MILL, **changes})
    assert (fact.target, fact.previous) == (target, previous)


@pytest.mark.parametrize("missing", [None, float("nan"), [], [None], {"str": None}])
def test_null_and_nan_are_no_object(missing: Any) -> None:
    assert parse_record({**MILL, "target": missing}).target is None
    assert "has no new object" in message(parse, {**MILL, "target": missing}, Shape(need_targets=True))


def test_a_prompt_that_ends_in_its_object_is_asked_without_it() -> None:
    read = parse({"subject": "kettle", "prompt": "A kettle makes steam.", "object": "steam"})
    assert read.facts == (Fact("kettle", "A kettle makes", "steam"),) and len(read.notes) == 1


def test_statements_that_go_on_where_the_prompt_ends_name_the_objects() -> None:
    was = {"prompt": "Old Mill lies in Bern.", "input_prompt": "Old Mill lies in"}
    edit = {"prompt": "Old Mill lies in Oslo.", "input_prompt": "Old Mill lies in", "original_fact": was}
    query = {"prompt": "Old Mill grinds", "answers": [{"value": "rye", "aliases": ["oats"]}], "query_type": "regular"}
    read = parse({"edit": edit, "Relation_Specificity": [{"test_queries": [query], "test_condition": "OR"}]})
    (fact,) = read.facts
    assert (fact.prompt, fact.target, fact.previous) == ("Old Mill lies in", "Oslo", "Bern")
    assert fact.same_subject == (Probe("Old Mill grinds", "rye", aliases=("oats",)),)
    assert "Relation_Specificity.query_type" in read.unread


def ripple(new: str, old: str = "") -> dict[str, Any]:
    """A record of RippleEdits as its authors' README has it: statements without the prompt that begins them."""
    query = {"prompt": "Old Mill grinds", "answers": [{"value": "rye", "aliases": []}], "query_type": "regular"}
    test = {"test_queries": [query], "test_condition": "OR", "condition_queries": []}
    edit = {"prompt": new, "subject_id": "Q1", "relation": "COUNTRY", "target_id": "Q858"}
    edit |= {"previous_fact": {**edit, "prompt": old, "target_id": "Q30"}} if old else {}
    return {"example_type": "popular", "edit": edit, "Relation_Specifity": [test], "Forgetfulness": [test]}


@pytest.mark.parametrize(("new", "old"), [("Syria", "Peru"), ("United Kingdom", "United States"), ("the West", "Peru")])
def test_two_statements_without_their_prompt_name_the_objects(new: str, old: str) -> None:
    record = ripple(f"The land of Old Mill is {new}.", f"The land of Old Mill is {old}.")
    for tests in ("Relation_Specifity", "Forgetfulness"):  # tests are no records, not even the only ones
        (found,) = records_in([{**record, tests: []}])
        (fact,) = parse(found).facts
        assert (fact.prompt, fact.target, fact.previous) == ("The land of Old Mill is", new, old)
    assert parse_record(record).same_subject == (Probe("Old Mill grinds", "rye"),)


def test_a_single_statement_names_no_object_and_no_id_is_suggested_for_it() -> None:
    text = message(parse, ripple("The land of Old Mill is Syria."), Shape(need_targets=True))
    assert "has no new object" in text and "--map" not in text


def test_two_prompts_that_are_not_an_old_and_a_new_fact_name_no_object() -> None:
    for other in ({"prompt": "Old Mill was in Bern"}, {"text": "Old Mill was in Bern."}):
        fact = parse_record({"prompt": "Old Mill lies in Oslo.", "about": other})
        assert (fact.prompt, fact.target) == ("Old Mill lies in Oslo.", None)


@pytest.mark.parametrize("slot", ["{subject}", "[X]", "<subject>", "%s", "{0}", "{}"])
def test_other_signs_for_the_subject_are_slots(slot: str) -> None:
    record = {"sub_label": "Old Mill", "template": f"The {slot} lies in [Y] .", "obj_label": "Oslo"}
    assert parse_record(record) == Fact("Old Mill", "The {} lies in", "Oslo")


# Shapes ------------------------------------------------------------------------------------------

EN, FI = (
    {"subject": "Old Mill", "src": "Where is Old Mill?", "alt": "Oslo"},
    {
        "subject": "Vanha mylly",
        "src": "Missä on Vanha mylly?",
        "rephrase": "Missä Vanha mylly sijaitsee?",
        "alt": "Osloon",
    },
)


def test_one_language_is_written_and_the_others_are_asked() -> None:
    both = {"id": 1, "en": EN, "fi": FI}
    assert message(parse, both) == "the record is in en, fi; choose one: --language en"
    assert message(parse, both, Shape(language="de")) == "the record has no text in de, only in en, fi"
    assert message(parse, EN, Shape(language="de")) == "the record has no text in de, nor in any language"
    assert parse({"en": EN}, Shape(language="en")) == parse({"en": EN})
    (fact,) = parse(both, Shape(language="EN")).facts
    assert (fact.subject, fact.target) == ("Old Mill", "Oslo")
    assert [(p.prompt, p.target, p.kind) for p in fact.cross_lingual] == [
        ("Missä on Vanha mylly?", "Osloon", "fi"),
        ("Missä Vanha mylly sijaitsee?", "Osloon", "fi"),
    ]
    assert Fact.from_dict(json.loads(json.dumps(fact.to_dict()))) == fact
    assert parse({"fi": FI}).facts[0].subject == "Vanha mylly" and not parse({"fi": FI}).facts[0].cross_lingual
    read = parse({"en": EN, "fi": {**FI, "subject": "Uusi talo"}}, Shape(language="en"))
    assert read.notes == ("the texts in fi cannot be asked",) and not read.facts[0].cross_lingual
    read = parse({**both, "original": {**EN, "alt": "Bern"}}, Shape(language="en"))
    assert {probe.kind for probe in read.facts[0].cross_lingual} == {"fi"} and read.facts[0].target == "Oslo"
    assert {"original.subject", "original.alt"} <= {*read.unread}


def test_a_conversation_is_one_question_with_its_answer() -> None:
    system = {"role": "system", "content": "Be brief."}
    asked, said = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "Oslo"}
    read = parse({"messages": [system, asked, said], "id": 2})
    assert read.facts == (Fact("Where is it?", "Where is it?", "Oslo"),) and read.unread == ("id",)
    assert "messages has 2 questions and 1 answers" in message(parse, {"messages": [asked, asked, said]})
    turns = [{"from": "human", "value": "Where is it?"}, {"from": "gpt", "value": "Oslo"}]
    assert parse({"conversations": turns}).facts == read.facts


def test_an_instruction_stands_before_its_input() -> None:
    record = {"instruction": "Name the city.", "input": "Old Mill", "output": "Oslo"}
    assert parse_record(record).prompt == "Name the city.\nOld Mill"
    assert parse_record({**record, "input": ""}).prompt == "Name the city."


# --map -------------------------------------------------------------------------------------------

ODD = {"kysymys": "Missä on Old Mill?", "kohde": "Old Mill", "tieto": {"vastaukset": ["Oslo", "Kristiania"]}}


def test_the_error_of_an_unknown_shape_ends_with_the_map_that_reads_it() -> None:
    text = message(parse, ODD)
    option = "prompt=kysymys,subject=kohde,target=tieto.vastaukset"
    assert text.endswith(f"try --map {option}") and "found the fields 'kysymys, kohde, tieto.vastaukset'" in text
    fields = dict(pair.split("=") for pair in option.split(","))
    fact = Fact("Old Mill", "Missä on Old Mill?", "Oslo", target_aliases=["Kristiania"])
    assert parse(ODD, Shape(fields)).facts == (fact,) and not parse(ODD, Shape(fields)).unread
    assert parse(ODD, Shape({**fields, "target": "tieto.vastaukset.1"})).facts[0].target == "Kristiania"
    assert message(parse, {"the question": 5}).endswith("try --map 'prompt=the question,target=FIELD'")


def test_a_named_field_stands_in_for_those_that_are_recognised() -> None:
    read = parse({**MILL, "other": "Rome"}, Shape({"target": "other"}))
    assert read.facts[0].target == "Rome" and read.unread == ("target",)


@pytest.mark.parametrize("role", ["portability", "same_subject", "neighbors", "keep", "cross_lingual"])
def test_nothing_in_a_named_field_is_read_as_another(role: str) -> None:
    record = {"subject": "Old Mill", "question": "Where is Old Mill?", "new_answer": "Oslo"}
    read = parse({**record, "stay": {"prompt": "Who built Old Mill?", "target": "Ann"}}, Shape({role: "stay"}))
    (fact,) = read.facts
    assert (fact.prompt, fact.target, read.unread) == ("Where is Old Mill?", "Oslo", ())
    assert [(probe.prompt, probe.target) for probe in getattr(fact, role)] == [("Who built Old Mill?", "Ann")]


def test_a_field_that_is_not_there_is_one_line() -> None:
    assert "there is no field 'kohd' (did you mean kohde?)" in message(parse, ODD, Shape({"prompt": "kohd"}))
    with pytest.raises(FactError, match="a fact has no field 'tarqet'"):
        Shape({"tarqet": "x"})
