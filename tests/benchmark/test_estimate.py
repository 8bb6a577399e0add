"""A plan of an edit counts what the edit would do, and makes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from shell import ASKED, shell
from storing import FACTS

import ffedit
from ffedit.benchmark.estimate import Estimate, estimate
from ffedit.editor.methods import preset
from ffedit.facts.fact import Fact
from ffedit.inference.corpus import Corpus

TEXT = Corpus(path="sampled", tokens=200)


def planned(
    facts: Sequence[Fact], layer: int | None = 1, steps: int = 20, rounds: int = 1, method: str = "memit"
) -> Estimate:
    config = preset("default", method)
    config = replace(config, value=replace(config.value, steps=steps, rounds=rounds))
    return estimate(zoo.shared("llama"), facts, method, layer, 1, config, TEXT, show_trace=True)


def tokens(plan: Estimate, name: str) -> int:
    return sum(stage.tokens for stage in plan.stages if stage.name == name)


def test_more_work_is_more_tokens() -> None:
    one, many = planned(FACTS[:1]), planned(FACTS[:3])
    for stage in ("edit", "evaluate"):
        assert 0 < tokens(one, stage) < tokens(many, stage)
    assert tokens(planned(FACTS[:1], layer=0), "edit") > tokens(planned(FACTS[:1], layer=2), "edit")
    few = planned(FACTS[:1], steps=3)
    assert one.longest > one.seconds and few.longest == few.seconds
    assert one.memory_most > one.memory_now


def test_rounds_cost_where_several_subjects_are_written_together() -> None:
    for facts, method, more in ((FACTS, "memit", True), (FACTS[:1], "memit", False), (FACTS, "rome", False)):
        once, twice = (tokens(planned(facts, rounds=rounds, method=method), "edit") for rounds in (1, 2))
        assert twice > once if more else twice == once


def test_a_layer_that_is_not_chosen_yet_costs_its_choice() -> None:
    known, traced = (tokens(planned(FACTS[:2], layer), "locate") for layer in (1, None))
    assert known < traced


def test_statistics_in_the_cache_cost_nothing() -> None:
    assert tokens(planned(FACTS[:1]), "statistics") > 0
    ffedit.collect_stats(zoo.shared("llama"), [1], corpus=TEXT)
    assert tokens(planned(FACTS[:1]), "statistics") == 0


def test_a_dry_run_writes_nothing_but_its_plan(capsys: pytest.CaptureFixture[str], model: Path, empty: Path) -> None:
    common = ["apply", *ASKED, "--model", model, "--layer", "1", "--dry-run", "--out", "edit", "--export", "checkpoint"]
    ran = shell(capsys, *common, "--json", "plan.json")
    assert ran.code == 0 and "Written: edit, checkpoint, plan.json." in ran.out
    assert [path.name for path in empty.iterdir()] == ["plan.json"]
    plan = json.loads(Path("plan.json").read_text())["estimate"]
    assert plan["seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan["stages"]))


def test_a_layer_that_cannot_be_edited_has_no_plan(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    last = len(ffedit.load(model).layers) - 1
    ran = shell(capsys, "apply", *ASKED, "--model", model, "--layer", str(last), "--dry-run")
    assert ran.code == 1 and f"layer {last} is the last" in ran.err
