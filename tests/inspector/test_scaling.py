"""Memories scaled down or up, what the slopes of such scalings are, and the ones to scale for another prediction."""

from __future__ import annotations

import mixing
import pytest
import torch
import zoo
from shown import shown
from torch import Tensor

from ffedit import EditError, MemoryIndex, ModelError
from ffedit.display.terminal.memories import prompt_view
from ffedit.inspector import scaling
from ffedit.inspector.prompt_view import inspect_prompt
from ffedit.inspector.scaling import parse_scalings, scaled_memories
from ffedit.model.editable import Editable
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


def log_p(editable: Editable, ids: Tensor, token: int, turns: dict[MemoryIndex, float]) -> float:
    with scaled_memories(editable.memories, turns), torch.no_grad():
        return float(editable.model(input_ids=ids).logits[0, -1].double().log_softmax(-1)[token])


# GPT-J's attention and Llama's norms count in float32, whatever the weights.
@pytest.mark.parametrize(("family", "near"), [("gpt2", 1e-5), ("opt", 1e-5), ("gptj", 3e-3), ("llama", 3e-3)])
def test_slopes_are_the_derivatives_of_the_measured_effect(family: str, near: float) -> None:
    editable = zoo.build(family, dtype=torch.float64)
    ids, step = torch.tensor([editable.tokenizer(PROMPT)["input_ids"]]), 2**-10
    found = scaling.slopes(editable, ids, 40)
    for address, slope in found.items():
        strongest = int(slope.abs().argmax())
        for slot in (MemoryIndex(address, strongest), MemoryIndex(address, 3)):
            up, down = (log_p(editable, ids, 40, {slot: 1 + by}) for by in (step, -step))
            assert float(slope[slot.index]) == pytest.approx((up - down) / (2 * step), rel=1e-3, abs=near)
    assert all(parameter.requires_grad for parameter in editable.model.parameters())


def test_the_memories_to_turn_are_ranked_and_measured() -> None:
    editable = zoo.shared("gpt_neo")
    ids = torch.tensor([editable.tokenizer(PROMPT)["input_ids"]])
    third = inspect_prompt(editable, PROMPT).prediction.top[2].token
    found = inspect_prompt(editable, PROMPT, promoted=third, top=3).promotion
    assert found is not None and (found.token.token, found.rank) == (third, 3) and len(found.turns) == 6
    token = found.token.id
    promises = [turn.predicted for turn in found.turns]
    assert promises == sorted(promises, reverse=True) and promises[-1] > 0
    slopes = scaling.slopes(editable, ids, token)
    assert promises[0] == pytest.approx(max(max(float(2 * s.max()), float(-s.min())) for s in slopes.values()))
    assert all(turn.factor == (3.0 if turn.slope > 0 else 0.0) for turn in found.turns)
    now, so_far = log_p(editable, ids, token, {}), {}
    for turn in found.turns:
        assert turn.gain == pytest.approx(log_p(editable, ids, token, {turn.slot: turn.factor}) - now, abs=1e-4)
        so_far[turn.slot] = turn.factor
        assert turn.together == pytest.approx(torch.tensor(log_p(editable, ids, token, so_far)).exp().item(), abs=1e-5)
    assert found.enough is not None and 1 <= found.enough <= found.tried
    ranking = scaling.ranked(slopes)
    for count, wins in ((found.enough, True), (found.enough - 1, False)):
        turns = {slot: scaling.factor_of(slope) for slot, slope in ranking[:count]}
        with scaled_memories(editable.memories, turns), torch.no_grad():
            assert (int(editable.model(input_ids=ids).logits[0, -1].argmax()) == token) is wins


def test_a_token_that_is_the_prediction_needs_no_turning() -> None:
    editable = zoo.shared("gpt2")
    said = inspect_prompt(editable, PROMPT).prediction.top[0].token
    view = inspect_prompt(editable, PROMPT, promoted=said)
    assert view.promotion is not None and view.promotion.enough == 0 and "already" in shown(prompt_view(view))


@pytest.mark.parametrize("works_from", [0, 1, 2, 5, 37, 100, 101])
def test_enough_is_found_by_doubling_and_halving(works_from: int) -> None:
    asked: list[int] = []

    def works(count: int) -> bool:
        asked.append(count)
        return count >= works_from

    assert scaling.smallest_count(works, 100) == (works_from if works_from <= 100 else None) and len(asked) < 20


@pytest.mark.parametrize("family", mixing.PLAIN)
def test_slopes_of_experts_are_the_derivatives_of_the_measured_effect(family: str) -> None:
    editable = zoo.build(family)
    ids, step = torch.tensor([editable.tokenizer(PROMPT)["input_ids"]]), 2**-7
    found = scaling.slopes(editable, ids, 40)
    assert set(found) == set(editable.memories)
    for address in sorted(found)[5:]:
        slot = MemoryIndex(address, int(found[address].abs().argmax()))
        up, down = (log_p(editable, ids, 40, {slot: 1 + by}) for by in (step, -step))
        # In float32, since grouped products know no other precision that is as fine.
        assert float(found[address][slot.index]) == pytest.approx((up - down) / (2 * step), rel=1e-2, abs=3e-3)


@pytest.mark.parametrize("words", ["1.2", "1.2=", "1.2=x", "1.2=nan", "1.2=inf", "=3", "1=3", "1.2=3=4"])
def test_turns_that_are_none_are_refused(words: str) -> None:
    with pytest.raises(EditError, match=r"L\.I"):
        parse_scalings([words])


def test_turns_are_read_and_may_not_repeat() -> None:
    assert parse_scalings(["1.2=0", "0.3=-1.5"]) == {MemoryIndex(Address(1), 2): 0.0, MemoryIndex(Address(0), 3): -1.5}
    assert parse_scalings(["1.0.2=3"]) == {MemoryIndex(Address(1, 0), 2): 3.0}
    with pytest.raises(EditError, match="twice"):
        parse_scalings(["1.2=0", "1.2=3"])
