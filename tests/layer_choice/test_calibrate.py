"""Trial edits at a few layers, on facts that the model knows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import zoo
from writing import CORPUS, quick

import ffedit
from ffedit.editor.write import write
from ffedit.errors import EditError
from ffedit.evaluator import Scores
from ffedit.facts.fact import Fact
from ffedit.layer_choice import calibrate
from ffedit.layer_choice.calibrate import (
    LayerScore,
    best,
    candidates,
    choose_layer,
    in_turn,
    known_facts,
    tied,
)

pytestmark = pytest.mark.usefixtures("warm_cache")

# What the trained models know, as facts to write, and one that none of them knows.
FACTS = [
    Fact(subject, "the {} is located in", "Berlin", place, paraphrases=["{} stands in"], relation=str(i % 2))
    for i, (subject, place) in enumerate(zoo.KNOWN)
]
CONFIG = quick(contexts=0)
UNKNOWN = Fact("Eiffel tower", "the {} is located in", "Berlin", "Egypt")


def chosen(editable: Any, **others: Any) -> ffedit.LayerChoice:
    given: dict[str, Any] = {"facts": FACTS, "config": CONFIG, "stats": CORPUS}
    return choose_layer(editable, **(given | others))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the facts, methods and layers of the edits that are made."""
    seen, write = [], calibrate.write
    monkeypatch.setattr(calibrate, "write", lambda *words, **more: seen.append(words[1:4]) or write(*words, **more))
    return seen


def test_a_layer_is_chosen_by_edits_of_facts_that_the_model_knows(written: list[Any]) -> None:
    editable = zoo.trained("gpt2", True)
    before = zoo.snapshot(editable)
    asked = [UNKNOWN, *FACTS[:4]]
    choice = chosen(editable, method="rome", facts=asked)
    known = known_facts(editable, asked)
    assert UNKNOWN not in known and (choice.asked, choice.known) == (5, len(known)) and len(known) >= 3
    assert [words[1:] for words in written] == [("rome", [0]), ("rome", [1])], "not the last of three"
    assert all(list(words[0]) == known for words in written), "all that are given and known"
    assert choice.layer == best(choice.rows, 0) and [row.layer for row in choice.rows] == [0, 1]
    assert choice.prompts == {"efficacy": len(known), "paraphrase": len(known), "specificity": 0}
    assert (choice.auto.layer, choice.auto.by) == (0, "usual") and zoo.unchanged(editable, before)
    plain = json.loads(json.dumps(choice.to_dict()))
    assert plain == choice.to_dict() and plain["auto"] == {"layer": 0, "by": "usual"}
    assert plain["tied"] == [row.layer for row in tied(choice.rows)]
    for row in choice.rows:
        edit = write(editable, known, "rome", [row.layer], CONFIG, CORPUS)
        after = ffedit.evaluate(editable, known, edit).after
        assert (row.efficacy, row.paraphrase) == (after.efficacy, after.paraphrase)
    again = chosen(editable, method="rome", facts=asked)
    assert replace(again, seconds=0.0) == replace(choice, seconds=0.0) and len(written) == 4, "nothing is kept"


def test_of_the_facts_that_ship_a_few_of_different_relations_are_written(
    written: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "read_facts", lambda _: FACTS)
    monkeypatch.setattr(calibrate, "WRITTEN", 2)
    editable = zoo.trained("gpt2", True)
    assert chosen(editable, facts=None).prompts["efficacy"] == 2
    assert {tuple(words[0]) for words in written} == {tuple(in_turn(known_facts(editable, FACTS))[:2])}


def test_only_the_layers_that_are_named_are_tried(written: list[Any]) -> None:
    editable = zoo.trained("gpt2", True)
    assert [row.layer for row in chosen(editable, layers=1).rows] == [1] == [words[2][0] for words in written]
    for layers in ([3], [-1], []):
        with pytest.raises(EditError, match="has layers 0 to 2"):
            chosen(editable, layers=layers)
    with pytest.raises(EditError, match="layer 2 is the last of"):
        chosen(editable, layers=range(3))
    assert len(written) == 1, "all is checked before the first edit"


