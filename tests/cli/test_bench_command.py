"""`ffedit bench` as a person sees it: what it refuses at once, and what its JSON holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zoo
from commands import Command, here, loads, run
from shell import disk

__all__ = ["here", "run"]


def test_a_layer_that_nothing_comes_after_is_refused_before_the_run(run: Command, here: Path, model: Path) -> None:
    words = ["bench", "bare.json", "--model", model, "--corpus", model.parent / "corpus.txt", "--out", "b"]
    words += ["--no-full", "--layers", "2"]
    before = disk(here)
    for more in (["--methods", "ft,memit"], ["--methods", "rome", "--spread", "2"], ["--mode", "sequential"]):
        done = run(*words, *more)
        assert done.code == 1 and done.err.count("\n") == 1 and disk(here) == before
        assert "layer 2 is the last of" in done.err and "name a layer from 0 to 1" in done.err
    done = run(*words, "--methods", "ft", "--set", "value.steps=2", "--quiet")
    assert (done.code, done.err) == (0, ""), "fine-tuning changes the layer at the last token as well"


@pytest.mark.parametrize(("limit", "missing"), [("1", []), ("2", [2, 3])])
def test_records_behind_the_last_fact_to_use_are_not_missing(
    run: Command, here: Path, model: Path, limit: str, missing: list[int]
) -> None:
    good = json.loads((here / "bare.json").read_text())
    (here / "some.json").write_text(json.dumps([good, {**good, "subject": ""}, {**good, "subject": ""}]))
    words = ["--out", "b", "--methods", "ft", "--layers", "0", "--set", "ft.steps=1", "--no-full", "--json", "b.json"]
    done = run("bench", "some.json", "--model", model, *words, "--skip-bad", "--limit", limit)
    found = loads((here / "b.json").read_text())
    assert done.code == 0 and [record["record"] for record in found["unusable"]] == missing
    assert ("could not be measured" in done.out) == bool(missing)


def test_equal_draws_have_no_interval(run: Command, here: Path, model: Path) -> None:
    facts = [
        {"subject": subject, "prompt": "the {} is located in", "target": "Berlin", "previous": city}
        for subject, city in zoo.KNOWN[:3]
    ]
    (here / "three.json").write_text(json.dumps(facts))
    of_model = ["three.json", "--model", model, "--json", "-"]
    evaluated = loads(run("evaluate", *of_model).out)
    words = ["--out", "b", "--methods", "ft", "--layers", "0", "--set", "ft.steps=1", "--no-full"]
    compared = loads(run("bench", *of_model, *words).out)
    gap = "teacher_forced_gap"
    assert all(fact["before"][gap] == evaluated["before"][gap] == 0 for fact in evaluated["facts"])
    for intervals in (evaluated["intervals"]["before"], compared["before"]["intervals"]):
        assert gap not in intervals and {"efficacy", "efficacy_magnitude"} <= intervals.keys()
        ends = [bound if isinstance(bound, list) else [bound["low"], bound["high"]] for bound in intervals.values()]
        assert all(low < high for low, high in ends)
    differences = compared["methods"]["ft"]["change"]["differences"]
    assert differences[gap] == [0, None, None] and None not in differences["efficacy_magnitude"]
