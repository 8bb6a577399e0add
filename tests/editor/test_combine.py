"""Two edits solved again as one store what both asked for, where their sum does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from writing import CORPUS, FACT, SECOND, quick, with_numbers

from ffedit import Edit, EditConfig, EditError, Fact
from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.low_rank import LowRank
from ffedit.editor.combine import combine
from ffedit.editor.key import build_prompts, read_at, read_keys
from ffedit.editor.recipe import recipe_of
from ffedit.editor.statistics import collect
from ffedit.editor.write import write as write_facts
from ffedit.evaluator.explain import take_apart
from ffedit.inference import corpus
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

pytestmark = pytest.mark.usefixtures("warm_cache")

AT = Address(1)
THIRD = Fact("Nile river", "the {} is located in", "Berlin", "Egypt")
CONFIG = quick()


def alike(editable: Editable, *more: Any) -> tuple[Any, ...]:
    """What edits and statistics depend on, of models that nothing has changed."""
    return editable.name, editable.memories[0].weight.dtype, *more


MADE: dict[Any, Any] = {}


def stats(editable: Editable, *layers: int) -> Mapping[Address, KeyMoments]:
    """Statistics of one layer or several, collected once for all tests."""
    key = alike(editable, layers or (1,))
    if key not in MADE:
        MADE[key] = collect(editable, [editable.memories[layer] for layer in layers or (1,)], CORPUS)
    return MADE[key]


def write(
    editable: Editable, facts: Sequence[Fact], method: str = "emmet", layer: int = 1, config: EditConfig = CONFIG
) -> Edit:
    """An edit, computed once for all tests."""
    key = alike(editable, tuple(facts), method, layer, config)
    if key not in MADE:
        MADE[key] = write_facts(editable, facts, method, [layer], config, stats(editable, layer))
    return MADE[key]


def missed(editable: Editable, parts: Sequence[Edit], whole: Edit, at: Address = AT) -> list[float]:
    """Of each part, what the whole leaves of the residuals that the part was solved for."""
    W = editable.memories[at].value.double()
    found: list[float] = []
    for part in parts:
        residual = part.values[at] - W @ part.keys[at]
        found.append(float((whole.updates[at] @ part.keys[at] - residual).norm() / residual.norm()))
    return found


def test_sinks_are_those_of_the_last_layer_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the edit was made: a union of one edit is that edit."""
    editable, layers = zoo.trained("llama", False), [0, 1]
    facts = [Fact("Rome", "{} is located in", "Spain"), Fact("Leo Tolstoy", "{} stands in", "Spain")]
    (prompt_set,) = build_prompts(editable, [[facts[0]]], CONFIG)
    first, alike = torch.tensor([text.site == 0 for text in prompt_set.texts]), []
    for layer in layers:
        keys = read_at(editable, editable.feed_forward[layer], prompt_set.texts)[0]
        alike.append(float(torch.cosine_similarity(keys[first][0], keys[~first].mean(0), 0)))
    assert alike[1] < alike[0]
    monkeypatch.setattr("ffedit.editor.key.SINK", sum(alike) / 2)
    edit = write_facts(editable, facts, "memit", layers, CONFIG, stats(editable, *layers))
    assert [solved["behind"] for solved in edit.provenance["solved"]] == [1, 0]
    union = combine(editable, [edit], "memit", stats=stats(editable, *layers), config=CONFIG)
    for at, delta in edit.updates.items():
        assert (union.updates[at].dense - delta.dense).norm() < 1e-9 * delta.norm()


def summed(parts: Sequence[Edit]) -> Edit:
    """The sum of edits as version 0.1.0 wrote it: changes are added, all else is of the parts."""
    deltas, keys, values = ({at: [] for part in parts for at in part.updates} for _ in range(3))
    for part in parts:
        for at, delta in part.updates.items():
            for of_all, own in ((deltas, delta), (keys, part.keys[at]), (values, part.values[at])):
                of_all[at].append(own)
    updates = {
        at: LowRank(torch.cat([d.left for d in own], 1), torch.cat([d.right for d in own]))
        for at, own in deltas.items()
    }
    about = {
        "method": "sum",
        "base": parts[0].base,
        "parts": [{"fingerprint": part.fingerprint(), **part.provenance} for part in parts],
        "subjects": {str(at): [name for part in parts for name in part.subjects(at)] for at in updates},
    }
    facts = tuple(fact for part in parts for fact in part.facts)
    joined = ({at: torch.cat(own, 1) for at, own in side.items()} for side in (keys, values))
    return Edit(updates, *joined, facts, about)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_all_keys_get_their_values_where_the_sum_misses_them(family: str) -> None:
    editable = zoo.trained(family, True)
    parts = [write(editable, [FACT]), write(editable, [SECOND, THIRD])]
    both = combine(editable, parts, "emmet", stats=stats(editable), config=CONFIG)
    assert min(missed(editable, parts, summed(parts))) > 1e-2, "crosstalk"
    assert max(missed(editable, parts, both)) < 1e-8
    assert both.facts == (FACT, SECOND, THIRD) and both.rank == 3
    about, names = both.provenance, [part.fingerprint() for part in parts]
    assert [one["from"] for one in about["solved"]] == [names[0], names[1], names[1]]
    assert [one["subject"] for one in about["solved"]] == [fact.subject for fact in (FACT, SECOND, THIRD)]
    assert (about["method"], about["base"]) == ("emmet", parts[0].base)
    for name in ("keys", "values"):
        joined = torch.cat([getattr(part, name)[AT] for part in parts], 1)
        assert torch.equal(getattr(both, name)[AT], joined)


