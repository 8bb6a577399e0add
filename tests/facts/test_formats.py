"""Files of facts: every known format, every way to get one wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from records import EIFFEL, REWRITE, message

from ffedit.facts.fact import Fact, Probe
from ffedit.facts.formats import Shape, parse, parse_record
from ffedit.facts.reading import read_facts, sift_facts

ROOT = Path(__file__).parents[2]
EDITS = ROOT / "edits"

FLAT = {"subject": "UK", "prompt": "The capital of the UK is", "target_new": "Rome", "ground_truth": "London"}


def write(folder: Path, content: Any, name: str = "facts.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# The formats --------------------------------------------------------------------------------------


ZSRE = {
    "subject": "UniFirst",
    "src": "What does UniFirst make?",
    "pred": "uniform",
    "rephrase": "What is made by UniFirst?",
    "alt": "aircraft",
    "answers": ["uniforms", "uniform"],
    "loc": "nq question: who sang it",
    "loc_ans": "Nena",
    "cond": "uniform >> aircraft || What does UniFirst make?",
}


@pytest.mark.parametrize(
    ("changes", "target", "previous"),
    [
        ({"alt": ""}, "uniforms", "uniform"),
        ({"alt": "uniforms"}, "uniforms", "uniform"),  # the record writes the truth over the model's guess
        ({"alt": "uniforms", "pred": "uniforms"}, "uniforms", None),
        ({"alt": None, "pred": None}, "uniforms", None),
        ({"answers": []}, "aircraft", "uniform"),
    ],
)
def test_zsre_writes_alt_or_else_the_true_answer(changes: dict[str, Any], target: str, previous: str | None) -> None:
    fact = parse_record({**ZSRE, **changes})
    assert (fact.target, fact.previous) == (target, previous)


def test_a_question_of_zsre_gets_no_second_question_mark() -> None:
    assert parse_record({**ZSRE, "loc": "nq question: who sang it?"}).locality[0].prompt == "nq question: who sang it?"


@pytest.mark.parametrize(("ground_truth", "previous"), [(["London", "Greater London"], "London"), ("", None)])
def test_easyedit_takes_the_first_ground_truth_as_the_old_object(ground_truth: Any, previous: str | None) -> None:
    assert parse_record({**FLAT, "ground_truth": ground_truth}).previous == previous


KNOWN = {
    "known_id": 5,
    "subject": "Rome",
    "attribute": "Italy",
    "template": "{} is in",
    "prediction": " Italy, which",
    "prompt": "Rome is in the land of",
    "relation_id": "P17",
}


def test_known_1000_has_nothing_to_write(tmp_path: Path) -> None:
    path = write(tmp_path, [KNOWN])
    fact = Fact("Rome", "Rome is in the land of", previous="Italy", relation="P17", case_id="5")
    assert read_facts(path, need_targets=False) == [fact]
    assert "record 1: 'Rome is in the land of' has no new object; give a target" in message(read_facts, path)


@pytest.mark.parametrize(("aliases", "read"), [(["Misr"], ("Misr",)), ("Misr", ("Misr",)), (None, ())])
def test_a_probe_may_have_several_answers(aliases: Any, read: tuple[str, ...]) -> None:
    asked = {"prompt": "the Nile is in", "kind": "place", "target": ["Egypt", "Sudan"], "aliases": aliases}
    (probe, one) = parse_record({**FLAT, "neighbors": [asked, {**asked, "target": "Egypt"}]}).neighbors
    assert probe == Probe("the Nile is in", "Egypt", "place", ("Sudan", *read))
    assert one == Probe("the Nile is in", "Egypt", "place", read)


@pytest.mark.parametrize("asked", [{"prompt": None, "target": "Egypt"}, {"target": "Egypt"}])
def test_an_answer_without_a_prompt_is_named(asked: dict[str, Any]) -> None:
    read = parse({**FLAT, "keep": [asked]})
    assert read.facts == (parse_record(FLAT),) and read.unread == ("keep.target",)


def nested(depth: int, kind: type) -> Any:
    """Return a text in so many lists or objects."""
    value: Any = "Rome"
    for _ in range(depth):
        value = kind([value] if kind is list else {"a": value})
    return value


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("text", "expected an object, found 'text'"),
        (["x"], "expected an object, found ['x'] (list)"),
        (
            {"subject": "a", "object": "b"},
            "unknown format: no field is recognised as a prompt; found the fields 'subject, ob",
        ),
        ({}, "unknown format: no field is recognised as a prompt; found the fields 'none'"),
        ({"requested_rewrite": "x"}, "unknown format: no field is recognised as a prompt"),
        ({"requested_rewrite": {"prompt": "{}", "subject": "x", "target_new": {}}}, "'{}' has no new object"),
        ({**FLAT, "target_new": 5}, "target must be text, found 5 (int)"),
        ({**FLAT, "rephrase_prompt": 5}, "a prompt in paraphrases must be text, found 5 (int)"),
        ({**FLAT, "locality": [1]}, "locality must be text, found 1 (int)"),
        ({**FLAT, "target_new": nested(600, list)}, "the record is nested too deeply"),
        ({**FLAT, "portability": nested(600, dict)}, "the record is nested too deeply"),
        (
            {**FLAT, "locality": {"Forgetfulness": [{"question": 1}]}},
            "locality.Forgetfulness must be text, found 1 (int)",
        ),
        ({**FLAT, "occurrence": "9" * 5_000}, "occurrence must be a whole number, found '999"),
        ({**FLAT, "prompt": 5}, "prompt must be text, found 5 (int)"),
        ({**ZSRE, "loc": 5}, "loc must be text"),
        ({**ZSRE, "alt": None, "answers": 5}, "target must be text"),
        ({"requested_rewrite": []}, "requested_rewrite is empty"),
        ({"requested_rewrite": ["x"]}, "an item of requested_rewrite must be an object, found 'x'"),
        ({"requested_rewrite": [REWRITE], "questions": ["x is"]}, "new_answer is missing"),
        ({**FLAT, "portability": {"Reasoning": [{"prompt": 5, "ground_truth": "x"}]}}, "must be text, found 5 (int)"),
        (
            {**FLAT, "locality": {"n": {"prompt": ["a", "b"], "ground_truth": ["c", "d", "e"]}}},
            "n has 2 prompts and 3 answers",
        ),
        (
            {**FLAT, "locality_prompt": ["a", "b", "c"], "locality_ground_truth": ["x", "y"]},
            "locality_prompt has 3 prompts and 2 answers to them; one for each was expected",
        ),
    ],
)
def test_a_bad_record_is_one_clear_line(record: Any, expected: str) -> None:
    assert expected in message(parse, record, Shape(need_targets=True))


# Files --------------------------------------------------------------------------------------------

PAIR = [EIFFEL, FLAT]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(PAIR),
        "\ufeff" + json.dumps(PAIR, indent=2),
        "\n".join(map(json.dumps, PAIR)),
        "\r\n\r\n".join(map(json.dumps, PAIR)) + "\r\n\r\n",
        "\n".join(json.dumps(record, indent=1) for record in PAIR),
    ],
    ids=["list", "list after a BOM", "lines", "lines with blank ones", "objects over several lines"],
)
def test_a_list_and_json_lines_read_the_same(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [Fact(**EIFFEL), parse_record(FLAT)]
    assert read_facts(write(tmp_path, content)) == facts
    for stream in (io.StringIO(content), io.TextIOWrapper(io.BytesIO(content.encode()), encoding="latin-1")):
        monkeypatch.setattr("sys.stdin", stream)
        assert read_facts("-") == facts


def test_standard_input_without_facts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[]"))
    assert message(read_facts, "-").startswith("standard input holds no facts")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds no facts; expected a JSON object, a list, or JSON lines"),
        (b"[]", "holds no facts"),
        (b"Rome", "is not JSON (line 1, column 1): Expecting value"),
        (b'{"subject": "Rome",\n "prompt": }', "is not JSON (line 2, column 12): Expecting value"),
        (b'{\n"a": 1}\n{"subject": "Rome', "is not JSON (line 3, column 13): Unterminated string"),
        (b"\x89PNG\r\n\xff", "is not UTF-8 text (byte 0)"),
        (b"5", "record 1: expected an object, found 5 (int)"),
        (b"9" * 5000, "not JSON that can be read"),
        (b"[" * 200_000, "not JSON"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    text = message(read_facts, path)
    assert text.startswith(str(path)) and expected in text


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert message(read_facts, missing) == f"no file {missing}; expected a file of facts, or - for standard input"
    assert message(read_facts, tmp_path).startswith(f"{tmp_path} is a folder; expected a file of facts")
    assert message(read_facts, "a" * 300 + ".json").endswith("a.json cannot be read: File name too long")
    assert message(read_facts, "a\0.json") == "a\0.json cannot be read: embedded null byte"


def test_the_error_names_file_and_record(tmp_path: Path) -> None:
    path = write(tmp_path, [EIFFEL, {**FLAT, "subject": ""}, FLAT, {"x": 1}])
    text = message(read_facts, path)
    assert (
        text.startswith(f"{path}, record 2: subject is empty")
        and "(2 records of 4 cannot be used); --skip-bad uses the 2 good records" in text
    )
    found = sift_facts(path)
    assert found.facts == (Fact(**EIFFEL), parse_record(FLAT)) and found.records == 4
    assert [number for number, _ in found.left_out] == [2, 4]


def test_two_targets_for_one_prompt_are_refused(tmp_path: Path) -> None:
    spelled = {**EIFFEL, "prompt": "Eiffel Tower is located in the city of", "target": "Oslo"}
    path = write(tmp_path, [EIFFEL, FLAT, spelled])
    assert message(read_facts, path) == (
        f"{path}, record 1: 'Eiffel Tower is located in the city of' has target 'Rome' here and 'Oslo' in record 3; "
        "keep one (2 records of 3 cannot be used); --skip-bad uses the 1 good record"
    )
    assert sift_facts(path).facts == (parse_record(FLAT),), "both are left out"
    assert [fact.target for fact in sift_facts(path, in_sequence=True).facts] == ["Rome", "Oslo"]
    disagree = write(tmp_path, [EIFFEL, {**EIFFEL, "previous": "Lyon"}])
    assert "has previous 'Paris' here and 'Lyon' in record 2; keep one" in message(read_facts, disagree)


def test_repeated_records_become_one_fact_that_loses_nothing(tmp_path: Path) -> None:
    first = {**EIFFEL, "paraphrases": ["See {} in"], "case_id": "1"}
    again = {**EIFFEL, "paraphrases": ["See {} in", "Go to {} in"], "generation": ["{} is"], "case_id": "2"}
    del first["previous"]
    expected = Fact(**EIFFEL, paraphrases=["See {} in", "Go to {} in"], generation=["{} is"], case_id="1")
    assert read_facts(write(tmp_path, [first, FLAT, again, first])) == [expected, parse_record(FLAT)]


@pytest.mark.parametrize("name", sorted(path.name for path in EDITS.glob("*.json*")))
def test_each_example_is_read(name: str) -> None:
    assert read_facts(EDITS / name) and not sift_facts(EDITS / name).left_out
