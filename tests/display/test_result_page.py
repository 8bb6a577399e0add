"""Pages of edits and benchmarks: what the JSON says, damage first, and nothing that a fact could do to a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benching
import pytest
import zoo
from commands import Command, apply, here, loads, run, thorough_apply
from pages import EVIL, looks_right, needs_nothing_else, poisoned, said, shows_text_only
from shell import FACT, PROBES, disk

from ffedit.benchmark.tables import tables
from ffedit.display.html.bench import bench_page
from ffedit.display.html.result import result_page
from ffedit.display.terminal.scores import figure

__all__ = ["apply", "here", "run", "thorough_apply"]
# Texts of a record that are names of ours: of scores, outcomes, layers, kinds of traces.
OURS = {"score", "outcome", "damage", "metric", "kind", "sever", "by", "seconds", "left_out"}
OTHER = {**FACT, "subject": "Marie Curie", "prompt": "{} stands in", "target": "Egypt", "previous": "France"}
Record = dict[str, Any]


@pytest.fixture
def one(apply: Command, here: Path) -> Record:
    """The record of an edit of one fact, and the page that was written with it."""
    assert apply("fact.json", "--json", "r.json", "--html", "r.html", "-q").code == 0
    return loads(Path("r.json").read_text())


@pytest.fixture
def several(apply: Command, here: Path) -> Record:
    """The record of an edit of two facts."""
    Path("two.json").write_text(json.dumps([{**FACT, **PROBES}, OTHER]))
    return loads(apply("two.json", "--json", "-", "--layers", "trace").out)


def hostile(record: Record) -> Record:
    return {**poisoned(record, OURS), "command": f"ffedit apply {EVIL}"}


def test_the_page_says_what_the_json_says(one: Record) -> None:
    text = Path("r.html").read_text(encoding="utf-8")
    assert text == result_page(one)
    needs_nothing_else(text)
    words = said(text)
    assert "Eiffel tower: Paris → Rome" in words and one["verdict"]["text"] in words
    (fact,) = one["facts"]
    order = [
        one["verdict"]["text"][:20],
        f"the Eiffel tower is located in {fact['after']['says']}",
        "What was damaged",
        "What else was asked",
        "Where the fact is recalled",
        "Why layer",
        "Scores",
        "What it cost",
        "How to undo it",
        "How to make it again",
        one["command"],
    ]
    places = [words.find(part) for part in order]
    assert -1 not in places and places == sorted(places)
    for asked in fact["asked"]:
        assert f"{asked['prompt']} {asked['answer']} {asked['before']} {asked['after']}" in words
    for reason in one["layer"]["why"]:
        assert all(line.replace("`", "") in words for line in reason.split("\n"))
    one["saved"]["checkpoint"] = "my model"
    assert "ffedit undo 'my model' --out as-before" in said(result_page(one))


def test_what_the_trace_did_not_measure_is_empty(apply: Command, here: Path) -> None:
    record = loads(apply("fact.json", "--json", "-", "--layers", "1", "-q").out)
    assert None in record["facts"][0]["trace"]["effects"][0], "the tokens between the subject and the prompt's last"
    page = result_page(record)
    assert "Empty: not measured." in said(page) and '<td class="most">–</td>' in page and "nan" not in page.lower()


def test_a_damaged_answer_and_score_stand_first(one: Record) -> None:
    (fact,) = one["facts"]
    stays = [asked for asked in fact["asked"] if asked["score"] != "paraphrase"]
    for asked in stays:
        asked["after"] = asked["before"]
    assert "Every answer that should stay begins as before the edit." in said(result_page(one))
    stays[-1]["after"] = "elsewhere"
    one["verdict"]["damage"], one["before"]["specificity"], one["after"]["specificity"] = ["specificity"], 1.0, 0.25
    words = said(result_page(one))
    assert "specificity 1.00 → 0.25" in words and "1 answer that should have stayed is not as before" in words
    assert words.find("elsewhere") < words.find("The fact in other words")


def test_of_several_facts_the_worst_stand_first(several: Record) -> None:
    needs_nothing_else(result_page(several))
    for took in (True, False):
        several["facts"][0]["took"], several["facts"][1]["took"] = took, not took
        facts = said(result_page(several)).partition("The facts")[2]
        first = facts.find("Eiffel tower: Paris → Rome") < facts.find("Marie Curie: France → Egypt")
        assert first is not took
    assert "[" in said(result_page(several)).partition("Scores")[2], "intervals"


def test_an_edit_that_was_refused_has_a_page_that_says_so(apply: Command, here: Path) -> None:
    done = apply("bare.json", "--require", "efficacy>1", "--out", "e", "--html", "r.html")
    assert done.code == 3 and not Path("e").exists()
    assert "neither the edit nor a checkpoint was saved" in said(Path("r.html").read_text(encoding="utf-8"))


def test_facts_are_text_and_pages_fit_a_phone_and_a_desktop(tmp_path: Path, one: Record, several: Record) -> None:
    for record in (one, several):
        shows_text_only(result_page(hostile(record)), result_page(record))
    long = json.loads(json.dumps(one).replace("Eiffel tower", 5_000 * "🗼" + 1_000 * "👩\u200d👧" + 2_000 * "ab"))
    says = ["Eiffel tower: Paris → Rome", one["verdict"]["text"]]
    looks_right(tmp_path, list(map(result_page, (one, several, long, hostile(several)))), says)
    looks_right(tmp_path, [result_page(hostile(one))], ["<script>alert(1)</script>\"'&", "שלום Eiffel tower"])


def test_a_measurement_without_an_edit_has_one_side(run: Command, here: Path, model: Path) -> None:
    assert run("evaluate", "fact.json", "--model", model, "--html", "e.html", "--json", "e.json", "-q").code == 0
    text = Path("e.html").read_text(encoding="utf-8")
    needs_nothing_else(text)
    record = loads(Path("e.json").read_text())
    assert text == result_page(record) and "What was damaged" not in text and "How to undo" not in text
    words = said(text).partition("Scores score now")[2]
    values = {name: value for name, value in record["before"].items() if value is not None}
    assert len(values) > 10
    for name in values:
        assert name.endswith("_magnitude") or f" {name} {figure(name, values[name])} " in words


def test_the_page_of_a_benchmark_has_every_table_and_the_damage_first(tmp_path: Path) -> None:
    report = benching.run(zoo.trained("gpt2", True), tmp_path / "out", "sequential", benching.facts(3))
    text = bench_page(report, f"ffedit bench {EVIL}")
    needs_nothing_else(bench_page(report, "ffedit bench"))
    words = said(text)
    assert words.find("What should stay specificity") < words.find("What should change efficacy")
    for table in tables(report):
        assert table.title in words and all(" ".join(row).strip() in words for row in table.rows)
    looks_right(tmp_path, [text])


@pytest.mark.parametrize("command", ["apply", "evaluate", "bench"])
def test_a_page_that_cannot_be_written_is_said_before_the_work(run: Command, here: Path, command: str) -> None:
    before, more = disk(here), ["--out", "out"] if command == "bench" else []
    done = run(command, "bare.json", *more, "--model", "not-even-there", "--html", "nowhere/page.html")
    assert done.code == 1 and done.err.count("\n") == 1 and "nowhere/page.html: cannot be written" in done.err
    assert disk(here) == before