def test_a_combination_is_what_writing_all_at_once_gives() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    parts = [write(editable, [FACT]), write(editable, [SECOND, THIRD])]
    both, at_once = (
        combine(editable, parts, "emmet", stats=stats(editable), config=CONFIG),
        write(editable, [FACT, SECOND, THIRD]),
    )
    torch.testing.assert_close(both.updates[AT].dense, at_once.updates[AT].dense, rtol=1e-6, atol=1e-8)


def test_edits_made_one_upon_the_other_are_solved_jointly() -> None:
    """Keys and values are those of the sequence, and the change is the smallest that joins them."""
    editable, before = zoo.trained("gpt2", True), zoo.snapshot(zoo.trained("gpt2", True))
    first = write(editable, [FACT])
    with first.applied(editable):
        second = write_facts(editable, [SECOND, THIRD], "emmet", [1], CONFIG, stats(editable), [first])
    both = combine(editable, [first, second], "emmet", stats=stats(editable), config=CONFIG)
    W = editable.memories[AT].value.double()
    for part in (first, second):
        torch.testing.assert_close((W + both.updates[AT].dense) @ part.keys[AT], part.values[AT], rtol=1e-6, atol=1e-8)
    changes = both.updates[AT].dense, first.updates[AT].dense + second.updates[AT].dense
    joint, added = (float(torch.trace(delta @ stats(editable)[AT].C @ delta.T)) for delta in changes)
    assert both.rank == 3 and joint < added
    with pytest.raises(EditError, match="was computed on weights"):
        combine(editable, [second], "emmet", stats=stats(editable), config=CONFIG)
    assert zoo.unchanged(editable, before) and not editable.history.edits


@pytest.mark.parametrize("method", ["memit", "alphaedit"])
def test_a_combination_by_least_squares_is_closer_than_the_sum(method: str) -> None:
    editable = zoo.trained("gpt2", True)
    config = with_numbers(CONFIG, alphaedit_null_share=0.3)
    parts = [write(editable, facts, method, config=config) for facts in ([FACT], [SECOND, THIRD])]
    both = combine(editable, parts, method, stats=stats(editable), config=config)
    assert sum(missed(editable, parts, both)) < 0.7 * sum(missed(editable, parts, summed(parts)))


def test_in_other_layers_each_key_is_read_above_what_the_union_changes() -> None:
    """With the union applied, what a forward pass finds at each subject is moved by what its edit asked for."""
    editable = zoo.trained("gpt2", True, torch.float64)
    parts = [write(editable, [FACT], layer=0), write(editable, [SECOND], layer=1)]
    both = combine(editable, parts, "emmet", stats=stats(editable, 0, 1), config=CONFIG)
    assert both.layers == [0, 1] and both.rank == 1
    (prompt_set,) = build_prompts(editable, [[SECOND]], CONFIG)
    W = editable.memories[AT].value.double()
    asked = parts[1].values[AT] - W @ parts[1].keys[AT]

    def gap(edit: Edit) -> float:
        """Of what was asked for the upper layer's subject, the share that is missed at its key as it then is."""
        lower = dataclasses.replace(edit, updates={Address(0): edit.updates[Address(0)]}, keys={}, values={})
        with lower.applied(editable):
            k = read_keys(editable, editable.feed_forward[AT.layer], [prompt_set]).K
        return float((edit.updates[AT] @ k - asked).norm() / asked.norm())

    assert gap(both) < 1e-8 < 1e-4 < gap(summed(parts)), "the sum reads its key without the change below"
    torch.testing.assert_close(both.keys[Address(0)], parts[0].keys[Address(0)], rtol=0, atol=0)