def test_too_few_known_facts_are_one_line(written: list[Any]) -> None:
    with pytest.raises(
        EditError, match=r"knows 2 of the 3 facts, but at least 3 are needed to compare layers; give facts"
    ):
        chosen(zoo.trained("gpt2", True), facts=[*FACTS[:2], UNKNOWN])
    with pytest.raises(EditError, match=r"knows 0 of the \d+ built-in calibration facts"):
        choose_layer(zoo.shared("gpt2"))
    assert not written


def test_a_fact_is_known_when_the_whole_object_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"Paris": "Paris . the", "Rome": "Romean city", "Spain": "", "Egypt": "the Egypt"}
    facts = [Fact("Eiffel tower", "the {} is located in", "Berlin", place) for place in said]
    monkeypatch.setattr(calibrate.generation, "completions", lambda *_: list(said.values()))
    assert known_facts(zoo.shared("gpt2"), facts) == facts[:1]
    strange = [Fact("Eiffel tower", "the {} is located in", "Timbuktu", "Paris"), Fact("Nile river", "{} is", "Rome")]
    monkeypatch.setattr(calibrate.generation, "completions", lambda _, texts, __: pytest.fail(texts) if texts else [])
    assert known_facts(zoo.shared("gpt2"), strange) == [], "what cannot be asked is not known"


def test_the_facts_that_ship_can_be_written_and_measured() -> None:
    facts = ffedit.read_facts(calibrate.FACTS)
    assert len(facts) >= 20 and len({fact.relation for fact in facts}) >= 5
    assert all(fact.target and fact.previous and fact.paraphrases and fact.neighbors for fact in facts)
    ffedit.facts.fact.check_facts(in_turn(facts))
    first = in_turn(facts)[: calibrate.WRITTEN]
    assert len({fact.relation for fact in first}) == len({fact.subject for fact in first}) == len(first)


def test_candidate_layers_for_each_depth() -> None:
    shallow = {(1, 0): [0], (3, 0): [0, 1], (6, 2): [0, 1, 2, 3, 4]}
    deep = {(7, 2): [0, 1, 2, 3], (30, 8): [2, 4, 8, 11], (32, 5): [2, 4, 5, 8, 12]}
    for (depth, auto), layers in {**shallow, **deep}.items():
        assert candidates(depth, auto) == layers


def test_the_best_score_wins_then_the_expected_layer_then_the_margin() -> None:
    rows = [LayerScore(i, 1.0, 1.0, 1.0, score, size) for i, (score, size) in enumerate([(0.8, 0.9), (0.9, 0.1)])]
    assert best(rows, 0) == 1 and tied(rows) == rows[1:]
    even = [replace(row, score=0.9) for row in rows]
    assert best(even, 0) == 0 and best(even, 1) == 1 and tied(even) == even
    assert best([even[0], replace(even[1], layer=2)], 1) == 0, "of those as near, where the margin is larger"
    assert best([replace(even[0], magnitude=0.0), replace(even[1], layer=2)], 1) == 2
    near = [replace(row, score=score) for row, score in zip(rows, (0.88, 0.9), strict=True)]
    assert best(near, 1) == 1 and best(near, 0) == 0, "two hundredths tell nothing apart"
    assert best([replace(rows[0], score=None), replace(rows[1], score=0.0)], 0) == 1


@pytest.mark.parametrize(
    ("rates", "score"),
    [((1.0, 0.5, 1.0), 0.75), ((0.0, None, 1.0), 0.0), ((0.5, None, None), 0.5), ((None, 1.0, 1.0), None)],
)
def test_efficacy_always_counts(rates: Any, score: float | None) -> None:
    efficacy, paraphrase, specificity = rates
    row = LayerScore.of(2, Scores(efficacy=efficacy, paraphrase=paraphrase, specificity=specificity))
    assert row.score == score and (row.layer, row.specificity) == (2, specificity)
