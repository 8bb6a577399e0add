"""An edit is applied on purpose, undone to the last bit, and leaves no trace when it fails."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zoo
from writing import CORPUS, FACT, quick, write

from ffedit import Address, Edit, EditError, Fact, FactError, locate
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.api import edit as api_edit
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import KeyValueMemory


def thin(editable: Editable, seed: int, *layers: int) -> Edit:
    """An edit of rank one in each of `layers`, as an editor would give it for the weights as they are now."""
    g = torch.Generator().manual_seed(seed)
    updates = {}
    for layer in layers:
        d_out, d_in = editable.memories[layer].value.shape
        left, right = (torch.randn(*shape, generator=g).double() for shape in ((d_out, 1), (1, d_in)))
        updates[Address(layer)] = LowRank(left, right)
    facts = (Fact(f"subject {seed}", "{} is in", "Rome"),)
    return Edit(updates, {}, {}, facts, {"method": "test", "base": fingerprint(editable)})


def apart(family: str, dtype: torch.dtype) -> tuple[Editable, list[Edit]]:
    """A model and three edits of its weights that overlap in their layers."""
    editable = zoo.build(family, dtype=dtype)
    return editable, [thin(editable, 0, 0, 1), thin(editable, 1, 1, 2), thin(editable, 2, 1)]


# Applying and undoing -----------------------------------------------------------------------------


def test_an_edit_is_applied_in_place_once_and_not_twice() -> None:
    editable, (edit, *_) = apart("llama", torch.float32)
    before = zoo.snapshot(editable)
    edit.apply_(editable)
    after = zoo.snapshot(editable)
    assert not zoo.unchanged(editable, before)
    with pytest.raises(EditError, match="is applied already"):
        edit.apply_(editable)
    with pytest.raises(EditError, match="is applied already"), edit.applied(editable):
        pass
    assert zoo.unchanged(editable, after)


def test_originals_are_kept_once_and_let_go() -> None:
    editable, edits = apart("llama", torch.float32)
    edits[0].apply_(editable)
    kept = editable.history.originals[Address(1)]
    edits[1].apply_(editable)
    assert editable.history.originals[Address(1)] is kept and len(editable.history.originals) == 3
    edits[0].undo_(editable)
    assert set(editable.history.originals) == {Address(1), Address(2)}
    edits[1].undo_(editable)
    assert not editable.history.originals and not editable.history.edits


def test_undoing_an_edit_twice_or_before_it_is_applied_is_refused() -> None:
    editable, (first, second, _) = apart("llama", torch.float32)
    before = zoo.snapshot(editable)
    with pytest.raises(EditError, match="is not applied"):
        first.undo_(editable)
    first.apply_(editable)
    with pytest.raises(EditError, match=f"is not applied .*{first.fingerprint()}"):
        second.undo_(editable)
    first.undo_(editable)
    with pytest.raises(EditError, match="is not applied"):
        first.undo_(editable)
    assert zoo.unchanged(editable, before)


def test_an_edit_computed_upon_another_needs_it_when_it_is_applied() -> None:
    editable, (first, other, _) = apart("llama", torch.float32)
    before = zoo.snapshot(editable)
    first.apply_(editable)
    upon = thin(editable, 7, 1)
    upon.apply_(editable)
    with other.applied(editable):  # of the unedited weights, on top of both
        assert list(editable.history.edits) == [first.fingerprint(), upon.fingerprint(), other.fingerprint()]
    first.undo_(editable)
    expected = (before[editable.memories[1].parameter].double() + upon.updates[Address(1)].dense).float()
    assert torch.equal(editable.memories[1].value, expected)
    upon.undo_(editable)
    assert zoo.unchanged(editable, before)
    with pytest.raises(EditError, match="computed on weights"):
        upon.apply_(editable)


def test_the_same_fact_is_not_applied_from_two_edits() -> None:
    editable, (first, second, _) = apart("llama", torch.float32)
    first.apply_(editable)
    after = zoo.snapshot(editable)
    for facts, words in (
        (first.facts, "would apply it twice"),
        ((Fact("SUBJECT 0", "{} is in", "Berlin"),), "contradict each other: .*'Rome' .*'Berlin'"),
    ):
        with pytest.raises(EditError, match=words):
            dataclasses.replace(second, facts=facts).apply_(editable)
        assert zoo.unchanged(editable, after) and len(editable.history.edits) == 1


def test_a_write_that_is_interrupted_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, (first, second, _) = apart("gpt2", torch.bfloat16)
    first.apply_(editable)
    before, write_ = zoo.snapshot(editable), KeyValueMemory.write_

    def interrupt(self: KeyValueMemory, delta: Update) -> None:
        if self.address == Address(2):
            raise KeyboardInterrupt
        write_(self, delta)

    monkeypatch.setattr(KeyValueMemory, "write_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        second.apply_(editable)
    assert zoo.unchanged(editable, before) and list(editable.history.edits) == [first.fingerprint()]
    assert set(editable.history.originals) == set(first.updates)


@pytest.mark.parametrize("other", [("gpt_neo", False), ("llama", True)])
def test_an_edit_of_another_model_is_refused(other: tuple[str, bool]) -> None:
    _, (edit, *_) = apart("llama", torch.float32)
    editable = zoo.build(*other, seed=1)
    before = zoo.snapshot(editable)
    with pytest.raises(EditError) as caught:
        edit.apply_(editable)
    assert "\n" not in str(caught.value) and zoo.unchanged(editable, before)


@pytest.mark.parametrize(
    ("number", "saved"), [(float("nan"), torch.float32), (1e39, torch.float32), (1e5, torch.float16)]
)
def test_numbers_that_the_weights_cannot_hold_are_never_written(number: float, saved: torch.dtype) -> None:
    editable, (edit, *_) = apart("llama", torch.float32)
    memory = dataclasses.replace(editable.memories[1], saved_dtype=saved)
    editable.memories._at[memory.address] = memory
    before = zoo.snapshot(editable)
    left = torch.full_like(edit.updates[memory.address].left, number)
    bad = dataclasses.replace(edit, updates={memory.address: LowRank(left, torch.ones(1, memory.d_ff).double())})
    with pytest.raises(EditError, match="nothing was written"):
        bad.apply_(editable)
    assert zoo.unchanged(editable, before)


# When it fails ------------------------------------------------------------------------------------


def test_a_second_fact_that_fails_takes_the_first_back() -> None:
    editable = zoo.trained("gpt_neo")
    before = zoo.snapshot(editable)
    with pytest.raises(FactError, match="does not know"):
        write(editable, FACT, Fact("Marie Curie", "{} stands in", target="東京"), layer=0)
    assert zoo.unchanged(editable, before)


def test_without_a_layer_the_edit_goes_where_tracing_points() -> None:
    editable = zoo.trained("gpt_neo")
    edit = api_edit(editable, [FACT], config=quick(), stats=CORPUS)
    assert edit.layers == [locate(editable, FACT, seed=0).layer]
