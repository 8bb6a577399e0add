"""Two edits of the same weights add to one; what contradicts each other is refused before it does harm."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import zoo

from ffedit import Address, Edit, EditError, Fact
from ffedit.algebra.low_rank import Dense, LowRank
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


def three(editable: Editable) -> list[Edit]:
    return [made(editable, TOWER, 0, 0, 1), made(editable, RIVER, 1, 1, 2), made(editable, MOUNT, 2, 1)]


def test_changes_add_and_what_was_solved_for_is_joined() -> None:
    a, b, _ = three(zoo.shared("gpt2"))
    both = a + b
    assert both.facts == (TOWER, RIVER) and both.layers == [0, 1, 2] and both.rank == 2 and both.base == a.base
    middle = Address(1)
    torch.testing.assert_close(both.updates[middle].dense, a.updates[middle].dense + b.updates[middle].dense)
    assert isinstance(both.updates[middle], LowRank)
    for name in ("keys", "values"):
        joined = torch.cat([getattr(a, name)[middle], getattr(b, name)[middle]], 1)
        assert torch.equal(getattr(both, name)[middle], joined)
        assert torch.equal(getattr(both, name)[Address(0)], getattr(a, name)[Address(0)])
    for address, norm in both.norms().items():
        assert norm == pytest.approx(float(torch.linalg.matrix_norm(both.updates[address].dense)), rel=1e-12)


def test_the_sum_knows_its_parts() -> None:
    editable = zoo.shared("gpt2")
    a, b, c = three(editable)
    about = (a + b).provenance
    assert about["method"] == "sum" and about["base"] == a.base and about["model"] == "gpt2"
    assert [part["fingerprint"] for part in about["parts"]] == [a.fingerprint(), b.fingerprint()]
    assert [part["seed"] for part in about["parts"]] == [0, 1] and set(about["matrices"]) == {"0", "1", "2"}
    ratios = [norm / float(editable.memories[at].value.double().norm()) for at, norm in (a + b).norms().items()]
    assert about["norm_ratio"] == pytest.approx(max(ratios), rel=1e-5)
    left, right = (a + b) + c, a + (b + c)
    assert left.fingerprint() == right.fingerprint() and left.provenance == right.provenance
    assert len(left.provenance["parts"]) == 3 and left.rank == 3


def test_the_sum_does_what_both_do_and_is_saved(tmp_path: Path) -> None:
    editable = zoo.build("llama")
    a, b, _ = three(editable)
    (a + b).save(tmp_path / "sum")
    with Edit.load(tmp_path / "sum").applied(editable):
        at_once = zoo.snapshot(editable)
    with a.applied(editable), b.applied(editable):
        for name, tensor in zoo.snapshot(editable).items():
            torch.testing.assert_close(tensor, at_once[name], rtol=1e-6, atol=1e-6)
    a.apply_(editable)
    with pytest.raises(EditError, match="would apply it twice"):
        (a + b).apply_(editable)


def test_with_a_dense_change_the_sum_is_dense() -> None:
    a, b, _ = three(zoo.shared("gpt2"))
    tuned = dataclasses.replace(
        b, updates={at: Dense(delta.dense) for at, delta in b.updates.items()}, keys={}, values={}
    )
    for both in (a + tuned, tuned + a):
        assert isinstance(both.updates[Address(1)], Dense) and isinstance(both.updates[Address(0)], LowRank)
        torch.testing.assert_close(both.updates[Address(1)].dense, (a + b).updates[Address(1)].dense)
        assert torch.equal(both.keys[Address(1)], a.keys[Address(1)])


def test_edits_of_different_weights_do_not_add() -> None:
    a, b = made(zoo.shared("gpt2"), TOWER, 0, 1), made(zoo.shared("gpt_neo"), RIVER, 0, 1)
    with pytest.raises(EditError) as caught:
        _ = a + b
    assert a.base in str(caught.value) and b.base in str(caught.value) and "\n" not in str(caught.value)


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
    editable = zoo.shared("gpt2")
    with pytest.raises(EditError) as caught:
        _ = made(editable, TOWER, 0, 1) + made(editable, other, 1, 1)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_an_edit_that_writes_a_fact_twice_can_be_added_to_another() -> None:
    editable = zoo.shared("gpt2")
    again = Fact("Eiffel tower", "the {} is in", "Berlin")
    twice = dataclasses.replace(made(editable, TOWER, 0, 1), facts=(TOWER, again))  # one upon the other
    assert len((twice + made(editable, RIVER, 1, 1)).facts) == 3


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


def test_changes_of_other_shapes_do_not_add() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] and \[1, 4\]"):
        _ = Dense(torch.ones(3, 4)) + Dense(torch.ones(1, 4))
    with pytest.raises(ValueError, match="one shape"):
        _ = LowRank(torch.ones(3, 1), torch.ones(1, 4)) + LowRank(torch.ones(3, 1), torch.ones(1, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_matrix_is_known_by_a_few_of_its_stored_numbers(family: str, dtype: torch.dtype) -> None:
    memory = zoo.build(family, dtype=dtype).memories[1]
    known = identity(memory)
    stored = memory.module.state_dict()["weight"]
    assert known["shape"] == list(stored.shape) and known["transposed"] == (family == "gpt2")
    assert len(known["sample"]) == 64
    assert known["sample"] == stored.flatten()[:: stored.numel() // 64][:64].float().tolist()
