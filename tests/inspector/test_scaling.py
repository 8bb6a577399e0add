"""Memories scaled down or up."""

from __future__ import annotations

import mixing
import pytest
import torch
import zoo

from ffedit import EditError, MemoryIndex, ModelError
from ffedit.inspector.prompt_view import inspect_prompt
from ffedit.inspector.scaling import check_scalings, parse_scalings
from ffedit.model.memory import Address

PROMPT = mixing.PROMPT


@pytest.mark.parametrize("factor", [0.0, 3.0])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", *mixing.PLAIN])
def test_scaling_a_memory_is_scaling_its_value_and_leaves_nothing_behind(family: str, factor: float) -> None:
    editable = zoo.build(family)
    before, plain_view = zoo.snapshot(editable), inspect_prompt(editable, PROMPT)
    strongest = [one.slot for layer in plain_view.layers for one in layer.firing[:2]]
    view = inspect_prompt(editable, PROMPT, scaled=dict.fromkeys(map(str, strongest), factor))
    assert zoo.unchanged(editable, before)
    assert view.untouched == plain_view.prediction != view.prediction
    assert view.to_dict()["turned"] == dict.fromkeys(map(str, strongest), factor)
    for slot in strongest:
        memory = editable.memories[slot.address]
        value = memory.value.clone()
        value[:, slot.index] *= factor
        memory.set_(value)
    scaled = inspect_prompt(editable, PROMPT).prediction
    assert [one.id for one in view.prediction.top] == [one.id for one in scaled.top]
    assert view.prediction.max_probability == pytest.approx(scaled.max_probability, abs=1e-5)


@pytest.mark.parametrize(("family", "at"), [("llama", Address(1)), ("mixtral", Address(1, 2))])
def test_scaling_within_scaling_multiplies_and_an_error_undoes_it(family: str, at: Address) -> None:
    editable = zoo.build(family)
    memory, before, plain = editable.memories[at], zoo.snapshot(editable), zoo.logits(editable.model)
    with pytest.raises(KeyError), memory.scaled({5: 2.0}), memory.scaled({5: -3.0, 0: 0.0}):
        found = zoo.logits(editable.model)
        raise KeyError
    assert zoo.unchanged(editable, before) and torch.equal(zoo.logits(editable.model), plain)
    value = memory.value.clone()
    value[:, 5] *= -6
    value[:, 0] = 0
    memory.set_(value)
    assert not torch.allclose(found, plain, atol=1e-2)
    torch.testing.assert_close(found, zoo.logits(editable.model), rtol=1e-4, atol=1e-4)
    for index in (-1, 48):
        with pytest.raises(ModelError, match=rf"0 … 47, found {index};"), memory.scaled({index: 0.0}):
            pass


@pytest.mark.parametrize("words", ["1.2", "1.2=", "1.2=x", "1.2=nan", "1.2=inf", "=3", "1=3", "1.2=3=4"])
def test_turns_that_are_none_are_refused(words: str) -> None:
    with pytest.raises(EditError, match=r"L\.I"):
        parse_scalings([words])


def test_turns_are_read_and_may_not_repeat() -> None:
    assert parse_scalings(["1.2=0", "0.3=-1.5"]) == {MemoryIndex(Address(1), 2): 0.0, MemoryIndex(Address(0), 3): -1.5}
    assert parse_scalings(["1.0.2=3"]) == {MemoryIndex(Address(1, 0), 2): 3.0}
    with pytest.raises(EditError, match="twice"):
        parse_scalings(["1.2=0", "1.2=3"])
    with pytest.raises(EditError, match="twice"):
        check_scalings(zoo.shared("gpt2").memories, {"1.2": 0, "1.02": 3})
