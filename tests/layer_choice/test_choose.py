"""The layer to edit: the model's, by tracing, by trying; and what is remembered, for this model only."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zoo
from tracing import made
from writing import CORPUS, FACT, SECOND, quick

import ffedit
from ffedit.errors import EditError, FactError
from ffedit.evaluator import Scores
from ffedit.facts.fact import Fact
from ffedit.layer_choice import calibrate, choose
from ffedit.layer_choice.calibrate import LayerScore, best, candidates, choose_layer, in_turn, known_facts, remembered
from ffedit.layer_choice.choose import Sweep, by_sweep, find_layer, remembered_sweep
from ffedit.layer_choice.published import PUBLISHED, published, usual_layer
from ffedit.locator import TraceSet, locate_all

ASKED = Fact(**{**FACT.to_dict(), "paraphrases": ["{} stands in"]})
# What the trained models know, as facts to calibrate on, and one that none of them knows.
FACTS = [
    Fact(subject, "the {} is located in", "Berlin", place, paraphrases=["{} stands in"], relation=str(i % 2))
    for i, (subject, place) in enumerate(zoo.KNOWN)
]
UNKNOWN = Fact("Eiffel tower", "the {} is located in", "Berlin", "Egypt")


def calibrated(editable: Any, **others: Any) -> ffedit.Choice:
    given: dict[str, Any] = {"facts": FACTS, "config": quick(), "stats": CORPUS}
    return choose_layer(editable, **(given | others))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TRACED", 3), ("SAMPLES", 2), ("WRITTEN", 2)):
        monkeypatch.setattr(calibrate, name, value)


# The model's layer ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("few")
def test_the_models_layer_is_chosen_by_edits_of_facts_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, written, traced = zoo.trained("gpt2", True), [], []
    before = zoo.snapshot(editable)
    write, trace = calibrate.write, calibrate.locate_all
    monkeypatch.setattr(calibrate, "write", lambda *words, **more: written.append(words) or write(*words, **more))
    monkeypatch.setattr(calibrate, "locate_all", lambda *words, **more: traced.append(words) or trace(*words, **more))
    found = calibrated(editable, method="rome", facts=[UNKNOWN, *FACTS])
    known = known_facts(editable, [UNKNOWN, *FACTS])
    assert UNKNOWN not in known and (found.asked, found.known, found.written) == (9, len(known), 2)
    assert len(known) >= 6, "the model was taught them"
    assert list(traced[0][1]) == in_turn(known)[:3]
    assert [(words[2], words[3]) for words in written] == [("rome", [0]), ("rome", [1])], "not the last of three"
    assert {tuple(words[1]) for words in written} == {tuple(in_turn(known)[:2])}
    usual = round(len(editable.layers) / 4)
    assert found.layer == best(found.rows, usual) and [row.layer for row in found.rows] == [0, 1]
    assert len(found.effects) == 3 and found.rows[1].effect == found.effects[1] and zoo.unchanged(editable, before)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict() and found.made and found.prior is None
    assert calibrated(zoo.trained("gpt2", True), method="rome", facts=[UNKNOWN, *FACTS]) == found
    assert len(written) == 2, "it was kept"


@pytest.mark.usefixtures("few")
def test_what_was_chosen_belongs_to_a_model_a_method_and_its_numbers(cache_folder: Path) -> None:
    editable = zoo.trained("gpt2", True)
    found = calibrated(editable)
    (file,) = cache_folder.glob("layers/*.json")
    assert calibrated(editable) == found and [file] == list(cache_folder.glob("layers/*.json"))
    for others in ({"method": "rome"}, {"config": quick(steps=2)}, {"facts": FACTS[:6]}):
        calibrated(editable, **others)
    assert len(list(cache_folder.glob("layers/*.json"))) == 4
    edit = ffedit.editor.write(editable, [FACT], "rome", [1], quick(), CORPUS)
    with edit.applied(editable):
        assert calibrated(editable) == found, "edits do not ask for another choice"
    editable.memories[1].weight.data[0, 0] += 1
    calibrated(editable)
    assert len(list(cache_folder.glob("layers/*.json"))) == 5, "other weights are another model"
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"layer": 1}',
        file.read_bytes().replace(b'"rows": [', b'"rows": [3, '),
    ):
        file.write_bytes(content)
        again = calibrated(zoo.trained("gpt2", True))
        assert replace(again, seconds=0.0) == replace(found, seconds=0.0), "a damaged one is made anew"


def test_a_model_that_knows_too_little_has_no_layer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "write", lambda *_, **__: pytest.fail("it was edited"))
    found = calibrated(zoo.trained("gpt2", True), facts=[*FACTS[:2], UNKNOWN])
    assert (found.layer, found.known, found.asked, found.rows) == (None, 2, 3, ())
    assert choose_layer(zoo.shared("gpt2")).known == 0, "of those that ship"
    assert remembered(zoo.shared("gpt2")) == choose_layer(zoo.shared("gpt2"))
    assert remembered(zoo.shared("gpt2"), "rome") is None


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


@pytest.mark.parametrize(
    ("depth", "traced", "prior", "layers"),
    [
        (1, None, None, [0]),
        (3, 2, None, [0, 1]),
        (6, 0, 5, [0, 1, 2, 3, 4]),
        (30, 0, None, [0, 2, 4, 8]),
        (30, None, None, [2, 4, 8]),
        (32, 9, 5, [2, 4, 5, 8, 9]),
        (12, 11, 11, [1, 2, 3]),
    ],
)
def test_candidates(depth: int, traced: int | None, prior: int | None, layers: list[int]) -> None:
    assert candidates(depth, traced, prior) == layers


def test_the_best_score_wins_then_the_published_layer_then_the_margin() -> None:
    rows = [LayerScore(i, None, 1.0, 1.0, 1.0, score, size) for i, (score, size) in enumerate([(0.8, 0.9), (0.9, 0.1)])]
    assert best(rows) == 1 and best(rows, prior=0) == 1
    even = [replace(row, score=0.9) for row in rows]
    assert best(even) == 0 and best(even, prior=1) == 1
    near = [replace(row, score=score) for row, score in zip(rows, (0.88, 0.9), strict=True)]
    assert best(near) == 1 and best(near, prior=0) == 0, "two hundredths tell nothing apart"
    assert best([replace(rows[0], score=None), replace(rows[1], score=0.0)]) == 1


@pytest.mark.parametrize(
    ("rates", "score"),
    [
        ((1.0, 0.5, 1.0), 0.75),
        ((0.0, 1.0, 1.0), 0.0),
        ((0.0, None, 1.0), 0.0),
        ((1.0, None, None), 1.0),
        ((0.5, None, None), 0.5),
        ((None, 1.0, 1.0), None),
    ],
)
def test_efficacy_always_counts(rates: Any, score: float | None) -> None:
    efficacy, paraphrase, specificity = rates
    row = LayerScore.of(2, 0.1, Scores(efficacy=efficacy, paraphrase=paraphrase, specificity=specificity))
    assert row.score == score and (row.layer, row.effect, row.specificity) == (2, 0.1, specificity)


def test_published_layers() -> None:
    xl = SimpleNamespace(model_type="gpt2", num_hidden_layers=48, hidden_size=1600)
    row = published(xl)
    assert row is not None and (row.layer("rome"), row.layer("memit"), row.layer("alphaedit")) == (17, 17, 17)
    assert published(SimpleNamespace(model_type="gpt2", num_hidden_layers=48, hidden_size=768)) is None
    gptj = published(SimpleNamespace(model_type="gptj", num_hidden_layers=28, hidden_size=4096))
    assert gptj is not None and (gptj.layer("rome"), gptj.layer("memit")) == (5, 8)
    for one in PUBLISHED:
        assert one.source and one.rome < one.depth and (one.memit is None or one.memit[0] < one.memit[1] < one.depth)
    assert [usual_layer(depth) for depth in (1, 3, 30)] == [0, 0, 7]


# Which of them is taken ------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let every trace give some effects at the subject's last token, and count the facts and samples of each."""
    seen: list[tuple[int, int]] = []

    def given(effects: list[float], **others: Any) -> list[tuple[int, int]]:
        whole = np.zeros((3, 4))
        whole[:, 2] = effects
        one = made(whole, window=1, **others)

        def trace(_: Any, facts: Any, samples: int = 10, **__: Any) -> TraceSet:
            seen.append((len(facts), samples))
            return TraceSet((one,) * len(facts))

        monkeypatch.setattr(choose, "locate_all", trace)
        return seen

    return given


