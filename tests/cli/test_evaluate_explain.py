"""`ffedit evaluate --explain`: which part of an edit failed, on the embedded model and in the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import loads
from jsonschema import Draft202012Validator
from making import FACT as MADE, made
from pages import said
from shell import TEXT, shell

import ffedit

pytestmark = pytest.mark.usefixtures("warm_cache")

SCHEMA = Draft202012Validator(json.loads((Path(ffedit.__file__).parent / "cli" / "result.schema.json").read_text()))
FACT = {"subject": "Eiffel Tower", "prompt": "{} is located in the city of", "target": "Rome", "previous": "Paris"}
ASKED = {
    "paraphrases": ["The city that is home to {} is called", "The old tower is located in the city of"],
    "neighbors": [{"prompt": "Victory Column is located in the city of", "target": "Berlin"}],
    "same_subject": [{"prompt": "{} is made of wrought", "target": "iron"}],
}


@pytest.fixture
def edit(empty: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """An edit of the embedded model that says Rome, and a file that asks for Madrid."""
    (empty / "rome.json").write_text(json.dumps(FACT))
    (empty / "madrid.json").write_text(json.dumps({**FACT, **ASKED, "target": "Madrid"}))
    (empty / "corpus.txt").write_text(TEXT * 8)
    assert shell(capsys, "apply", "rome.json", "--layer", "1", "--corpus", "corpus.txt", "--out", "e", "-q").code == 0
    return empty / "e"


def test_the_value_failed_that_says_another_object(edit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "madrid.json", "--edit", edit.name]
    ran = shell(capsys, *words, "--explain", "--json", "result.json", "--html", "page.html")
    told = " ".join(ran.out.split())
    assert (ran.code, ran.err) == (0, "")
    assert "with δ alone" in told and "1.00 at “Tower”" in told
    assert "not explained: “The old tower is located in the city of”: “Eiffel Tower” does not occur in it" in told
    record = loads(Path("result.json").read_text())
    SCHEMA.validate(record)
    found = record["explanation"]
    asked = sum(counts["asked"] for counts in found["counts"].values())
    assert f"The edit got {len(found['wrong'])} of {asked} answers wrong." in told and found["reason"] == ""
    own = found["wrong"][0]
    assert (own["score"], own["failed"], own["answer"]) == ("generation", "value", "Madrid")
    assert own["says"].startswith("Rome") and own["forced"].startswith("Rome") and own["token"].strip() == "Tower"
    assert own["reach"] == pytest.approx(1, abs=0.05), "in its own prompt the subject is reached"
    assert found["counts"]["paraphrase_generation"]["asked"] == 2
    page = said(Path("page.html").read_text())
    assert f"The edit got {len(found['wrong'])} of {asked} answers wrong." in page and "with δ alone" in page
    assert "1.00 at “Tower”" in page and "“Eiffel Tower” does not occur in it" in page
    plain = loads(shell(capsys, *words, "--json", "-").out)
    SCHEMA.validate(plain)
    assert "explanation" not in plain and plain["after"] == record["after"]


def test_an_edit_of_two_layers_is_told_in_a_line(empty: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(ffedit.load(model), {0: 1, 1: 1}).save("e")
    (empty / "rome.json").write_text(json.dumps(MADE.to_dict()))
    ran = shell(capsys, "evaluate", "rome.json", "--edit", "e", "--explain", "--json", "result.json")
    assert ran.code == 0 and "Not explained, key or value: the edit changes 2 layers" in ran.out
    record = loads(Path("result.json").read_text())
    SCHEMA.validate(record)
    assert record["explanation"]["reason"].startswith("the edit changes 2 layers")


@pytest.mark.parametrize("words", [[], ["--edited", "atlas"]])
def test_without_an_edit_nothing_can_be_explained(
    words: list[str], empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "rome.json").write_text(json.dumps(FACT))
    ran = shell(capsys, "evaluate", "rome.json", "--explain", *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "error: --explain takes an edit apart; give it with --edit. See `ffedit evaluate --help`.\n"