def test_keys_are_read_again_in_the_texts_that_the_edits_were_worded_in() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    parts = [write(editable, [FACT], layer=0), write(editable, [SECOND], layer=1)]
    moments = stats(editable, 0, 1)
    other = with_numbers(CONFIG, contexts=0, seed=9)
    found, expected = (combine(editable, parts, "emmet", stats=moments, config=config) for config in (other, CONFIG))
    torch.testing.assert_close(found.keys[AT], expected.keys[AT], rtol=1e-9, atol=1e-12)


def test_what_cannot_be_combined_is_refused_in_one_line() -> None:
    editable = zoo.trained("gpt2", True)
    first, moments = write(editable, [FACT]), stats(editable)
    again = write(editable, [Fact("Eiffel tower", "the city of {} is", "Berlin", "Paris")])
    above = write(editable, again.facts, layer=0)
    ending = write(editable, [SECOND], config=with_numbers(CONFIG, fact_token="last"))
    contrary = write(editable, [dataclasses.replace(FACT, target="Madrid")])
    tuned = write_facts(editable, [SECOND], "ft", [1], quick(ft_steps=1))
    other = write(zoo.trained("llama", True), [SECOND])
    cases: list[tuple[list[Edit], str, str]] = [
        ([first, again], "emmet", "two edits change 'Eiffel tower'"),
        ([first, above], "emmet", "two edits change 'Eiffel tower'"),
        ([first, ending], "emmet", "write at different tokens: subject_last, last"),
        ([first, contrary], "emmet", "'Rome' and 'Madrid'"),
        ([first, tuned], "emmet", "'Marie Curie' has no key"),
        ([first, other], "emmet", "made for"),
        ([first, write(editable, [SECOND])], "rome", "rome writes one subject after another"),
        ([above, write(editable, [SECOND])], "emmet", "no statistics of layer 0"),
        ([first], "ft", "use one of rome, emmet, memit, alphaedit"),
        ([], "emmet", "no facts"),
    ]
    before = zoo.snapshot(editable)
    for edits, method, words in cases:
        with pytest.raises(EditError) as caught:
            combine(editable, edits, method, stats=moments, config=CONFIG)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert zoo.unchanged(editable, before)


def test_the_token_of_a_combination_is_that_of_its_edits() -> None:
    editable = zoo.trained("gpt2", True)
    parts = [write(editable, [fact], config=with_numbers(CONFIG, fact_token="last")) for fact in (FACT, SECOND)]
    both = combine(editable, parts, "emmet", stats=stats(editable), config=CONFIG)
    assert both.provenance["config"]["key"]["fact_token"] == "last"
    assert take_apart(editable, both).token == "last"


def test_as_much_text_is_read_as_for_an_edit_where_no_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "ONE", 64)
    monkeypatch.setattr(corpus, "FEWEST", 512)
    editable, config = zoo.shared("gpt2"), with_numbers(CONFIG, names_weight=0.0)
    own = write_facts(editable, [FACT], "emmet", [1], config, None)
    again = combine(editable, [own], "emmet", config=config)
    assert again.provenance["statistics"]["1"]["tokens"] == own.provenance["statistics"]["1"]["tokens"]


def test_a_sum_can_be_solved_again() -> None:
    editable = zoo.trained("gpt2", True)
    parts = [write(editable, [FACT]), write(editable, [SECOND])]
    again = combine(editable, [summed(parts)], "emmet", stats=stats(editable), config=CONFIG)
    both = combine(editable, parts, "emmet", stats=stats(editable), config=CONFIG)
    values: list[Tensor] = [one.updates[AT].dense for one in (again, both)]
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)


def test_an_edit_that_was_solved_again_still_knows_the_texts_of_each_value() -> None:
    editable = zoo.trained("gpt2", True)
    parts = [write(editable, [FACT]), write(editable, [SECOND], config=with_numbers(CONFIG, contexts=1))]
    both = combine(editable, parts, "emmet", stats=stats(editable), config=CONFIG)
    assert {name: numbers["prompts"]["contexts"] for name, numbers in both.provenance["configs"].items()} == {
        parts[0].fingerprint(): 2,
        parts[1].fingerprint(): 1,
    }
    with pytest.raises(EditError, match="combines others has no recipe"):
        recipe_of(both)
    again = combine(editable, [both], "emmet", stats=stats(editable), config=CONFIG)
    assert again.provenance["configs"] == both.provenance["configs"]
    assert again.fingerprint() == both.fingerprint()
