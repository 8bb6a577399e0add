"""Memories of experts, turned down or up; and what the slopes of such turns are."""

from __future__ import annotations

import pytest
import torch
import zoo
from mixing import PLAIN, PROMPT
from torch import Tensor

from ffedit import MemoryIndex
from ffedit.errors import ModelError
from ffedit.inspector import scaling
from ffedit.inspector.prompt_view import inspect_prompt
from ffedit.inspector.scaling import scaled_memories
from ffedit.model.editable import Editable
from ffedit.model.memory import Address


@pytest.mark.parametrize("factor", [0.0, 3.0])
@pytest.mark.parametrize("family", PLAIN)
def test_turning_a_memory_is_scaling_its_value_and_leaves_nothing_behind(family: str, factor: float) -> None:
    editable = zoo.build(family)
    before, plain_view = zoo.snapshot(editable), inspect_prompt(editable, PROMPT)
    strongest = [one.slot for layer in plain_view.layers for one in layer.firing[:2]]
    view = inspect_prompt(editable, PROMPT, scaled=dict.fromkeys(strongest, factor))
    assert zoo.unchanged(editable, before)
    assert view.untouched == plain_view.prediction != view.prediction
    for slot in strongest:
        memory = editable.memories[slot.address]
        value = memory.value.clone()
        value[:, slot.index] *= factor
        memory.set_(value)
    scaled = inspect_prompt(editable, PROMPT).prediction
    assert [one.id for one in view.prediction.top] == [one.id for one in scaled.top]
    assert view.prediction.max_probability == pytest.approx(scaled.max_probability, abs=1e-5)


def test_turns_inside_turns_multiply_and_an_error_undoes_them() -> None:
    editable = zoo.build("mixtral")
    memory, before = editable.memories[Address(1, 2)], zoo.snapshot(editable)
    column = memory.value[:, 5].clone()
    with pytest.raises(KeyError), memory.scaled({5: 2.0}), memory.scaled({5: -3.0, 0: 0.0}):
        assert torch.equal(memory.value[:, 5], -6 * column) and not memory.value[:, 0].any()
        raise KeyError
    assert zoo.unchanged(editable, before)
    with pytest.raises(ModelError, match="0 … 47"), memory.scaled({48: 0.0}):
        pass


def log_p(editable: Editable, ids: Tensor, slot: MemoryIndex, factor: float) -> float:
    with scaled_memories(editable.memories, {slot: factor}), torch.no_grad():
        return float(editable.model(input_ids=ids).logits[0, -1].double().log_softmax(-1)[40])


@pytest.mark.parametrize("family", PLAIN)
def test_slopes_are_the_derivatives_of_the_measured_effect(family: str) -> None:
    editable = zoo.build(family)
    ids, step = torch.tensor([editable.tokenizer(PROMPT)["input_ids"]]), 2**-7
    found = scaling.slopes(editable, ids, 40)
    assert set(found) == set(editable.memories)
    for address in sorted(found)[5:]:
        slot = MemoryIndex(address, int(found[address].abs().argmax()))
        up, down = (log_p(editable, ids, slot, 1 + by) for by in (step, -step))
        # In float32, since grouped products know no other precision that is as fine.
        assert float(found[address][slot.index]) == pytest.approx((up - down) / (2 * step), rel=1e-2, abs=3e-3)
