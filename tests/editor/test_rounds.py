"""Values of several subjects are chosen again with all of them written, and are still one smallest change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from storing import AGAIN, BARE, BATCH, FACTS, SECOND, THIRD
from torch import Tensor
from writing import CORPUS, FACT, quick

from ffedit import Edit, Fact
from ffedit.editor import solve, value
from ffedit.editor.statistics import collect
from ffedit.editor.write import write as write_facts
from ffedit.files import cache
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

AT = Address(1)
# Strong and short of the target, so that a second round has something to add.
SHORT: dict[str, Any] = {**BARE, "steps": 3, "target_probability": 0.9}


def written(editable: Editable, edit: Edit) -> Tensor:
    """Multiply an edit's keys by the matrix with it, [d_model, n]."""
    return (editable.memories[AT].value.double() + edit.updates[AT].dense) @ edit.keys[AT]


@pytest.mark.parametrize("method", BATCH)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_two_rounds_are_two_edits_one_upon_the_other(family: str, method: str) -> None:
    """The change is linear in the values: Δ of v + δ' is Δ of v, and Δ' of δ' on the model with Δ."""
    editable = zoo.trained(family, True, torch.float64)
    stats = collect(editable, [editable.memories[1]], CORPUS)

    def write(rounds: int) -> Edit:
        config = quick(**SHORT, rounds=rounds, alphaedit_null_share=0.5)
        return write_facts(editable, FACTS, method, [1], config, stats)

    before = zoo.snapshot(editable)
    both, first = write(2), write(1)
    assert zoo.unchanged(editable, before)
    with first.applied(editable):
        second = write(1)
    assert second.norms()[AT] > 0.01 * first.norms()[AT], "the second round adds something"
    total = first.updates[AT].dense + second.updates[AT].dense
    torch.testing.assert_close(both.updates[AT].dense, total, rtol=1e-6, atol=1e-8)
    values = first.values[AT] + second.values[AT] - written(editable, first)
    torch.testing.assert_close(both.values[AT], values, rtol=1e-6, atol=1e-8)
    assert both.rank == first.rank
    for one, other in zip(both.provenance["solved"], second.provenance["solved"], strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"])


@pytest.mark.parametrize(("facts", "rounds", "times"), [([FACT], 3, 1), (FACTS, 1, 1), (FACTS, 3, 3)])
def test_values_are_chosen_in_as_many_rounds_as_asked_for_and_of_one_subject_once(
    facts: Sequence[Fact], rounds: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, real = [], solve.choose_values
    monkeypatch.setattr(solve, "choose_values", lambda *given: chosen.append(len(given[2])) or real(*given))
    write_facts(zoo.trained("gpt2", True), facts, "memit", [1], quick(**SHORT, rounds=rounds), CORPUS)
    assert chosen == [len(facts)] * times


BOTH = replace(FACT, also=(AGAIN.prompt,))
MIXED: dict[str, Any] = {"method": "rome", "family": "mixtral", "contexts": 6}


@pytest.mark.parametrize(
    ("begun", "other"),
    [
        ({"rounds": 2, "memit_ridge": 0.5}, {"rounds": 2}),
        ({"facts": [BOTH]}, {"facts": [FACT, replace(AGAIN, target=FACT.target)]}),
        ({**MIXED, "facts": [FACT, SECOND]}, {**MIXED, "facts": [FACT, THIRD]}),
    ],
    ids=["second round, other numbers", "the same texts as two facts", "other experts"],
)
def test_values_of_an_interrupted_edit_are_not_taken_by_another(
    begun: dict[str, Any], other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value, "SAVED_EVERY", 0.0)
    earlier = iter([solve.store] * (begun.get("rounds", 1) - 1))  # the last round is interrupted

    def write(facts: Sequence[Fact] = FACTS, method: str = "memit", family: str = "gpt2", **numbers: Any) -> Edit:
        return write_facts(zoo.trained(family, True), facts, method, [1], quick(**{**SHORT, **numbers}), CORPUS)

    def interrupted(*given: Any) -> None:
        if (store := next(earlier, None)) is None:
            raise KeyboardInterrupt
        store(*given)

    expected = write(**other)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(solve, "store", interrupted)
        write(**begun)
    assert list(cache.folder().glob("values/*")), "what was interrupted was kept"
    found = write(**other)
    assert found.fingerprint() == expected.fingerprint()
    assert found.provenance["solved"] == expected.provenance["solved"]
