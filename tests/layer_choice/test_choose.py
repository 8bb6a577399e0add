"""The layer that `--layers` asks for: by a rule, by the facts' own trace, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zoo
from tracing import made
from writing import CORPUS, FACT, SECOND, quick

import ffedit
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.layer_choice import choose
from ffedit.layer_choice.choose import find_layer, known_layer
from ffedit.layer_choice.published import Published
from ffedit.locator import TraceSet, locate

ASKED = Fact(**{**FACT.to_dict(), "paraphrases": ["{} stands in"]})


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


@pytest.fixture
def one_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layer 1 be published for the tiny model."""
    config = zoo.shared("gpt2").model.config
    row = Published("Tiny", config.model_type, 3, config.hidden_size, 1, None, "a paper")
    monkeypatch.setattr("ffedit.layer_choice.published.PUBLISHED", (row,))


def test_auto_takes_the_usual_layer_whatever_the_trace_shows(traces: Any) -> None:
    seen = traces([0.0, 0.5, 0.0])
    found = find_layer(zoo.shared("gpt2"), [ASKED, SECOND], "auto", range(3))
    assert (found.layer, found.by) == (0, "usual") and found.traces.site == 1
    assert seen == [(1, choose.SHOWN_SAMPLES)], "the first fact is traced, to be shown"
    assert found.to_dict() == {"layer": 0, "by": "usual"}


@pytest.mark.usefixtures("one_is_published")
def test_auto_takes_the_published_layer_and_asks_the_model_nothing(
    traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run or read: with the model's forward pass and the cache out of order, the layer is known."""
    editable, config = zoo.shared("gpt2"), quick()
    traces([0.5, 0.0, 0.0])
    found = find_layer(editable, [ASKED], "auto", range(3), "rome")
    assert (found.layer, found.by) == (1, "published")
    with monkeypatch.context() as patched:
        patched.setattr(type(editable.model), "forward", lambda *_, **__: pytest.fail("the model was run"))
        patched.setattr("ffedit.files.cache.path", lambda *_: pytest.fail("the cache was read"))
        known = known_layer(editable, [ASKED], "auto", range(3), "memit", config)
        assert known is not None and (known.layer, known.by) == (1, "published")
        patched.setattr("ffedit.api.write", lambda _, facts, method, layers, *rest: layers)
        assert ffedit.edit(editable, ASKED, config=config) == [1]


def test_a_plan_knows_the_layer_unless_a_trace_takes_it() -> None:
    editable = zoo.shared("gpt2")
    for asked, allowed, known in (("auto", range(3), 0), ("1", range(1, 2), 1), ("trace", range(3), None)):
        found = known_layer(editable, [ASKED], asked, allowed, "memit", quick())
        assert (found and found.layer) == known


def test_a_layer_that_reaches_no_answer_is_never_chosen_and_refused_by_name(traces: Any) -> None:
    """Nothing after the last layer carries what it writes at the subject to the prompt's end."""
    traces([-0.1, 0.0, 0.5])
    editable, depth = zoo.shared("gpt2"), 3
    for asked, allowed in (("auto", range(depth)), ("trace", range(depth)), ("1-2", range(1, depth))):
        assert find_layer(editable, [ASKED], asked, allowed).layer < depth - 1
    only = find_layer(editable, [ASKED], "auto", range(1))
    assert (only.layer, only.by) == (0, "only")
    at_end = Fact("Eiffel tower", "the city of {}", "Rome")
    also = replace(at_end, also=(ASKED.prompt,))
    for facts, layers in (([ASKED], [2]), ([at_end, ASKED], [0, 2]), ([also], [2])):
        with pytest.raises(EditError, match=r"layer 2 is the last of .*; name a layer from 0 to 1, or edit at the"):
            ffedit.edit(editable, facts, layers=layers, config=quick())
        with pytest.raises(EditError, match="no later layer can carry a change at the token subject_last"):
            find_layer(editable, facts, "2", range(2, 3))
    before, last = zoo.snapshot(editable), {"layers": [2], "stats": CORPUS}
    for facts, method, token in (([at_end], "memit", "subject_last"), ([ASKED], "rome", "last"), ([ASKED], "ft", None)):
        config = quick(**({"fact_token": token} if token else {"ft_steps": 1}))
        assert ffedit.edit(editable, facts, method, config=config, **last).layers == [2]
    assert zoo.unchanged(editable, before)


def test_the_facts_own_trace_decides_where_it_is_asked_for(traces: Any) -> None:
    seen = traces([0.1, 0.5, 0.0])
    found = find_layer(zoo.shared("gpt2"), [ASKED, SECOND], "trace", range(3))
    assert (found.layer, found.by) == (1, "trace") and seen == [(2, 10)]
    named = find_layer(zoo.shared("gpt2"), [ASKED, SECOND], "0", range(1))
    assert (named.layer, named.by) == (0, "request") and seen[1:] == [(1, choose.SHOWN_SAMPLES)]
    traces([0.5, 0.2, 0.3])
    within = find_layer(zoo.shared("gpt2"), [ASKED], "1-2", range(1, 3), "ft")
    assert (within.layer, within.by) == (2, "trace")


@pytest.mark.parametrize(
    ("effects", "others"),
    [
        ([0.0, 0.05, 0.0], {}),
        ([-0.1, -0.2, -0.05], {}),
        ([0.0, 0.5, 0.0], {"corrupted": 0.95}),
        ([0.0, 0.5, 0.0], {"known": False}),
    ],
)
def test_noise_chooses_no_layer(effects: Any, others: Any, traces: Any) -> None:
    """Little comes back at the subject's last token, or nothing was lost, or the model does not know the answer."""
    traces(effects, **others)
    found = find_layer(zoo.shared("gpt2"), [ASKED], "trace", range(3))
    assert (found.layer, found.by) == (0, "usual")
    found = find_layer(zoo.shared("gpt2"), [ASKED], "1-2", range(1, 3), "ft")
    assert (found.layer, found.by) == (1, "usual"), "the one of these that is nearest"


def test_a_fact_that_a_model_knows_is_recalled_somewhere_in_the_shown_trace() -> None:
    """It is the whole trace of the same runs, at the subject's tokens and the prompt's last."""
    editable = ffedit.load("atlas", device="cpu")
    fact = Fact("Eiffel Tower", "{} is located in the city of", previous="Paris")
    whole = locate(editable, fact, samples=choose.SHOWN_SAMPLES)
    (seen,) = choose.shown(editable, [fact, ASKED]).traces
    np.testing.assert_allclose(seen.effects[:, [0, 1, -1]], whole.effects[:, [0, 1, -1]], atol=1e-6)
    assert np.isnan(seen.effects[:, 2:-1]).all()
    assert seen.known and seen.total > 0.5 and seen.site == whole.site and seen.site is not None
    assert seen.at_subject.max() > 0.5 * seen.total
