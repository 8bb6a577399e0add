"""The map of a fact's sites says what an edit there does to other texts, and where nothing was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from shown import words
from writing import CORPUS, FACT, quick

import ffedit
from ffedit import Editable, EditError, Fact, FactError, SiteMap
from ffedit.algebra.linalg import double
from ffedit.display.terminal.site_map import site_map_view
from ffedit.editor import name_keys
from ffedit.editor.key import read_at
from ffedit.editor.name_keys import mention_of
from ffedit.editor.statistics import collect
from ffedit.editor.write import write
from ffedit.inference.names import mention
from ffedit.layer_choice import look_alikes, site_map as module
from ffedit.layer_choice.published import auto_layer
from ffedit.loading.verify import find_and_verify
from ffedit.locator.result import Effects

FEW = ("Rome", "Paris", "Marie Curie", "France", "old tower", "Nile river", "the city of old Spain")
CONFIG = quick(context_weight=0.03)


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the tiny models' tokenizers know, all of them measured."""
    monkeypatch.setattr(name_keys, "names", lambda: FEW)
    for one in (look_alikes, module):
        monkeypatch.setattr(one, "measured_names", lambda: FEW)


def mapped(editable: Editable, fact: Fact = FACT, layers: Any = 1, config: ffedit.EditConfig = CONFIG) -> SiteMap:
    return ffedit.site_map(editable, fact, layers=layers, config=config, stats=CORPUS)


def largest(editable: Editable, name: str, layer: int, right: torch.Tensor) -> float:
    """What a name receives at its token that receives most, by a rank-one edit's own right factor."""
    text = mention_of(editable, name, len(name))
    assert text is not None and text.subject is not None
    texts = [replace(text, fact_token=i) for i in range(text.subject[1] - text.subject[0])]
    received = double(read_at(editable, editable.feed_forward[layer], texts)[0]) @ right
    return float(received[received.abs().argmax()])


@pytest.mark.parametrize(("family", "token"), [("gpt2", -1), ("gemma3", -2)])
@pytest.mark.parametrize("more", [{}, {"names_weight": 9.0, "protect": ("Spain", "old tower")}])
def test_the_map_says_what_the_edit_does(
    monkeypatch: pytest.MonkeyPatch, family: str, token: int, more: dict[str, Any]
) -> None:
    """Δ = δ uᵀ: its right factor gives each text the share of δ that the map says."""
    editable, config = zoo.build(family, bos=True), quick(context_weight=0.03, fact_token=str(token), **more)
    measured, fact = FEW, FACT
    if more:  # every third name counts, and is not measured here; the other `keep` prompt gets a δ of its own
        measured = tuple(name for i, name in enumerate(FEW) if i % 3)
        fact = replace(FACT, keep=["the city of Spain is", "the Eiffel tower is old"])
        for one in (look_alikes, module):
            monkeypatch.setattr(one, "measured_names", lambda: measured)
    found = mapped(editable, fact, config=quick(context_weight=0.03, **more))
    edit = write(editable, [fact], "rome", [1], config, CORPUS)
    ((at, delta),) = edit.updates.items()
    right = double(delta.right)[0]
    position = found.subject[1] + token
    sentences = [mention(editable, FACT.subject, carrier, token) for carrier in module.CARRIERS]
    own = double(read_at(editable, editable.feed_forward[1], sentences)[0]) @ right
    assert found.reach[1, position] == pytest.approx(float(own.mean()), rel=1e-4)
    assert found.reach_least[1, position] == pytest.approx(float(own.min()), rel=1e-4)
    received = {name: largest(editable, name, 1, right) for name in measured}
    leaks = np.abs([*received.values()])
    assert found.names == len(measured) and found.leak[1, position] == pytest.approx(leaks.mean(), rel=1e-4)
    assert found.leak_high[1, position] == pytest.approx(np.quantile(leaks, 0.95), rel=1e-4)
    hits = found.hits(1, position)
    assert len(hits) == min(5, len(measured)) and hits == sorted(hits, key=lambda pair: -abs(pair[1]))
    assert all(share == pytest.approx(received[name], rel=1e-4) for name, share in hits)
    assert float(right @ edit.keys[at][:, 0]) == pytest.approx(1.0)


