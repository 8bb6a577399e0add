"""Files of facts: every known format, every way to get one wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from records import EIFFEL, SAMPLES, message

from ffedit.errors import FactError
from ffedit.facts.fact import Fact, Probe
from ffedit.facts.formats import Shape, parse, parse_record
from ffedit.facts.reading import read_facts, sift_facts

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
EDITS = ROOT / "edits"

FLAT = {"subject": "UK", "prompt": "The capital of the UK is", "target_new": "Rome", "ground_truth": "London"}


def write(folder: Path, content: Any, name: str = "facts.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# The formats --------------------------------------------------------------------------------------


def test_rome_request() -> None:
    record = {"prompt": "{} plays the", "subject": "LeBron James", "target_new": {"str": " football"}}
    assert parse_record(record) == Fact("LeBron James", "{} plays the", "football")
    record["target_true"] = {"str": "basketball", "id": "Q5372"}
    assert parse_record(record).previous == "basketball"


def test_counterfact() -> None:
    record = {
        "case_id": 3,
        "pararel_idx": 9,
        "requested_rewrite": {
            "prompt": "{} is in",
            "relation_id": "P131",
            "target_new": {"str": "Rome", "id": "Q220"},
            "target_true": {"str": "Paris", "id": "Q90"},
            "subject": "Eiffel Tower",
        },
        "paraphrase_prompts": ["Go. Eiffel Tower stands in"],
        "neighborhood_prompts": ["Louvre is in"],
        "attribute_prompts": ["Colosseum is in"],
        "generation_prompts": ["Eiffel Tower's"],
        "same_subject": [{"prompt": "{} is made of", "target": "iron"}],
        "portability": [{"prompt": "{} is in the country of", "target": "Italy"}],
    }
    fact = parse_record(record)
    assert fact == Fact(
        "Eiffel Tower",
        "{} is in",
        "Rome",
        "Paris",
        paraphrases=["Go. Eiffel Tower stands in"],
        neighbors=["Louvre is in"],
        same_subject=[Probe("{} is made of", "iron")],
        portability=[Probe("{} is in the country of", "Italy")],
        generation=["Eiffel Tower's"],
        relation="P131",
        case_id="3",
    )
    assert fact.neighbor_probes == (Probe("Louvre is in", "Paris"),)


def test_attention_drift_groups_answer_for_answer() -> None:
    record, _ = SAMPLES["attention drift"]
    bare = {name: record[name] for name in ("requested_rewrite", "rewrite")}
    assert parse_record(bare) == Fact("Old Mill", "Old Mill lies in", "Oslo", "Bern", relation="P131")
    with pytest.raises(FactError, match="l-relation has 2 prompts and 3 answers"):
        parse_record(
            {**bare, "l-relation": {"prompts": ["Old Mill grinds", "Old Mill is"], "targets": ["a", "b", "c"]}}
        )


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


def test_zsre() -> None:
    assert parse_record(ZSRE) == Fact(
        "UniFirst",
        "What does UniFirst make?",
        "aircraft",
        "uniforms",
        paraphrases=["What is made by UniFirst?"],
        locality=[Probe("nq question: who sang it?", "Nena")],  # it has nothing to do with the fact
    )
    assert parse_record({**ZSRE, "loc": "nq question: who sang it?"}).locality[0].prompt == "nq question: who sang it?"


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
def test_zsre_objects(changes: dict[str, Any], target: str, previous: str | None) -> None:
    fact = parse_record({**ZSRE, **changes})
    assert (fact.target, fact.previous) == (target, previous)


def test_easyedit() -> None:
    fact = parse_record(
        {
            **FLAT,
            "case_id": 0,
            "rephrase_prompt": "UK has its capital in",
            "locality_prompt": "Oslo is in",
            "locality_ground_truth": "Norway",
        }
    )
    assert (fact.target, fact.previous, fact.case_id) == ("Rome", "London", "0")
    assert fact.paraphrases == ("UK has its capital in",)
    assert fact.neighbors == (Probe("Oslo is in", "Norway"),)
    assert parse_record({**FLAT, "ground_truth": ["London", "Greater London"]}).previous == "London"
    assert parse_record({**FLAT, "ground_truth": ""}).previous is None


def test_knowedit() -> None:
    kept_out = {"prompt": "The capital of the UK, which is not Rome, is", "ground_truth": [["London", "LDN"]]}
    other = {"prompt": "The capital of the UK, which is not Rome, is also", "ground_truth": [["Leeds"]]}
    fact = parse_record(
        {
            **FLAT,
            "rephrase_prompt": "UK has its capital in",
            "portability": {"Reasoning": [{"prompt": "The mayor of the UK's capital is", "ground_truth": "x"}]},
            "locality": {
                "Relation_Specificity": [
                    {"prompt": "The currency of the UK is", "ground_truth": [["pound", "sterling"]]},
                    {"prompt": "The capital of Italy is", "ground_truth": "Rome"},
                ],
                "Forgetfulness": [kept_out, other],
            },
        }
    )
    # London is what the edit replaces: to ask for it would count success as damage
    assert fact.same_subject == (
        Probe("The currency of the UK is", "pound", "Relation_Specificity", ("sterling",)),
        Probe(other["prompt"], "Leeds", "Forgetfulness"),
    )
    assert fact.neighbors == (Probe("The capital of Italy is", "Rome", "Relation_Specificity"),)
    assert fact.portability == (Probe("The mayor of the UK's capital is", "x", "Reasoning"),)
    assert fact.paraphrases == ("UK has its capital in",)
    assert parse_record({**FLAT, "portability": {}, "locality": None}).same_subject == ()


def test_fastedit() -> None:
    record = {"subject": "UK", "prompt": "The leader of {} is", "target": "Ann", "queries": ["Who leads {}?"]}
    assert parse_record(record) == Fact("UK", "The leader of {} is", "Ann", paraphrases=["Who leads {}?"])


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


def test_own_form_needs_no_target_for_tracing() -> None:
    assert parse_record({"subject": "Rome", "prompt": "{} is in"}).target is None


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
        ({"requested_rewrite": {"prompt": "{}", "subject": "x"}}, "'{}' has no new object; give a target"),
        ({"requested_rewrite": {"prompt": "{}", "subject": "x", "target_new": {}}}, "'{}' has no new object"),
        ({**FLAT, "target_new": 5}, "target must be text, found 5 (int)"),
        ({**FLAT, "rephrase_prompt": 5}, "a prompt in paraphrases must be text, found 5 (int)"),
        ({**FLAT, "locality": [1]}, "locality must be text, found 1 (int)"),
        (
            {**FLAT, "locality": {"Forgetfulness": [{"question": 1}]}},
            "locality.Forgetfulness must be text, found 1 (int)",
        ),
        ({**FLAT, "prompt": 5}, "prompt must be text, found 5 (int)"),
        ({**ZSRE, "loc": 5}, "loc must be text"),
        ({**ZSRE, "src": "What does it make?"}, "has neither {} nor the subject 'UniFirst'"),
        ({**ZSRE, "alt": None, "answers": 5}, "target must be text"),
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
def test_a_list_and_json_lines_read_the_same(tmp_path: Path, content: str) -> None:
    facts = [Fact(**EIFFEL), parse_record(FLAT)]
    assert read_facts(write(tmp_path, content)) == facts
    assert read_facts("-", stdin=io.StringIO(content)) == facts
    assert read_facts("-", stdin=io.TextIOWrapper(io.BytesIO(content.encode()), encoding="latin-1")) == facts


def test_one_object_is_one_fact(tmp_path: Path) -> None:
    assert read_facts(str(write(tmp_path, EIFFEL))) == [Fact(**EIFFEL)]


def test_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(EIFFEL)))
    assert read_facts("-") == [Fact(**EIFFEL)]
    assert message(read_facts, "-", stdin=io.StringIO("[]")).startswith("standard input holds no facts")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds no facts; expected a JSON object, a list, or JSON lines"),
        (b" \n", "holds no facts"),
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


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert message(read_facts, missing) == f"no file {missing}; expected a file of facts, or - for standard input"
    assert message(read_facts, tmp_path).startswith(f"{tmp_path} is a folder; expected a file of facts")


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


# Real data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "need_targets"),
    [
        ("counterfact_easyedit_1000.json", 1000, True),
        ("zsre_300.json", 300, True),
        ("known_1000.json", 1208, False),  # 1,209 records, of which one asks the same as another
    ],
)
def test_the_published_sets_are_read_whole(name: str, count: int, need_targets: bool) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} is not here")
    facts = read_facts(SHARED / name, need_targets=need_targets)
    assert len(facts) == count
    assert all(fact.text[slice(*fact.span)] == fact.subject for fact in facts)
    assert all(fact.target is not None or not need_targets for fact in facts)
    assert [Fact.from_dict(json.loads(json.dumps(fact.to_dict()))) for fact in facts] == facts


def test_the_set_of_same_subject_probes_is_read_but_for_what_contradicts_itself() -> None:
    path = SHARED / "same_subject_800.json"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    sifted = sift_facts(path)
    assert (len(sifted.facts), len(sifted.left_out)) == (790, 10)  # five pairs give a prompt two targets
    counts = [sum(bool(getattr(f, n)) for f in sifted.facts) for n in ("same_subject", "portability", "neighbors")]
    assert counts == [183, 351, 334]


@pytest.mark.parametrize("name", sorted(path.name for path in EDITS.glob("*.json*")))
def test_each_example_is_read(name: str) -> None:
    assert read_facts(EDITS / name) and not sift_facts(EDITS / name).left_out