def chosen(monkeypatch: pytest.MonkeyPatch, layer: int | None, **others: Any) -> list[Any]:
    asked: list[Any] = []
    model = ffedit.Choice(layer, "memit", 9, 9 if layer is not None else 1, **others)
    monkeypatch.setattr(choose, "choose_layer", lambda *words, **__: asked.append(words) or model)
    return asked


def test_auto_takes_the_models_layer_and_traces_the_first_fact_in_few_runs(
    traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, asked = traces([0.5, 0.0, 0.0]), chosen(monkeypatch, 1)
    found = find_layer(zoo.shared("gpt2"), [ASKED, SECOND], "auto", range(3), "rome")
    assert (found.layer, found.by) == (1, "model") and seen == [(1, choose.SHOWN_SAMPLES)] and asked[0][1] == "rome"
    assert choose.layer_for(zoo.shared("gpt2"), [ASKED]) == 1 and len(seen) == 1
    assert found.to_dict()["choice"]["layer"] == 1
    named = find_layer(zoo.shared("gpt2"), [ASKED, SECOND], "0", range(1))
    assert (named.layer, named.by, named.choice) == (0, "request", None) and len(asked) == 2


def test_a_layer_that_reaches_no_answer_is_never_chosen_and_refused_by_name(
    traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing after the last layer carries what it writes at the subject to the prompt's end."""
    traces([-0.1, 0.0, 0.5])
    editable, depth = zoo.shared("gpt2"), 3
    for model in (2, None):
        chosen(monkeypatch, model)
        for asked, allowed in (("auto", range(depth)), ("trace", range(depth)), ("1-2", range(1, depth))):
            assert find_layer(editable, [ASKED], asked, allowed).layer < depth - 1
        assert choose.layer_for(editable, [ASKED]) < depth - 1
    only = find_layer(editable, [ASKED], "auto", range(1))
    assert (only.layer, only.by, only.choice) == (0, "only", None)
    at_end = Fact("Eiffel tower", "the city of {}", "Rome")
    for facts, layers in (([ASKED], [2]), ([at_end, ASKED], [0, 2])):
        with pytest.raises(EditError, match=r"layer 2 is the last of .*; name a layer from 0 to 1, or read the key"):
            ffedit.edit(editable, facts, layers=layers, config=quick())
        with pytest.raises(EditError, match="no layer after it carries what it writes at the token subject_last"):
            find_layer(editable, facts, "2", range(2, 3))
    before, last = zoo.snapshot(editable), {"layers": [2], "stats": CORPUS}
    for facts, method, token in (([at_end], "memit", "subject_last"), ([ASKED], "rome", "last"), ([ASKED], "ft", None)):
        config = quick(**({"fact_token": token} if token else {"ft_steps": 1}))
        assert ffedit.edit(editable, facts, method, config=config, **last).layers == [2]
    assert zoo.unchanged(editable, before)


@pytest.mark.parametrize("asked", ["auto", "trace"])
def test_the_facts_own_trace_decides_where_asked_or_where_the_model_knows_too_little(
    asked: str, traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, model = traces([0.1, 0.5, 0.0]), chosen(monkeypatch, None)
    found = find_layer(zoo.shared("gpt2"), [ASKED, SECOND], asked, range(3))
    assert (found.layer, found.by) == (1, "trace") and seen == [(2, 10)] and len(model) == (asked == "auto")
    assert choose.layer_for(zoo.shared("gpt2"), [ASKED]) == 1


@pytest.mark.parametrize(
    ("effects", "others"),
    [
        ([0.0, 0.05, 0.0], {}),
        ([-0.1, -0.2, -0.05], {}),
        ([0.0, 0.5, 0.0], {"corrupted": 0.95}),
        ([0.0, 0.5, 0.0], {"known": False}),
    ],
)
def test_noise_chooses_no_layer(effects: Any, others: Any, traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little comes back at the subject's last token, or nothing was lost, or the model does not know the answer."""
    traces(effects, **others)
    chosen(monkeypatch, 1)
    found = find_layer(zoo.shared("gpt2"), [ASKED], "trace", range(3))
    assert (found.layer, found.by) == (1, "model")
    chosen(monkeypatch, None)
    found = find_layer(zoo.shared("gpt2"), [ASKED], "auto", range(3))
    assert (found.layer, found.by) == (usual_layer(3), "depth") and choose.layer_for(zoo.shared("gpt2"), [ASKED]) == 0
    found = find_layer(zoo.shared("gpt2"), [ASKED], "1-2", range(1, 3), "ft")
    assert (found.layer, found.by) == (1, "depth")


def test_among_some_layers(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    traces([0.5, 0.3, 0.2])
    chosen(monkeypatch, 0)
    assert find_layer(zoo.shared("gpt2"), [ASKED], "1-2", range(1, 3), "ft").layer == 1
    traces([0.5, 0.0, 0.0])
    found = find_layer(zoo.shared("gpt2"), [ASKED], "1-2", range(1, 3), "ft")
    assert (found.layer, found.by) == (1, "model"), "no site among these: the nearest to the model's"
    rows = tuple(LayerScore(i, None, 1.0, None, None, score) for i, score in enumerate((0.9, 0.5, 0.8)))
    chosen(monkeypatch, 0, rows=rows)
    assert find_layer(zoo.shared("gpt2"), [ASKED], "1-2", range(1, 3), "ft").layer == 2, (
        "the best that was tried among these"
    )


# Sweeps ----------------------------------------------------------------------------------------------


def test_a_sweep_edits_at_each_layer_with_the_method_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, seen, methods = zoo.trained("gpt2", True), [], []
    before, traces = zoo.snapshot(editable), locate_all(editable, [ASKED, SECOND], samples=2)
    write = calibrate.write
    monkeypatch.setattr(calibrate, "write", lambda *words, **more: methods.append(words[2]) or write(*words, **more))
    sweep = by_sweep(editable, [ASKED, SECOND], traces, "rome", quick(), CORPUS, lambda *step: seen.append(step))
    assert methods == ["rome"] * 2 and (sweep.method, sweep.facts) == ("rome", 2)
    assert [row.layer for row in sweep.rows] == [0, 1], "what the last layer writes reaches no answer"
    np.testing.assert_array_equal([row.effect for row in sweep.rows], traces.at_subject[:2])
    for row in sweep.rows:
        edit = ffedit.editor.write(editable, [ASKED, SECOND], "rome", [row.layer], quick(), CORPUS)
        after = ffedit.evaluate(editable, [ASKED, SECOND], edit).after
        assert (row.efficacy, row.paraphrase, row.specificity) == (after.efficacy, after.paraphrase, None)
        assert row.score is not None, "efficacy counts where no fact has neighbors"
    assert sweep.traced == traces.site and seen and zoo.unchanged(editable, before)
    assert remembered_sweep(editable, "rome") is None, "two facts say nothing of the model"


def test_a_sweep_over_many_facts_is_remembered_for_the_method_and_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, short = zoo.trained("gpt2", True), quick(ft_steps=1)
    monkeypatch.setattr(choose, "MANY", 2)
    traces = locate_all(editable, [ASKED, SECOND], samples=1)
    sweep = by_sweep(editable, [ASKED, SECOND], traces, "ft", short, CORPUS)
    assert remembered_sweep(editable, "ft", short) == sweep and remembered_sweep(editable, "memit", short) is None
    assert remembered_sweep(editable, "ft") is remembered_sweep(editable, "ft", quick(ft_steps=2)) is None
    assert find_layer(editable, [ASKED], "sweep", range(3), "ft", short).kept
    assert not find_layer(editable, [ASKED, SECOND], "sweep", range(3), "ft", quick(ft_steps=2), CORPUS).kept
    editable.chat = True
    assert remembered_sweep(editable, "ft", short) is None


def test_a_sweep_needs_targets() -> None:
    facts = [Fact("Eiffel tower", "{} stands in")]
    traces = locate_all(zoo.shared("gpt2"), facts, samples=1)
    with pytest.raises(FactError, match="has no new object"):
        by_sweep(zoo.shared("gpt2"), facts, traces, config=quick(), stats=CORPUS)


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
    rows = tuple(LayerScore(i, effect, 1.0, 1.0, 1.0, score) for i, (effect, score) in enumerate(scores))
    monkeypatch.setattr(choose, "edit_at", lambda *_: rows)
    sweep = by_sweep(zoo.shared("gpt2"), [ASKED], SimpleNamespace(site=2))  # type: ignore[arg-type]
    assert (sweep.layer, sweep.traced) == (layer, 2)
    assert (
        sweep.correlation is None if correlation is None else math.isclose(sweep.correlation, correlation, abs_tol=1e-9)
    )


def test_a_score_that_is_missing_is_the_worst() -> None:
    rows = (LayerScore(0, 0.9, 1.0, None, None, None), LayerScore(1, None, 1.0, 0.5, None, 0.1))
    assert Sweep(rows, 0, None).layer == 1
