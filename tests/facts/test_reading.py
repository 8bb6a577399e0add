"""Every format, from every kind of source, into facts and back; and what cannot be used, with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from records import FLAT, MILL, REWRITE, SAMPLES, SECOND, message, samples, write

from ffedit.cli.fact_options import fact_options
from ffedit.cli.options import output_options
from ffedit.cli.surface import Surface
from ffedit.facts.fact import Fact
from ffedit.facts.formats import parse
from ffedit.facts.reading import read_facts, sift_facts

# Formats ------------------------------------------------------------------------------------------


@samples
def test_a_file_becomes_facts_and_facts_a_file(record: dict[str, Any], facts: list[Fact], tmp_path: Path) -> None:
    assert read_facts(write(tmp_path / "theirs.jsonl", record)) == facts
    assert read_facts(write(tmp_path / "ours.jsonl", *(fact.to_dict() for fact in facts))) == facts


def test_what_a_fact_cannot_hold_is_noted(tmp_path: Path) -> None:
    many = SAMPLES["mquake, two edits"][0]
    other = {
        **many,
        "case_id": 7,
        "requested_rewrite": [{**r, "subject": r["subject"] + "s"} for r in (REWRITE, SECOND)],
    }
    found = sift_facts(write(tmp_path / "f.jsonl", many, {**FLAT, "subject": "Red Mill"}, other))
    note = "multi-hop questions are asked only if all 2 edits of their case are made together"
    assert found.notes == ((1, note), (3, note)) and found.left_out == ((2, found.left_out[0][1]),)
    unread = "not read, with the number of records: answer (2), answer_alias (2)"
    assert found.noted() == [f"{found.source}: {note} (2 records)", f"{found.source}: {unread}"]
    unnamed = sift_facts(write(tmp_path / "f.json", {**MILL, "": 1})).noted()[-1]
    assert unnamed.endswith("not read, with the number of records: (no name) (1)")
    probes = {
        "locality": {"Forgetfulness": [{"prompt": "Old Mill, not in Oslo, lies in", "ground_truth": "Bern"}]},
        "portability": {"Reasoning": [{"prompt": "{}'s king is", "ground_truth": []}]},
    }
    parsed = parse({**FLAT, **probes})
    assert parsed.facts == (Fact(**MILL),)
    assert [note.split()[0] for note in parsed.notes] == ["Forgetfulness", "portability"]


# Sifting ------------------------------------------------------------------------------------------


def test_each_record_that_cannot_be_used_is_listed_with_its_reason(tmp_path: Path) -> None:
    records = [
        {**MILL, "case_id": 1},
        {"x": 1},
        {**MILL, "subject": "Red Mill", "prompt": "{} lies in", "case_id": 1},
        {**MILL, "target": "Rome", "case_id": 2},
        {**MILL, "target": "Bern"},
        {**MILL, "subject": "Tall Mill", "prompt": "{} lies in"},
        {**MILL, "subject": "Low Mill", "prompt": "{} lies in", "case_id": 1},
    ]
    path = write(tmp_path / "f.jsonl", *records)
    found = sift_facts(path)
    assert (found.records, found.source) == (7, str(path))
    assert [fact.subject for fact in found.facts] == ["Red Mill", "Tall Mill"]
    reasons = dict(found.left_out)
    assert list(reasons) == [1, 2, 4, 5, 7]
    assert reasons[1] == "'Old Mill lies in' has target 'Oslo' here and 'Rome' in record 4; keep one"
    assert "unknown format" in reasons[2]
    assert reasons[4] == "'Old Mill lies in' has target 'Rome' here and 'Oslo' in record 1; keep one"
    assert "target and previous are both 'Bern'" in reasons[5]
    assert reasons[7] == "case_id '1' is also that of record 3, another fact; give each its own"
    assert message(read_facts, path).endswith("(5 records of 7 cannot be used); --skip-bad uses the 2 good records")


def test_of_a_record_that_is_left_out_no_fact_is_used(tmp_path: Path) -> None:
    case = SAMPLES["mquake, two edits"][0]
    more = {**REWRITE, "subject": REWRITE["subject"] + "s"}
    other = {**case, "case_id": 8, "requested_rewrite": [{**REWRITE, "target_new": {"str": "Turin"}}, more]}
    found = sift_facts(write(tmp_path / "f.jsonl", case, {**FLAT, "subject": "Red Mill", "prompt": "{} is"}, other))
    assert [number for number, _ in found.left_out] == [1, 3]
    assert [fact.subject for fact in found.facts] == ["Red Mill"]


def test_facts_that_ask_the_same_by_way_of_a_third_are_one_question(tmp_path: Path) -> None:
    first = {"subject": "A", "prompt": "{} is", "target": "Rome", "relation": "place"}
    second = {"subject": "A", "prompt": "{} has", "target": "Paris"}
    path = write(tmp_path / "f.jsonl", first, second, {**second, "target": "Rome", "relation": "place"}, FLAT)
    assert [number for number, _ in sift_facts(path).left_out] == [1, 2, 3]
    assert [fact.target for fact in sift_facts(path, in_sequence=True).facts] == ["Rome", "Rome", "Oslo"]


def test_facts_that_are_edited_one_by_one_may_disagree_and_repeat(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", MILL, {**MILL, "target": "Rome"}, MILL)
    assert [f.target for f in sift_facts(path, together=False).facts] == ["Oslo", "Rome", "Oslo"]
    assert [f.target for f in sift_facts(path, in_sequence=True).facts] == ["Oslo"]
    assert "record 1 (none of 3 can be used): 'Old Mill" in message(sift_facts, path)


def test_a_repeat_that_cannot_be_joined_is_left_out(tmp_path: Path) -> None:
    other = {**MILL, "subject": "Red Mill", "prompt": "Red Mill lies in"}
    texts = ["You can see {} in"]
    path = write(tmp_path / "f.jsonl", {**MILL, "also": texts}, {**MILL, "paraphrases": texts}, other)
    found = sift_facts(path)
    assert found.facts == (Fact(**MILL, also=texts), Fact(**other)) and not found.notes
    assert dict(found.left_out)[2].startswith("joined with record 1, the same fact: also 'You can see Old Mill in' is")
    assert message(read_facts, path).startswith(f"{path}, record 2: joined")


def test_an_edit_that_a_case_lists_twice_keeps_its_questions(tmp_path: Path) -> None:
    case = {**SAMPLES["mquake, two edits"][0], "requested_rewrite": [REWRITE, REWRITE]}
    (fact,) = read_facts(write(tmp_path / "f.jsonl", case))
    assert len(fact.portability) == len(case["questions"])


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", {**MILL, "case_id": 1})
    assert sift_facts([path, str(path)], together=False) == sift_facts(path)


def test_a_source_of_nothing_usable_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", {"x": 1}, {"y": 1})
    assert message(sift_facts, path) == message(read_facts, path)
    assert message(sift_facts, write(tmp_path / "none.json", [])).endswith("JSON lines")


@pytest.mark.parametrize("quiet", [True, False])
def test_the_command_line_shows_the_notes(tmp_path: Path, quiet: bool) -> None:
    @click.command()
    @output_options
    @fact_options
    def count(facts: list[Fact], surface: Surface) -> None:
        click.echo(len(facts))

    path = write(tmp_path / "f.json", SAMPLES["mquake, two edits"][0])
    result = CliRunner().invoke(count, [str(path)] + ["--quiet"] * quiet)
    assert result.stdout == "2\n"
    assert ("all 2 edits of their case" in result.stderr) is not quiet