def test_the_same_text_receives_all_of_it_and_a_name_with_the_same_key_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in one text alone, k* is the key of every text that begins like it: reach 1, and leak 1 into a namesake."""
    editable = zoo.build("gpt2", bos=True)
    monkeypatch.setattr(module, "CARRIERS", ("the",))
    monkeypatch.setattr(name_keys, "MENTIONS", ("the",))
    namesake = "Eiffel  tower"  # the same tokens
    monkeypatch.setattr(look_alikes, "measured_names", lambda: (namesake, *FEW))
    monkeypatch.setattr(module, "measured_names", lambda: (namesake,))
    monkeypatch.setattr(name_keys, "names", lambda: (namesake, *FEW))
    found = mapped(editable, config=quick(contexts=0, kl_weight=0.0, context_weight=0.0))
    for position in range(*found.subject):
        values = (found.reach, found.reach_least, found.leak, found.leak_high)
        assert [float(of[1, position]) for of in values] == pytest.approx([1.0] * 4, abs=1e-5)
        assert found.hits(1, position)[0][0] == namesake


def test_axes_are_those_of_the_trace_and_nothing_is_said_of_what_was_not_measured() -> None:
    editable = zoo.shared("gpt2", True)
    fact = Fact("Eiffel tower", "the {} is located in", previous="Paris")  # without a target, as facts to trace are
    found, trace = mapped(editable, fact, [0, 2]), ffedit.locate(editable, fact, samples=1)
    assert (found.tokens, found.subject, found.layers) == (trace.tokens, trace.subject, (0, 2))
    arrays: list[Effects] = [found.reach, found.reach_least, found.leak, found.leak_high, found.leak_look_alikes]
    for values in arrays:
        assert values.shape == trace.effects.shape
        known = np.zeros_like(values, bool)
        known[np.ix_([0, 2], range(*found.subject))] = True
        assert (np.isfinite(values) == known).all()
    assert found.hits(1, 2) == [] and len(found.look_alikes) == 2
    assert np.nanmin(found.leak_high - found.leak) >= 0 < np.nanmin(found.leak)
    layer, position = found.least
    assert layer in (0, 2) and position in range(*found.subject)
    assert found.leak_look_alikes[layer, position] == np.nanmin(found.leak_look_alikes)


def test_a_token_that_another_text_cuts_otherwise_is_no_site() -> None:
    """In front of a text "Eiffel" has several tokens, and behind a space one."""
    editable = find_and_verify(zoo.model("gpt2", vocab_size=420), zoo.bytes_bpe(), "bytes")
    fact = Fact("Eiffel tower", "{} is located in", "Rome")
    found = mapped(editable, fact, 0)
    start, end = found.subject
    assert end - start > 2 and np.isfinite(found.leak[0, end - 1])
    assert np.isnan(found.leak[0, start]) and np.isnan(found.reach[0, start])
    with pytest.raises(FactError, match="was asked for, but the subject 'Eiffel tower' has"):
        write(editable, [fact], "rome", [0], quick(fact_token=str(start - end)), CORPUS)


def test_layers_are_those_whose_statistics_are_there() -> None:
    editable = zoo.shared("gpt2", True)
    own = auto_layer(editable).layer
    for _ in range(2):  # none is there: they are made; then these are there
        assert mapped(editable, layers=None).layers == tuple(range(max(0, own - 1), own + 2))
    stats = collect(editable, editable.feed_forward[2].memories, CORPUS)
    assert ffedit.site_map(editable, FACT, layers=None, config=CONFIG, stats=stats).layers == (2,)
    assert mapped(editable, layers=None).layers == (0, 1, 2)


def test_names_that_are_measured_do_not_count_in_C(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, weighted = zoo.shared("gpt2", True), quick(context_weight=0.03, names_weight=100.0)
    plain, held = mapped(editable), mapped(editable, config=weighted)
    np.testing.assert_array_equal(plain.leak, held.leak)
    monkeypatch.setattr(look_alikes, "measured_names", lambda: FEW[:3])
    monkeypatch.setattr(module, "measured_names", lambda: FEW[:3])
    half, counted = mapped(editable), mapped(editable, config=weighted)
    assert np.nanmax(np.abs(counted.leak - half.leak)) > 1e-3, "the other names count"
    neighbors = Fact(**{**vars(FACT), "neighbors": [f"the {name} is located in" for name in FEW[3:]]})
    asked = mapped(editable, neighbors, config=weighted)
    np.testing.assert_allclose(asked.leak, half.leak, rtol=1e-4)
    assert set(FEW[3:]) - {"old tower"} <= set(asked.look_alikes[0]), "neighbors are look-alikes, and none counts"


def test_in_a_mixture_the_map_is_of_the_experts_that_an_edit_would_write_to() -> None:
    editable = zoo.build("mixtral")
    found = mapped(editable)
    edit = write(editable, [FACT], "rome", [1], CONFIG, CORPUS)
    ff = editable.feed_forward[1].only(edit.updates)
    right = torch.cat([double(edit.updates[memory.address].right)[0] for memory in ff.memories])
    sentences = [mention(editable, FACT.subject, carrier) for carrier in module.CARRIERS]
    own = double(read_at(editable, ff, sentences)[0]) @ right
    assert found.reach[1, found.subject[1] - 1] == pytest.approx(float(own.mean()), rel=1e-4)


def test_the_model_stays_as_it_is_and_the_numbers_come_back(tmp_path: Path) -> None:
    editable = zoo.shared("gpt2", True)
    before = zoo.snapshot(editable)
    found = mapped(editable)
    assert zoo.unchanged(editable, before)
    assert json.loads(json.dumps(found.to_dict()))["subject"] == list(found.subject)
    found.save(tmp_path / "map.npz")
    saved = np.load(tmp_path / "map.npz")
    assert saved["axes"].tolist() == ["layer", "token"] and saved["tokens"].tolist() == list(found.tokens)
    np.testing.assert_array_equal(saved["leak_look_alikes"], found.leak_look_alikes)
    assert saved["hit"].shape == (*found.leak.shape, 5)
    assert repr(found).startswith("SiteMap of 'the Eiffel tower is located in', layers [1], 7 other names")


def test_a_tokenizer_that_knows_no_name_leaves_the_leak_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    for module_ in (look_alikes, module):
        monkeypatch.setattr(module_, "measured_names", lambda: ("Timbuktu",))
    monkeypatch.setattr(name_keys, "names", lambda: ("Timbuktu",))
    for weight in (0.0, 1.0):
        found = mapped(zoo.shared("gpt2", True), config=quick(names_weight=weight))
        assert found.names == 0 and found.look_alikes == ((),) and np.isnan(found.leak).all()
        assert np.isfinite(found.reach[1, slice(*found.subject)]).all() and found.least == (1, found.subject[1] - 1)
        assert "SiteMap" in repr(found) and "layer 1" in words(site_map_view(found))


def test_what_cannot_be_mapped_is_one_line() -> None:
    editable = zoo.shared("gpt2", True)
    for wrong, error, told in (
        ({"layers": 3}, FactError, "the model has layers 0 to 2"),
        ({"fact": [FACT]}, FactError, "one fact was expected"),
        ({"fact": Fact("Timbuktu", "{} is in")}, FactError, "does not know"),
        ({"config": {"seed": 1}}, EditError, "an EditConfig was expected"),
        ({"stats": {}}, EditError, "no statistics of layer 1"),
    ):
        with pytest.raises(error, match=told):
            ffedit.site_map(editable, **{"fact": FACT, "layers": 1, "config": CONFIG, "stats": CORPUS, **wrong})
