"""The layer to edit: by tracing, by trying, and remembered for this model only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zoo
from writing import CORPUS, FACT, SECOND, quick

from ffedit import choice
from ffedit.choice import Choice, LayerScore, Sweep, by_sweep, by_trace, remember, remembered
from ffedit.errors import FactError
from ffedit.evaluator.evaluate import evaluate
from ffedit.facts import Fact
from ffedit.locator import locate

ASKED = Fact(**{**FACT.to_dict(), "paraphrases": ["{} stands in"]})


def test_a_sweep_edits_at_each_layer_measures_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)
    before, traces = zoo.snapshot(editable), locate(editable, [ASKED, SECOND], samples=2)
    reports, seen = [], []
    monkeypatch.setattr(choice, "evaluate", lambda *words: reports.append((words, evaluate(*words))) or reports[-1][1])
    sweep = by_sweep(editable, [ASKED, SECOND], traces, quick(), CORPUS, lambda *step: seen.append(step))
    assert [row.layer for row in sweep.rows] == [0, 1, 2] == [words[2].layers[0] for words, _ in reports]
    np.testing.assert_array_equal([row.effect for row in sweep.rows], traces.at_subject)
    for row, (_, report) in zip(sweep.rows, reports, strict=True):
        after = report.after
        assert (row.efficacy, row.paraphrase, row.score) == (after.efficacy, after.paraphrase, after.score)
        assert row.specificity is None, "no fact has neighbors"
    assert sweep.traced == traces.layer and seen and zoo.unchanged(editable, before)
    assert remembered(editable, "sweep") == Choice(sweep.layer, "sweep", 2)
    assert remembered(editable, "trace") is None


def test_a_sweep_needs_targets() -> None:
    facts = [Fact("Eiffel tower", "{} stands in")]
    traces = locate(zoo.shared("gpt2"), facts, samples=1)
    with pytest.raises(FactError, match="has no new object"):
        by_sweep(zoo.shared("gpt2"), facts, traces, quick(), CORPUS)
    assert remembered(zoo.shared("gpt2"), "sweep") is None


@pytest.mark.parametrize(
    ("scores", "layer", "correlation"),
    [
        (((0.1, 0.5), (0.3, 0.9), (0.2, 0.7)), 1, 1.0),
        (((0.1, 0.9), (0.3, 0.9), (0.2, 0.1)), 1, 0.0),  # the same score: where tracing finds more
        (((0.1, 0.5), (0.3, 0.1), (0.2, 0.2)), 0, -1.0),
        (((0.1, None), (0.3, None), (0.2, None)), 1, None),
    ],
)
def test_the_best_score_is_chosen_and_correlated_with_the_trace(
    scores: Any, layer: int, correlation: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edits(*words: Any, **_: Any) -> Any:
        """Edits whose scores are given; only the shape of what is measured matters here."""
        found = dict.fromkeys(("efficacy", "paraphrase", "specificity"), 1.0) | {"score": scores[words[3][0]][1]}
        return SimpleNamespace(after=SimpleNamespace(**found))

    class Traces:
        at_subject, layer = np.array([effect for effect, _ in scores]), 2

    monkeypatch.setattr(choice, "write", edits)
    monkeypatch.setattr(choice, "evaluate", lambda *words: words[2])
    sweep = by_sweep(zoo.shared("gpt2"), [ASKED], Traces(), stats={})  # type: ignore[arg-type]
    assert (sweep.layer, sweep.traced) == (layer, 2)
    assert (
        sweep.correlation is None if correlation is None else math.isclose(sweep.correlation, correlation, abs_tol=1e-9)
    )


def test_a_score_that_is_missing_is_the_worst() -> None:
    rows = (LayerScore(0, 0.9, 1.0, None, None, None), LayerScore(1, None, 1.0, 0.5, None, 0.1))
    assert Sweep(rows, 0, None).layer == 1


def test_what_is_remembered_belongs_to_one_model() -> None:
    editable = zoo.trained("gpt2", True)
    remember(editable, Choice(2, "trace", 40))
    assert remembered(zoo.trained("gpt2", True), "trace") == Choice(2, "trace", 40)
    assert remembered(zoo.build("gpt2", True), "trace") is None and remembered(editable, "sweep") is None
    remember(editable, Choice(1, "trace", 50))
    assert remembered(editable, "trace") == Choice(1, "trace", 50)
    editable.memories[1].weight.data[0, 0] += 1
    assert remembered(editable, "trace") is None, "an edited model is another model"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"3", b'{"layer": 1}', b'{"layer": "1", "how": "x", "facts": 2}'),
        *(b'{"layer": 3, "how": "trace", "facts": 9}', b'{"layer": -1, "how": "trace", "facts": 9}'),
        b'{"layer": 1, "how": "trace", "facts": 9, "more": 0}',
    ],
)
def test_a_damaged_memory_is_none(content: bytes, cache_folder: Path) -> None:
    editable = zoo.shared("gpt2")
    remember(editable, Choice(1, "trace", 9))
    (file,) = cache_folder.glob("layers/*-trace.json")
    assert json.loads(file.read_text()) == {"layer": 1, "how": "trace", "facts": 9} and remembered(editable, "trace")
    file.write_bytes(content)
    assert remembered(editable, "trace") is None


def test_only_a_trace_of_many_facts_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.shared("llama")
    monkeypatch.setattr(choice, "MANY", 2)
    # Without a previous object the model's own answer is traced: one that it knows.
    known = [Fact(fact.subject, fact.prompt, fact.target) for fact in (FACT, SECOND)]
    assert len(by_trace(editable, known[:1]).traces) == 1 and remembered(editable, "trace") is None
    by_trace(editable, [*known[:1], FACT])
    assert remembered(editable, "trace") is None, "one of the two is not known to the model"
    for sever in (None, "attention"):
        choice.remember_trace(editable, locate(editable, known, "feed_forward", sever=sever, corruption="uniform"))
    choice.remember_trace(editable, locate(editable, known, "state"))
    choice.remember_trace(editable, locate(editable, known, metric="log_probability"))
    assert remembered(editable, "trace") is None, "traced in another way than `apply` would"
    traces = by_trace(editable, known, seed=3)
    assert remembered(editable, "trace") == Choice(traces.layer, "trace", 2)
    assert {(trace.kind, trace.seed) for trace in traces.traces} == {("feed_forward", 3)}
    with pytest.raises(FactError, match="no facts to trace"):
        by_trace(editable, [])
