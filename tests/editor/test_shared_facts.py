"""Facts that two edits share: what contradicts each other is refused before it does harm."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zoo

from ffedit import Address, Edit, EditError, Fact
from ffedit.algebra.low_rank import LowRank
from ffedit.facts.fact import conflicts, same_question
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import identity

TOWER = Fact("Eiffel tower", "the {} is in", "Rome", relation="P276")
RIVER = Fact("Nile river", "the {} is in", "Spain", relation="P276")
MOUNT = Fact("Mount Everest", "the {} is in", "Italy", relation="P276")


def made(editable: Editable, fact: Fact, seed: int, *layers: int) -> Edit:
    """A rank-one edit of `layers`, with one key and one value in each."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).double()

    shapes = {Address(layer): editable.memories[layer].value.shape for layer in layers}
    return Edit(
        {at: LowRank(random(d_out, 1), random(1, d_in)) for at, (d_out, d_in) in shapes.items()},
        {at: random(d_in, 1) for at, (_, d_in) in shapes.items()},
        {at: random(d_out, 1) for at, (d_out, _) in shapes.items()},
        (fact,),
        {
            "method": "rome",
            "model": editable.name,
            "base": fingerprint(editable),
            "seed": seed,
            "matrices": {str(at): identity(editable.memories[at]) for at in shapes},
            "norms": {str(at): float(editable.memories[at].value.norm()) for at in shapes},
        },
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Fact("EIFFEL Tower", "the {} is in", "Berlin"), ["contradict", "'Rome'", "'Berlin'", "leave one"]),
        (Fact("Eiffel tower", "{} stands in", "Berlin", relation="P276"), ["contradict", "stands in", "'Berlin'"]),
        (Fact("Eiffel tower", "the Eiffel tower is in", "rome"), ["would apply it twice", "Eiffel tower is in"]),
        (TOWER, ["would apply it twice", "leave the fact out"]),
    ],
)
def test_a_fact_of_both_is_refused(other: Fact, words: list[str]) -> None:
    editable = zoo.build("gpt2")
    edit = made(editable, other, 1, 1)
    made(editable, TOWER, 0, 1).apply_(editable)
    with pytest.raises(EditError) as caught:
        edit.apply_(editable)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_an_edit_that_writes_a_fact_twice_can_be_applied_with_another() -> None:
    editable = zoo.build("gpt2")
    again = Fact("Eiffel tower", "the {} is in", "Berlin")
    twice = dataclasses.replace(made(editable, TOWER, 0, 1), facts=(TOWER, again))  # one upon the other
    with twice.applied(editable), made(editable, RIVER, 1, 1).applied(editable):
        assert len(editable.history.known) == 2


def test_a_question_is_the_same_by_prompt_or_by_relation() -> None:
    berlin = Fact("the Eiffel  Tower", "{} stands in", "Berlin", relation="P276")
    named = Fact("the eiffel tower", "{} is  IN", "Rome", relation="P276")
    asked = Fact("the Eiffel tower", "{} is in", "Madrid")
    alone = Fact("the Eiffel tower", "{} speaks", "French", relation="P103")
    nothing = Fact("the Eiffel tower", "{} is in")
    facts = [named, nothing, alone, berlin, asked, RIVER]
    assert same_question(facts) == [(0, 3), (0, 4)]
    assert conflicts(facts) == [(named, berlin), (named, asked)]
    assert conflicts([named, named, RIVER, MOUNT]) == [] and same_question([named, named]) == [(0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_matrix_is_known_by_a_few_of_its_stored_numbers(family: str, dtype: torch.dtype) -> None:
    memory = zoo.build(family, dtype=dtype).memories[1]
    known = identity(memory)
    stored = memory.module.state_dict()["weight"]
    assert known["shape"] == list(stored.shape) and known["transposed"] == (family == "gpt2")
    assert len(known["sample"]) == 64
    assert known["sample"] == stored.flatten()[:: stored.numel() // 64][:64].float().tolist()
