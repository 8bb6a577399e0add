"""The plan of an edit shows the facts as read and what the edit would do, and makes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import ASKED, Ran, shell

import ffedit
from ffedit.inference.corpus import Corpus


def planned(capsys: pytest.CaptureFixture[str], model: Path, *words: str | Path) -> Ran:
    ran = shell(capsys, "apply", *words, "--model", model, "--dry-run", "--json", "plan.json")
    assert ran.code == 0, ran.err
    return ran


def test_a_dry_run_writes_only_its_plan(capsys: pytest.CaptureFixture[str], model: Path, empty: Path) -> None:
    ran = planned(capsys, model, *ASKED, "--layer", "1", "--out", "edit", "--export", "checkpoint")
    assert "edit, checkpoint, plan.json" in ran.out and "Layer 1: you asked for it." in ran.out
    assert [path.name for path in empty.iterdir()] == ["plan.json"]
    plan = json.loads(Path("plan.json").read_text())
    assert plan["plan"]["method"] == "memit, 1 value" and [fact["target"] for fact in plan["facts"]] == ["Rome"]


@pytest.mark.usefixtures("empty")
def test_a_dry_run_shows_each_fact_as_read(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    record = {"concept": "Eiffel tower", "src": "the {} is located in", "alt": "Rome", "rephrase": ["the {} is in"]}
    records = [record, {**record, "concept": "Nile river"}, {**record, "src": "the city of {} is"}]
    Path("facts.jsonl").write_text("\n".join(map(json.dumps, records)))
    ran = planned(capsys, model, "facts.jsonl", "--layers", "trace")
    assert "the Nile river is located in" in " ".join(ran.out.split()) and ran.out.count("paraphrases: 1") == 3
    plan = json.loads(Path("plan.json").read_text())["plan"]
    assert plan["layer"] == "By the trace of all facts." and plan["method"] == "memit, 2 values"
    assert planned(capsys, model, "facts.jsonl", "--method", "ft").out.count("does not use any") == 1


@pytest.mark.usefixtures("empty")
def test_a_plan_says_whether_statistics_are_in_the_cache(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    said = []
    Path("text.txt").write_text("the tower of Rome is in the city " * 200)
    words = [*ASKED, "--layer", "1", "--corpus", "text.txt"]
    for _ in range(2):
        planned(capsys, model, *words)
        said.append(json.loads(Path("plan.json").read_text())["plan"]["statistics"])
        tokens = int(said[0].split()[0].replace(",", ""))
        ffedit.collect_stats(ffedit.load(model), [1], corpus=Corpus("text.txt", tokens=tokens))
    assert said == [f"{tokens:,} tokens to read", "from the cache"]


def test_a_layer_that_cannot_be_edited_has_no_plan(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    last = len(ffedit.load(model).layers) - 1
    ran = shell(capsys, "apply", *ASKED, "--model", model, "--layer", str(last), "--dry-run")
    assert ran.code == 1 and f"layer {last} is the last" in ran.err
