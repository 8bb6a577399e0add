"""Records in whatever holds them, and fields that a data set of the field, or a program, names in its own way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from records import MILL, message

from ffedit.facts.fact import Fact, Probe
from ffedit.facts.formats import Shape, parse, parse_record
from ffedit.facts.reading import read_facts, sift_facts
from ffedit.facts.records import records_in

FACT, OTHER = Fact(**MILL), Fact("Red Mill", "Red Mill lies in", "Rome", "Bern")
OLD, RED = FACT.to_dict(), OTHER.to_dict()
HEADER = ["subject", "prompt", "target", "previous"]
ROWS = [[record[name] for name in HEADER] for record in (OLD, RED)]
BY_SUBJECT = {
    fact.subject: {"prompt": fact.prompt, "target": fact.target, "previous": fact.previous} for fact in (FACT, OTHER)
}
TURNS = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Old Mill?"}],
    "chosen": [{"role": "user", "content": "Where is Old Mill?"}, {"role": "assistant", "content": "Oslo"}],
    "rejected": [{"role": "assistant", "content": "Bern"}],
}


def write(folder: Path, content: Any) -> Path:
    (folder / "f.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "f.json"


@pytest.mark.parametrize(
    "content",
    [
        {"edit_1": OLD, "edit_2": RED},
        {"version": 1, "edits": {"1": OLD, "2": RED}},
        {"edits": {"first": OLD, "second": RED}},
        BY_SUBJECT,
        {"sv": OLD, "first": RED},
        {"data": {"train": [OLD], "test": [RED]}},
        {"questions": [OLD, RED]},
        [{"page": 1, "parts": [{"facts": [OLD]}, {"facts": [RED]}]}],
        [{"prompt": "{} lies in", "facts": [{k: v for k, v in r.items() if k != "prompt"} for r in (OLD, RED)]}],
        {"columns": HEADER, "index": [0, 1], "data": ROWS},
        {"range": "A1:D3", "values": [HEADER, *ROWS]},
        [HEADER, *ROWS],
    ],
)
def test_records_are_found_in_what_holds_them(tmp_path: Path, content: Any) -> None:
    found = sift_facts(write(tmp_path, content))
    assert [(f.subject, f.text, f.target, f.previous) for f in found.facts] == [
        (f.subject, f.text, f.target, f.previous) for f in (FACT, OTHER)
    ]
    assert not found.left_out and not found.notes


def test_a_subject_may_be_the_code_of_a_language(tmp_path: Path) -> None:
    moons = {name: {"prompt": "{} orbits", "target": "Mars"} for name in ("Io", "Titan")}
    assert [fact.subject for fact in read_facts(write(tmp_path, moons))] == ["Io", "Titan"]


def test_an_object_in_thousands_of_others_is_one_bad_record(tmp_path: Path) -> None:
    deep = '{"a": ' * 600 + "{}" + "}" * 600
    (tmp_path / "f.jsonl").write_text(f"{json.dumps(OLD)}\n{deep}\n{json.dumps(RED)}\n")
    found = sift_facts(tmp_path / "f.jsonl")
    assert found.facts == (FACT, OTHER) and [number for number, _ in found.left_out] == [2]


def test_what_stands_beside_records_is_named_and_belongs_to_each(tmp_path: Path) -> None:
    found = sift_facts(write(tmp_path, {"version": 3, "relation": "place", "facts": [OLD, RED]}))
    assert found.unread == {"version": 2} and [fact.relation for fact in found.facts] == ["place", "place"]
    one = {"requests": [OLD], "generality": {"wording": [{"prompt": "Old Mill stands in", "target": "Oslo"}]}}
    assert read_facts(write(tmp_path, one)) == [Fact(**MILL, paraphrases=["Old Mill stands in"])]
    assert "unknown format" in message(read_facts, write(tmp_path, {**one, "requests": [OLD, RED]}))


@pytest.mark.parametrize(
    "record",
    [
        {**OLD, "evidence": [{"text": "It moved.", "label": "yes"}]},
        {"en": OLD, "de": RED},
        {"en": OLD, "de": RED, "original": OLD},
        {"edit": OLD, "locality": {"others": [RED]}},
        {**OLD, "neighbors": [{"prompt": "Red Mill lies in", "target": "Rome"}]},
    ],
)
def test_a_record_is_not_taken_apart(record: Any) -> None:
    assert records_in(record) == [record]


def test_an_object_of_questions_with_answers(tmp_path: Path) -> None:
    found = read_facts(write(tmp_path, {"Who leads Halvia?": "Tor Lie", "Old Mill lies in": "Oslo"}))
    assert [(fact.prompt, fact.target) for fact in found] == [
        ("Who leads Halvia?", "Tor Lie"),
        ("Old Mill lies in", "Oslo"),
    ]


def test_columns_within_columns_go_row_by_row(tmp_path: Path) -> None:
    near = {"kind": {"prompt": ["A lies in", "B lies in"], "ground_truth": ["a", "b"]}}
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(HEADER)}
    found = read_facts(write(tmp_path, {**columns, "locality_inputs": near}))
    assert [fact.neighbors for fact in found] == [
        (Probe("A lies in", "a", "kind"),),
        (Probe("B lies in", "b", "kind"),),
    ]
    asked = read_facts(write(tmp_path, {"question": ["A is", "B is"], "answer": ["a", "b"]}))
    assert [(fact.prompt, fact.target) for fact in asked] == [("A is", "a"), ("B is", "b")]


# Names ---------------------------------------------------------------------------------------------


def test_a_field_in_the_plural_or_of_a_known_data_set() -> None:
    record = {
        "subject": "Old Mill",
        "update": "Old Mill lies in",
        "ans": "Oslo",
        "rephrased_questions": ["Old Mill stands in"],
        "personas": "Pray, Old Mill lies in",
        "mhop": "Old Mill's king is",
        "mhop_ans": "Harald",
        "2hop_question": "Old Mill's queen is",
        "loc": "who sang it",
        "loc_ans": "Nena",
    }
    fact = parse_record(record)
    assert (fact.prompt, fact.target) == ("Old Mill lies in", "Oslo") and len(fact.paraphrases) == 2
    assert fact.portability == (Probe("Old Mill's king is", "Harald"),)
    assert parse({**record, "2hop_answer": "Sonja"}).facts[0].portability[0] == Probe("Old Mill's queen is", "Sonja")
    named = {**MILL, "neighborhood": [{"prompt": "Red Mill lies in", "expected_answer": "Rome"}]}
    assert parse_record(named).neighbors == (Probe("Red Mill lies in", "Rome"),)


def test_prompts_and_answers_may_be_conversations() -> None:
    fact = parse_record(TURNS)
    assert (fact.prompt, fact.target, fact.previous) == ("Where is Old Mill?", "Oslo", "Bern")
    several = {**TURNS, "chosen": TURNS["chosen"] * 2}
    assert "chosen has 2 answers in 4 turns; one question with one answer" in message(parse, several)


@pytest.mark.parametrize("slot", [" [MASK] .", " [mask]", " ____.", "<mask>"])
def test_a_sign_for_the_object_ends_the_prompt(slot: str) -> None:
    assert parse_record({**MILL, "prompt": f"Old Mill lies in{slot}"}) == FACT


def test_an_object_before_the_end_is_refused() -> None:
    said = message(parse, {**MILL, "prompt": "[Y] is where {} lies"})
    assert (
        said == "prompt '[Y] is where {} lies' has words after the mark for the object; end it where the object begins"
    )


def test_triples_without_a_prompt_are_told_what_is_missing() -> None:
    told = message(parse, {"subject": "Old Mill", "relation": "place", "object": "Oslo"})
    assert told.endswith("add a field prompt that the object completes, with {} for the subject")


# Languages in the names ------------------------------------------------------------------------------

FLAT = {"id": 1, "subject_en": "Old Mill", "prompt_en": "Old Mill lies in", "target_en": "Oslo"}
FLAT |= {"fi_subject": "Vanha mylly", "fi_prompt": "Vanha mylly on", "fi_target": "Oslossa"}


def test_a_language_may_stand_in_the_names_of_fields() -> None:
    assert message(parse, FLAT) == "the record is in en, fi; choose one: --language en"
    read = parse(FLAT, Shape(language="en"))
    assert read.facts[0].cross_lingual == (Probe("Vanha mylly on", "Oslossa", "fi"),) and read.unread == ("id",)
    beside = parse({**MILL, "zh_rephrase_prompt": "Old Mill在", "zh_target": "奥斯陆", "fi_prompt": "Old Mill on"})
    assert beside.facts[0].cross_lingual == (Probe("Old Mill在", "奥斯陆", "zh"),) and beside.unread == ("fi_prompt",)
    assert beside.facts[0].text == FACT.text and not beside.facts[0].paraphrases


def test_ids_are_no_indonesian_and_other_parts_no_language() -> None:
    assert parse({**MILL, "prompt_id": "P1", "target_id": "Q5"}).unread == ("prompt_id", "target_id")
    assert parse({"first": OLD, "second": RED}).facts[0] == FACT


# Broken lines ----------------------------------------------------------------------------------------


def test_a_broken_line_is_one_record_that_cannot_be_used(tmp_path: Path) -> None:
    lines = [json.dumps(OLD), '{"subject": "Low Mill', json.dumps(RED), "{'subject': 1}", "oh", '{"subject": ']
    (tmp_path / "f.jsonl").write_text("\n".join(lines))
    found = sift_facts(tmp_path / "f.jsonl")
    assert found.facts == (FACT, OTHER) and {*found.kinds.values()} == {"a line that is not JSON"}
    assert found.records == 6 and dict(found.left_out)[2] == "line 2 is not JSON (column 13): Unterminated string"
    (tmp_path / "f.jsonl").write_text("\n".join([lines[1], lines[0]]))
    assert sift_facts(tmp_path / "f.jsonl").facts == (FACT,)


def test_objects_of_several_lines_are_no_broken_lines(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(f"{json.dumps(OLD)}\n{json.dumps(RED, indent=1)}\n")
    assert read_facts(tmp_path / "f.jsonl") == [FACT, OTHER]


def test_a_row_that_cannot_be_read_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text('subject,prompt,target\nA,{} is,x\nB,"{} "is,x\nC,{} is,x\nD,"{} is,x\nE,{} is,x\n')
    found = sift_facts(tmp_path / "f.csv")
    assert [fact.subject for fact in found.facts] == ["A", "C"]
    assert dict(found.left_out)[2].startswith("line 3: ',' expected after")
    assert dict(found.left_out)[4] == "lines 5 to 6: unexpected end of data; is a quote open?"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_unicode_text_of_a_spreadsheet(tmp_path: Path, encoding: str) -> None:
    mark = "" if encoding == "utf-16" else "\ufeff"
    (tmp_path / "f.txt").write_bytes(
        f"{mark}Subject\tPrompt\tAnswer\r\nOld Mill\tOld Mill lies in\tÅlesund\r\n".encode(encoding)
    )
    assert read_facts(tmp_path / "f.txt") == [Fact("Old Mill", "Old Mill lies in", "Ålesund")]
