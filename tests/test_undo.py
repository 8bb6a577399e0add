"""An edit is applied on purpose, undone to the last bit, and leaves no trace when it fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from writing import CORPUS, FACT, SECOND, families, quick, write

from ffedit import EditError, Fact, FactError, cache, locate
from ffedit.api import edit as api_edit
from ffedit.editor import Corpus, rome
from ffedit.lowrank import LowRank

# Applying and undoing -----------------------------------------------------------------------------


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_restored_bit_for_bit(family: str, bos: bool, dtype: torch.dtype) -> None:
    editable = zoo.trained(family, bos, dtype)
    before, edit = zoo.snapshot(editable), write(editable)
    assert zoo.unchanged(editable, before), "nothing changes before the edit is applied"
    with edit.applied(editable):
        assert not zoo.unchanged(editable, before)
    assert zoo.unchanged(editable, before)
    with pytest.raises(ZeroDivisionError), edit.applied(editable):
        raise ZeroDivisionError
    assert zoo.unchanged(editable, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_write_is_rounded_once(dtype: torch.dtype) -> None:
    editable = zoo.trained("gpt2", dtype=dtype)
    memory, edit = editable.memories[1], write(editable)
    expected = (memory.value.double() + edit.updates[memory.address].dense).to(dtype)
    edit.apply_(editable)
    assert torch.equal(memory.value, expected) and torch.equal(memory.weight.detach(), expected.T)


def test_an_edit_is_applied_in_place_once_and_not_twice() -> None:
    editable = zoo.trained("llama")
    edit = write(editable)
    edit.apply_(editable)
    after = zoo.snapshot(editable)
    with pytest.raises(EditError, match="edited already"):
        edit.apply_(editable)
    with pytest.raises(EditError, match="edited already"), edit.applied(editable):
        pass
    assert zoo.unchanged(editable, after)


@pytest.mark.parametrize("other", [("gpt_neo", False), ("llama", True)])
def test_an_edit_of_another_model_is_refused(other: tuple[str, bool]) -> None:
    edit = write(zoo.trained("llama"))
    editable = zoo.trained(*other)
    before = zoo.snapshot(editable)
    with pytest.raises(EditError) as caught:
        edit.apply_(editable)
    assert "\n" not in str(caught.value) and zoo.unchanged(editable, before)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("saved", [torch.float32, torch.float16])
def test_numbers_that_the_weights_cannot_hold_are_never_written(number: float, saved: torch.dtype) -> None:
    editable = zoo.trained("llama")
    memory = dataclasses.replace(editable.memories[1], saved_dtype=saved)
    editable.memories._at[memory.address] = memory
    before, edit = zoo.snapshot(editable), write(editable)
    number = 1e5 if number == 1e39 and saved == torch.float16 else number
    left = torch.full_like(edit.updates[memory.address].left, number)
    bad = dataclasses.replace(edit, updates={memory.address: LowRank(left, torch.ones(1, memory.d_ff).double())})
    with pytest.raises(EditError, match="nothing was written"):
        bad.apply_(editable)
    assert zoo.unchanged(editable, before)


# When it fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_ctrl_c_leaves_the_model_as_it_was(share: float) -> None:
    editable, calls = zoo.trained("gpt_neo"), []
    rome(editable, [FACT, SECOND], 0, quick(), CORPUS, lambda *step: calls.append(step))
    before, wanted = zoo.snapshot(editable), round(share * (len(calls) - 1))
    seen: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        seen.append(stage)
        if len(seen) > wanted:
            raise KeyboardInterrupt

    for entry in cache.entries():
        entry.unlink()
    with pytest.raises(KeyboardInterrupt):
        rome(editable, [FACT, SECOND], 0, quick(), CORPUS, interrupt)
    assert zoo.unchanged(editable, before)
    assert all(parameter.requires_grad for parameter in editable.model.parameters())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in editable.model.modules()
    )


def test_a_second_fact_that_fails_takes_the_first_back() -> None:
    editable = zoo.trained("gpt_neo")
    before = zoo.snapshot(editable)
    with pytest.raises(FactError, match="does not know"):
        write(editable, FACT, Fact("Marie Curie", "{} stands in", target="東京"), layer=0)
    assert zoo.unchanged(editable, before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [7]}, "layers 0 to 2"),
        ({"layers": [-1]}, "layers 0 to 2"),
        ({"layers": [0, 1]}, "one layer"),
        ({"method": "magic", "layers": [0]}, "magic"),
        ({"facts": [], "layers": [0]}, "at least one"),
        ({"corpus": Corpus(Path("no-such-file.txt")), "layers": [0]}, "no-such-file.txt"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    editable = zoo.trained("llama")
    with pytest.raises(EditError) as caught:
        api_edit(editable, **{"facts": [FACT], "config": quick(), **options})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_layer_the_edit_goes_where_tracing_points() -> None:
    editable = zoo.trained("gpt_neo")
    edit = api_edit(editable, [FACT], config=quick(), corpus=CORPUS)
    assert edit.layers == [locate(editable, [FACT], seed=0).layer]
